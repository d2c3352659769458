"""The reward stage: order, retries, deadlines, processes and errors."""

import argparse
import asyncio
import os
import subprocess
import sys
import time
import types
from typing import Any

import psutil
import pytest

from rlpipe.config.data import MathReward, NoReward, PythonReward, ReasoningGymReward, RewardConfig
from rlpipe.errors import ConfigError, DeadlineExceeded, RewardError
from rlpipe.rewards.reasoning_gym import make_task, scoring_record
from rlpipe.rewards.reward_rows import RewardRow, score
from rlpipe.types import Sample, Status

KINDS = pytest.mark.parametrize(
    ("kind", "workers"),
    [("def", 0), ("async def", 0), pytest.param("def", 2, marks=pytest.mark.integration)],
    ids=["thread", "loop", "process"],
)


def samples(groups=3, per_group=2, **keys):
    return [
        Sample(
            f"g{group}",
            index,
            "",
            [1],
            **{"status": Status.COMPLETED, "response": f"{group}{index}", **keys},
        )
        for group in range(groups)
        for index in range(per_group)
    ]


@pytest.fixture
def hook(tmp_path):
    """Return a function that makes a reward config from a function body."""

    def make(body, kind="def", *, group=False, **keys):
        path = tmp_path / "mine.py"
        lines = "\n    ".join(body.splitlines())
        path.write_text(f"import asyncio, os, pathlib, time\n{kind} reward(x):\n    {lines}\n")
        function = PythonReward(type="python", path=f"{path}:reward", group=group)
        return RewardConfig(
            function=function, max_error_fraction=keys.pop("max_error_fraction", 1.0), **keys
        )

    return make


def worker_processes(parent=None):
    processes = (parent or psutil.Process()).children()
    return [
        process for process in processes if "rlpipe.rewards.worker_process" in process.cmdline()
    ]


def wait_for_workers(parent, count):
    deadline = time.monotonic() + 60
    while len(processes := worker_processes(parent)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return processes


@KINDS
async def test_rows_come_in_the_order_of_the_samples(hook, kind, workers):
    seen = []
    config = hook("return int(x.response)", kind, workers=workers)
    rows = await score(
        samples(), config, progress=lambda completed, total: seen.append((completed, total))
    )
    assert rows == [RewardRow(f"g{g}", i, float(10 * g + i)) for g in range(3) for i in range(2)]
    # The first report comes before the first result, which a function that hangs never gives.
    assert (seen[0], seen[-1]) == ((0, 6), (6, 6))
    assert not worker_processes()


@KINDS
async def test_an_error_belongs_to_its_row_and_is_never_0(hook, kind, workers):
    rows = await score(samples(), hook("return 1 / int(x.response)", kind, workers=workers))
    assert rows[0].reward is None
    error = str(rows[0].error)
    assert error.startswith("ZeroDivisionError: division by zero (")
    assert error.endswith("/mine.py:3: return 1 / int(x.response))")
    assert [row.reward for row in rows[1:]] == [1.0, 1 / 10, 1 / 11, 1 / 20, 1 / 21]


@KINDS
async def test_a_verifier_that_exits_is_an_error_of_its_row_without_a_wait(hook, kind, workers):
    config = hook(
        "if x.response == '00':\n    raise SystemExit(3)\nreturn 1.0", kind, workers=workers
    )
    rows = await score(samples(2, 1), config)
    assert [row.reward for row in rows] == [None, 1.0]
    assert "SystemExit: 3" in str(rows[0].error)


@pytest.mark.integration
async def test_a_sample_that_the_reward_process_cannot_unpickle_is_an_error(
    hook, monkeypatch: pytest.MonkeyPatch
):
    module: Any = types.ModuleType("only_here")
    module.Unknown = type("Unknown", (), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    bad, good = samples(2, 1)
    bad.metadata["extra"] = module.Unknown()
    rows = await score([bad, good], hook("return 1.0", workers=1))
    assert [row.reward for row in rows] == [None, 1.0]
    assert "No module named 'only_here'" in str(rows[0].error)


@KINDS
async def test_a_late_call_is_named_and_the_other_rows_are_scored(hook, kind, workers):
    wait = "await asyncio.sleep(60)" if kind == "async def" else "time.sleep(60)"
    config = hook(
        f"if x.response == '10': {wait}\nreturn 1", kind, workers=workers, sample_timeout_s=0.3
    )
    started = time.monotonic()
    rows = await score(samples(), config)
    assert time.monotonic() - started < 30
    assert [row.reward for row in rows] == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert "reward/g1/0: the verifier did not answer" in (rows[2].error or "")
    assert not worker_processes()


@KINDS
async def test_the_whole_stage_has_a_deadline(hook, kind, workers):
    wait = "await asyncio.sleep(60)" if kind == "async def" else "time.sleep(60)"
    config = hook(f"if x.index: {wait}\nreturn 1", kind, workers=workers, timeout_s=2.0)
    with pytest.raises(DeadlineExceeded, match=r"of 6 rows scored[\s\S]*reward.timeout_s"):
        await score(samples(), config)
    assert not worker_processes()


async def test_on_error_sets_the_reward_and_keeps_the_error(hook):
    rows = await score(samples(1, 1), hook("return 1 / 0", on_error=-0.5))
    (row,) = rows
    assert row.reward == -0.5
    assert str(row.error).startswith("ZeroDivisionError: division by zero (")


@KINDS
async def test_a_failed_call_is_repeated_up_to_the_number_of_attempts(
    hook, tmp_path, kind, workers
):
    body = f"""
p = pathlib.Path({str(tmp_path)!r}, x.response)
n = len(p.read_text()) if p.exists() else 0
p.write_text('.' * (n + 1))
if n < 2: raise OSError('busy')
return n
""".strip()
    config = hook(body, kind, workers=workers, attempts=2)
    (row,) = await score(samples(1, 1), config)
    assert str(row.error).startswith("OSError: busy (")
    assert [row.reward for row in await score(samples(1, 1), config)] == [2.0]


async def test_a_group_is_one_call_and_its_error_belongs_to_all_its_rows(hook):
    body = (
        "if x[0].group_id == 'g1': raise ValueError(len(x))\nreturn [len(x) + s.index for s in x]"
    )
    rows = await score(samples(), hook(body, group=True))
    assert [row.reward for row in rows] == [2.0, 3.0, None, None, 2.0, 3.0]
    assert [str(row.error).partition(" (")[0] for row in rows[2:4]] == ["ValueError: 2"] * 2


async def test_group_calls_collect_samples_from_any_position(hook):
    mixed = samples()[::2] + samples()[1::2]
    rows = await score(mixed, hook("return [int(s.response) for s in x]", group=True))
    assert [(row.group_id, row.index, row.reward) for row in rows] == [
        (s.group_id, s.index, float(s.response)) for s in mixed
    ]


async def test_too_many_errors_fail_the_stage(hook):
    config = hook("return 1 / x.index", max_error_fraction=0.5)
    assert len(await score(samples(), config)) == 6
    config = config.model_copy(update={"max_error_fraction": 0.49})
    with pytest.raises(
        RewardError, match=r"failed for 3 of 6[\s\S]*Zero[\s\S]*sample 0 of group g0"
    ):
        await score(samples(), config)


@pytest.mark.parametrize("name", ["samples", "sample"])
async def test_a_function_of_groups_that_gets_one_sample_is_explained(tmp_path, name):
    file = tmp_path / "mine.py"
    file.write_text(f"async def score(args, {name}): return [1.0 for each in {name}]\n")
    config = RewardConfig(function=PythonReward(type="python", path=f"{file}:score"))
    with pytest.raises(RewardError, match="correct ") as caught:
        await score(samples(), config, args=argparse.Namespace())
    assert ("reward.function.group=true" in str(caught.value.do)) == (name == "samples")


async def test_samples_that_were_not_generated_are_not_scored(hook):
    config = hook("return 1", max_error_fraction=0.0)
    for status in (Status.PENDING, Status.ABORTED, Status.FAILED):
        assert await score(samples(1, 1, status=status), config) == [RewardRow("g0", 0)]
    assert (await score(samples(1, 1, status=Status.TRUNCATED), config))[0].reward == 1.0
    assert await score([], config) == []


async def test_supervised_rows_have_no_reward():
    assert await score(
        samples(1, 1), RewardConfig(function=NoReward(type="none"), max_error_fraction=0.0)
    ) == [RewardRow("g0", 0)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.integration)])
async def test_a_function_that_cannot_be_loaded_is_a_config_error(hook, workers):
    config = hook("return 1", workers=workers)
    function = config.function.model_copy(update={"path": config.function.path + "d"})
    with pytest.raises(ConfigError, match="nearest: reward"):
        await score(samples(), config.model_copy(update={"function": function}))
    assert not worker_processes()


async def test_async_calls_run_at_the_same_time(hook):
    started = time.monotonic()
    rows = await score(samples(32, 2), hook("await asyncio.sleep(0.5)\nreturn 1", "async def"))
    assert time.monotonic() - started < 10
    assert all(row.reward == 1.0 for row in rows)


@pytest.mark.integration
async def test_a_dead_process_is_an_error_and_the_next_call_gets_a_new_one(hook):
    config = hook("print('noise')\nif x.response == '10': os._exit(7)\nreturn 1", workers=1)
    rows = await score(samples(), config)
    assert [row.reward for row in rows] == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    assert "the reward process died" in (rows[2].error or "")
    assert "exit status 7" in (rows[2].error or "")


@pytest.mark.integration
async def test_cancelling_the_stage_ends_its_processes(hook):
    task = asyncio.create_task(score(samples(), hook("time.sleep(60)", workers=2)))
    await asyncio.to_thread(wait_for_workers, psutil.Process(), 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not worker_processes()


@pytest.mark.integration
@pytest.mark.parametrize(
    "body", ["time.sleep(600)", "9 ** 9 ** 9 ** 9"], ids=["sleeping", "holding the interpreter"]
)
def test_a_worker_process_ends_when_its_parent_is_killed_during_a_call(tmp_path, body):
    (tmp_path / "mine.py").write_text(
        f"import time\nn = 9\ndef reward(x): {body.replace('9 ', 'n ')}\n"
    )
    code = f"""
import asyncio
from rlpipe.config.data import PythonReward, RewardConfig
from rlpipe.rewards.reward_rows import score
from rlpipe.types import Sample, Status
function = PythonReward(type="python", path={str(tmp_path / "mine.py")!r})
sample = Sample("g", 0, "", [1], status=Status.COMPLETED)
asyncio.run(score([sample], RewardConfig(function=function, workers=1)))
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    watched = psutil.Process(parent.pid)
    processes = wait_for_workers(watched, 1)
    time.sleep(1.0)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        process.kill()
    assert alive == []


@pytest.mark.integration
async def test_a_hanging_comparison_is_ended_outside_the_main_thread():
    hard = "\\boxed{9^{9^{9^{9}}}}"
    easy = "so it is $4$"
    rows = samples(3, 1, label="4")
    rows[0].response = easy
    rows[1].response = hard
    rows[2].response = easy
    config = RewardConfig(
        function=MathReward(type="math"), sample_timeout_s=5.0, max_error_fraction=1.0
    )
    first, second, third = await asyncio.to_thread(lambda: asyncio.run(score(rows, config)))
    assert (first.reward, third.reward) == (1.0, 1.0)
    assert second.reward is None
    assert "did not answer" in (second.error or "")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.integration)])
async def test_reasoning_gym_scores_a_batch(workers):
    task = make_task("spell_backward", {"min_word_len": 3, "max_word_len": 7}, seed=0, size=64)
    batch = []
    for number in range(64):
        entry = task[number]
        batch += [
            Sample(
                f"g{number}",
                0,
                "",
                [1],
                metadata=scoring_record("spell_backward", {}, entry),
                response=entry["answer"],
            ),
            Sample(
                f"g{number}",
                1,
                "",
                [1],
                metadata=scoring_record("spell_backward", {}, entry),
                response="no",
            ),
        ]
    for sample in batch:
        sample.status = Status.COMPLETED
    rows = await score(
        batch,
        RewardConfig(
            function=ReasoningGymReward(type="reasoning_gym"),
            workers=workers,
            max_error_fraction=0.0,
        ),
    )
    assert [row.reward for row in rows] == [1.0, 0.0] * 64
    assert all("score" in row.parts for row in rows)


FORKS_AND = """
if x.response == '10':
    if os.fork() == 0:
        {in_fork}
    os.wait()
return int(x.response)
""".strip()


@pytest.mark.integration
@pytest.mark.parametrize(
    "in_fork",
    [
        "raise ValueError('in the fork')",
        "return 1000",
        "import sys; sys.exit(0)",
        "raise KeyboardInterrupt",
        "os._exit(0)",
    ],
    ids=["raises", "returns", "exits", "is interrupted", "ends itself"],
)
async def test_a_forking_function_leaves_every_reward_on_its_row(hook, in_fork):
    rows = await score(samples(), hook(FORKS_AND.format(in_fork=in_fork), workers=1))
    assert [(row.reward, row.error) for row in rows] == [
        (float(sample.response), None) for sample in samples()
    ]
    assert not worker_processes()


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_fork_in_the_stages_process_does_not_run_the_stage_twice(tmp_path, kind):
    (tmp_path / "mine.py").write_text(
        f"""
import os
{kind} reward(x):
    if x.index == 1 and os.fork() == 0:
        raise ValueError
    return x.index
"""
    )
    code = f"""
import asyncio
from rlpipe.config.data import PythonReward, RewardConfig
from rlpipe.rewards.reward_rows import score
from rlpipe.types import Sample, Status
function = PythonReward(type="python", path={str(tmp_path / "mine.py")!r})
samples = [Sample("g", n, "", [1], status=Status.COMPLETED) for n in range(4)]
rows = asyncio.run(score(samples, RewardConfig(function=function)))
print([row.reward for row in rows], flush=True)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert completed.stdout.splitlines() == ["[0.0, 1.0, 2.0, 3.0]"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("os.closerange(3, 256)", "exit status 71"),
        (
            "os.closerange(3, 256)\n    open('/dev/null'), open('/dev/null'), open('/dev/null')",
            "exit status 71",
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("raise ValueError('x' * 10**7)", "10000000 characters"),
        ("return {str(n): 1.0 for n in range(10**5)}", "too many reward parts"),
        ("return list(range(10**6))", "not a finite number"),
        ("return type('Odd', (float,), {'__float__': lambda self: 1 / 0})()", "ZeroDivisionError"),
    ],
)
async def test_any_failure_of_a_function_is_the_error_of_its_row_only(hook, body, text):
    rows = await score(
        samples(), hook(f"if x.response == '10':\n    {body}\nreturn int(x.response)", workers=1)
    )
    assert [row.reward for row in rows] == [0.0, 1.0, None, 11.0, 20.0, 21.0]
    assert text in (rows[2].error or "")
    assert len(rows[2].error or "") < 4000


@pytest.mark.integration
async def test_output_input_and_subprocesses_of_a_function_do_not_change_answers(hook):
    body = "import subprocess, sys\nprint('noise', flush=True)\nos.write(1, b'more' * 100)\n"
    body += (
        "text = sys.stdin.read() + subprocess.run(['cat'], capture_output=True, text=True).stdout\n"
    )
    body += "subprocess.run(['echo', 'noise'])\nreturn int(x.response) if text == '' else 1000"
    rows = await score(samples(), hook(body, workers=1, sample_timeout_s=20))
    assert [row.reward for row in rows] == [float(sample.response) for sample in samples()]


@pytest.mark.integration
@pytest.mark.parametrize("ends", ["return 1", "os._exit(7)"])
async def test_processes_that_a_function_leaves_running_end_with_its_process(hook, tmp_path, ends):
    leave = f"""
pid = os.fork()
if pid == 0:
    time.sleep(600)
pathlib.Path({str(tmp_path)!r}, 'left').write_text(str(pid))
""".lstrip()
    started = time.monotonic()
    rows = await score(samples(1, 1), hook(leave + ends, workers=1, sample_timeout_s=60))
    assert time.monotonic() - started < 30, "the call waited for a process that holds the pipe"
    assert [row.reward for row in rows] == ([1.0] if ends == "return 1" else [None])
    left_pid = int((tmp_path / "left").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(left_pid) and psutil.Process(left_pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process still runs"
        await asyncio.sleep(0.05)


@pytest.mark.integration
async def test_an_answer_to_another_call_is_an_error_and_never_a_reward(hook, tmp_path):
    """The function writes an answer of call 1 to the pipe before the answer of call 2."""
    body = """
import pickle, struct
from rlpipe.rewards.scorer import Score
if x.response == '10':
    content = pickle.dumps([Score(1000.0)])
    frame = struct.pack('<QQ', 1, len(content)) + content
    for fd in range(3, 64):
        try:
            if os.readlink(f'/proc/self/fd/{fd}').startswith('pipe:'):
                os.write(fd, frame)
        except OSError:
            pass
return int(x.response)
""".strip()
    rows = await score(samples(), hook(body, workers=1))
    assert [row.reward for row in rows] == [0.0, 1.0, None, 11.0, 20.0, 21.0]
    assert "answered another call" in (rows[2].error or "")


@pytest.mark.parametrize(
    "error", ["KeyboardInterrupt", "SystemExit(0)", "asyncio.CancelledError()", "GeneratorExit()"]
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_function_that_ends_python_is_an_error_of_its_row(hook, kind, error):
    rows = await score(
        samples(2, 1),
        hook(f"if x.response == '00': raise {error}\nreturn 1", kind, sample_timeout_s=5),
    )
    assert [row.reward for row in rows] == [None, 1.0]
    assert error.partition("(")[0].rpartition(".")[2] in (rows[0].error or "")


async def test_an_async_function_that_catches_its_cancellation_is_late(hook):
    body = """
while x.response == '00':
    try: await asyncio.sleep(60)
    except asyncio.CancelledError: x.index += 1
    if x.index > 1: return 0
return 1
""".strip()
    started = time.monotonic()
    rows = await score(samples(2, 1), hook(body, "async def", sample_timeout_s=0.2))
    assert time.monotonic() - started < 20
    assert [row.reward for row in rows] == [None, 1.0]
