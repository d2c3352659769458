"""Files of the user are imported in a process of their own first (rlpipe.config.trial)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from rlpipe.config import trial as module
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.config.trial import trial, user_files
from rlpipe.errors import ConfigError

REWARD = "def reward(sample):\n    return 1.0\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_well", set())
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def config(place: Path, **sections: object) -> RunConfig:
    values = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "made", "maker": f"{place}/mine.py:reward"}},
        "data": {"prompts": {"type": "reasoning_gym", "task": "spell_backward", "size": 1}},
        "rollout": {"rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "python", "path": f"{place}/mine.py:reward"}},
    }
    return validate({**values, **sections})


def run_trial(config: RunConfig, timeout_s: float = 60.0) -> None:
    with trial(config, timeout_s) as importing:
        importing.wait()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import sys; sys.exit(0)", "the file ends Python: SystemExit: 0"),
        ("import os; os._exit(0)", "ended the process that imported it: exit status 0"),
        ("raise ValueError('odd')", r"ValueError: odd \(.*mine\.py:3\)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        (
            "import os; print('before the end', flush=True); os.kill(os.getpid(), 9)",
            r"killed by SIGKILL\s+before the end",
        ),
        (
            "import os\nif os.fork() == 0: raise ValueError",
            r"forks while it is imported[\s\S]*os\.fork",
        ),
        (
            "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
            "forks while it is imported",
        ),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "printed more than 8 MiB"),
        ("import os; os.closerange(3, 256)", "ended the process"),
        (
            "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
            "message cannot be read",
        ),
        ("import no_such_package", "no_such_package"),
        ("def reward(", "SyntaxError"),
    ],
)
def test_whatever_a_file_does_while_it_is_imported_is_an_error_that_names_it(
    place: Path, code: str, found: str
):
    (place / "mine.py").write_text(f"{REWARD}{code}\n")
    with pytest.raises(ConfigError, match=found) as caught:
        run_trial(config(place))
    assert caught.value.where is not None
    assert caught.value.where.endswith(f"{place}/mine.py:reward")


@pytest.mark.parametrize(
    "code",
    ["import time; time.sleep(600)", "while True: pass", "9 ** 9 ** 9 ** 9 if __name__ else 0"],
)
def test_a_file_that_is_never_done_is_an_error_after_the_deadline(place: Path, code: str):
    (place / "mine.py").write_text(f"{REWARD}n = 9\n{code.replace('9 **', 'n **')}\n")
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=r"still being imported[\s\S]*within 3 s \(resources\.import_timeout_s\)"
    ):
        run_trial(config(place), 3.0)
    assert time.monotonic() - started < 30


def test_a_class_is_made_with_its_arguments_and_what_it_does_is_an_error(place: Path):
    (place / "mine.py").write_text(
        "import os\nclass reward:\n    def __init__(self, status): os._exit(status)\n"
    )
    function = {"type": "python", "path": f"{place}/mine.py:reward", "arguments": {"status": 7}}
    with pytest.raises(ConfigError, match="exit status 7"):
        run_trial(
            config(
                place,
                model={"source": {"type": "huggingface", "hf_checkpoint": "/"}},
                reward={"function": function},
            )
        )


def test_well_files_pass_together_are_not_tried_again_and_leave_nothing_behind(place: Path):
    (place / "mine.py").write_text(
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print('noise')\n{REWARD}"
    )
    (place / "log.py").write_text("def log(*all): ...\n")
    both = config(place, observe={"custom_rollout_log_function_path": f"{place}/log.py"})
    before = set(psutil.Process().children(recursive=True))
    run_trial(both)
    assert len(module._well) == 3
    assert set(psutil.Process().children(recursive=True)) <= before
    with trial(both, 60.0) as importing:
        assert importing._process is None
    (place / "log.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        run_trial(both)


def test_every_function_that_a_configuration_names_is_tried(place: Path):
    mine = f"{place}/mine.py"
    python = {"type": "python", "path": mine}
    rollout = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "rollout_sample_hook_path": [mine, mine],
        "dynamic_sampling_filter_path": mine,
        "data_source_path": mine,
        "tools": [{"path": mine, "arguments": {"a": 1}}],
    }
    held = {
        "name": "held",
        "prompts": {"type": "reasoning_gym", "task": "spell_backward", "size": 1},
        "reward": {"function": python},
    }
    found = config(
        place,
        rollout=rollout,
        evaluation={"datasets": [held]},
        train={
            "custom_megatron_init_path": mine,
            "loss": {"use_tis": True, "custom_tis_function_path": mine},
        },
        observe={"custom_eval_rollout_log_function_path": mine},
    )
    assert {file.key for file in user_files(found)} == {
        "model.source.maker",
        "reward.function.path",
        "evaluation.datasets.0.reward.function.path",
        "rollout.rollout_sample_hook_path",
        "rollout.dynamic_sampling_filter_path",
        "rollout.data_source_path",
        "rollout.tools.0.path",
        "train.custom_megatron_init_path",
        "train.loss.custom_tis_function_path",
        "observe.custom_eval_rollout_log_function_path",
    }


def test_code_of_this_project_and_a_run_without_user_code_start_no_process(place: Path):
    own = {
        "source": {
            "type": "made",
            "maker": "deployments/recipes/tiny_models.py:make_spell_backward_model",
        }
    }
    with trial(config(place, model=own, reward={"function": {"type": "math"}}), 60.0) as importing:
        assert importing._process is None


def test_the_process_imports_no_torch(place: Path):
    (place / "mine.py").write_text(
        f"import sys\nheavy = {{'torch', 'ray', 'prefect', 'transformers'}} & set(sys.modules)\nassert not heavy, heavy\n{REWARD}"
    )
    run_trial(config(place))
    assert "rlpipe.config.trial" in sys.modules
