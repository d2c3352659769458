"""User functions for whole rollouts, data sources and the buffer, on a real store: every group is
accounted for."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.data import DataConfig, RewardConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.source import DataSource
from rlpipe.data.user_source import BufferFilter, CustomSource
from rlpipe.errors import ConfigError, DataError, HookError
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.rollout.hooks.rollout_function import RolloutFunction, load_rollout_function
from rlpipe.rollout.hooks.sample_checks import Limits
from rlpipe.rollout.planner import Planner
from rlpipe.rollout.rollout_rows import MemoryRows, StoredRows
from rlpipe.rollout.sampler import RolloutResult
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import DataState, Sample, Status
from tests.data.test_source import FILE, LETTERS, rows

ARGS = Namespace(rollout_batch_size=2)
REWARD = RewardConfig.model_validate({"function": {"type": "math"}})


def _planner(tmp_path: Path, *, source: str = "", choose: str = "", **rollout: Any) -> Planner:
    config = RolloutConfig(
        rollout_batch_size=2, n_samples_per_prompt=2, rollout_function_path="x.y", **rollout
    )
    data = DataSource(
        rows(9),
        LETTERS,
        DataConfig(prompts=FILE, rollout_shuffle=False),
        config,
        "b",
        async_buffer_size=9,
    )
    (tmp_path / "mine.py").write_text(source + choose)
    path = tmp_path / "mine.py"
    return Planner(
        data,
        config,
        Files(tmp_path / "store"),
        custom=CustomSource(f"{path}:Source", ARGS) if source else None,
        choose=BufferFilter(f"{path}:choose", ARGS) if choose else None,
    )


def _function(tmp_path: Path, body: str, iteration: int = 0) -> RolloutFunction:
    path = tmp_path / f"rollout{iteration}.py"
    lines = "\n    ".join(body.strip().splitlines())
    path.write_text(
        "def finish(groups):\n    for group in groups:\n        for sample in group:\n"
        "            sample.tokens += [7]\n    return groups\n"
        "def generate_rollout(args, rollout_id, data_source, evaluation=False):\n"
        f"    {lines}\n"
    )
    function = load_rollout_function(str(path))
    return RolloutFunction(
        function,
        "mine",
        ARGS,
        Journal(),
        Limits(1000, 50),
        iteration=iteration,
        timeout_s=20,
        reward=REWARD,
    )


async def _run(
    tmp_path: Path, planner: Planner, body: str, k: int, state: DataState
) -> tuple[RolloutResult, StoredRows]:
    stored = StoredRows(Files(tmp_path / "store"))
    parts = planner.parts(planner.part(k, state, 0).digest)
    function = _function(tmp_path, body, k)
    return await function.train(
        parts, stored, batch_size=2, partial=True, next_part=planner.following
    ), stored


def _accounted(result: RolloutResult) -> None:
    """Check that every group of the plans and of the earlier buffer has exactly one fate."""
    planned = {group.group_id for part in result.parts for group in part.plan.groups}
    planned |= {one.group_id for one in result.parts[0].plan.before.buffer}
    fates = [*result.accepted, *result.dropped, *(one.group_id for one in result.after.buffer)]
    assert sorted(fates) == sorted(planned)


async def test_returned_groups_make_the_batch_and_every_other_group_is_accounted_for(tmp_path):
    planner = _planner(tmp_path)
    body = """
groups = finish(data_source.get_samples(5))
for sample in groups[3]:
    sample.aborted = True
data_source.add_samples(groups[2:4])
return groups[:2], []
"""
    result, stored = await _run(tmp_path, planner, body, 0, DataState())
    _accounted(result)
    assert result.accepted == ("b:00000000", "b:00000001") and result.dropped == {
        "b:00000004": "not_returned"
    }
    waiting = {one.group_id: one for one in result.after.buffer}
    assert waiting["b:00000002"].rows == waiting["b:00000003"].rows == result.parts[1].digest
    assert len(result.parts) == 3 and waiting["b:00000005"].rows is None and len(stored.files) == 3
    body = """
first, second = data_source.get_samples(2)
assert [sample.group_id for sample in first] == ["b:00000002"] * 2 and first[0].tokens[-1] == 7
second[0].status = second[1].status = second[0].Status.COMPLETED
for sample in second:
    sample.tokens += [8]
    assert sample.response_length == 1
return [first, second]
"""
    again, _ = await _run(tmp_path, planner, body, 1, result.after)
    _accounted(again)
    assert again.accepted == ("b:00000002", "b:00000003")


async def test_a_function_may_continue_samples_of_an_earlier_iteration_in_place(tmp_path):
    planner = _planner(tmp_path)
    body = """
groups = finish(data_source.get_samples(3))
for group in groups:
    for sample in group:
        sample.weight_versions = ["b@3@d"]
        sample.aborted = group is groups[2]
data_source.add_samples(groups[2:])
return groups[:2]
"""
    first, _ = await _run(tmp_path, planner, body, 0, DataState())
    body = """
groups = finish(data_source.get_samples(2))
for sample in groups[0]:
    sample.aborted = False
return groups
"""
    second, stored = await _run(tmp_path, planner, body, 1, first.after)
    assert second.accepted[0] == "b:00000002"
    rows = table_to_samples(read_rows(Files(tmp_path / "store"), stored.files))
    continued = [row for row in rows if row.group_id == "b:00000002"]
    assert [(row.response_ids, row.weight_versions) for row in continued] == [
        ([7, 7], [(2, 3)])
    ] * 2


async def test_a_killed_function_gets_the_same_groups_except_those_that_were_written(
    tmp_path,
):
    planner = _planner(tmp_path)
    with pytest.raises(HookError, match=r"(?s)mine in iteration 0.*RuntimeError: killed"):
        await _run(
            tmp_path,
            planner,
            "data_source.get_samples(2)\nraise RuntimeError('killed')",
            0,
            DataState(),
        )
    body = "groups = finish(data_source.get_samples(2))\nreturn groups"
    first, _ = await _run(tmp_path, planner, body, 0, DataState())
    second, stored = await _run(
        tmp_path, planner, "raise RuntimeError('called again')", 0, DataState()
    )
    assert (
        first.accepted == second.accepted and second.adopted_groups == 2 and len(stored.files) == 1
    )
    assert first.after == second.after


GET_TWO = "groups = finish(data_source.get_samples(2))\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return data_source.get_samples(2)", r"(?s)not finished.*add_samples"),
        ("return finish(data_source.get_samples(1))", r"(?s)too few groups.*1 groups"),
        ("return finish(data_source.get_samples(2))[:1] * 2", "twice"),
        (
            f"{GET_TWO}groups[0][0].group_id = 'mine'\nreturn groups",
            "not handed out",
        ),
        (
            f"{GET_TWO}return [groups[0][:1], groups[1]]",
            r"(?s)not complete.*each of 2 rollouts once",
        ),
        ("return 5", r"(?s)another type.*int"),
        (
            f"{GET_TWO}data_source.add_samples(groups)\nreturn groups",
            "both returned and added",
        ),
    ],
)
async def test_a_wrong_answer_of_a_rollout_function_is_an_error_with_the_reason(
    tmp_path, body, message
):
    with pytest.raises(HookError, match=message):
        await _run(tmp_path, _planner(tmp_path), body, 0, DataState())


async def test_slimes_answers_and_nested_lists_are_read(tmp_path):
    body = """
import copy
from types import SimpleNamespace
groups = finish(data_source.get_samples(2))
other = copy.deepcopy(groups[0][1])
other.tokens += [8]
return SimpleNamespace(samples=[[groups[0][0], [groups[0][1], other]], groups[1]], metrics={})
"""
    result, stored = await _run(tmp_path, _planner(tmp_path), body, 0, DataState())
    finished, _ = stored.adopt(result.parts[0])
    assert [(row.index, row.rollout_id) for row in finished["b:00000000"]] == [
        (0, 0),
        (1, 1),
        (3, 1),
    ]


async def test_an_evaluation_may_return_samples_by_name_of_the_set(tmp_path):
    body = """
assert evaluation and rollout_id == 3
groups = finish(data_source.get_samples(2))
return {"held": {"samples": [sample for group in groups for sample in group], "rewards": []}}
"""
    part = _planner(tmp_path).part(0, DataState(), 0)
    kept = MemoryRows()
    result = await _function(tmp_path, body, 3).evaluate(part, "held", kept)
    assert len(kept.samples) == 4 and all(row.status is Status.COMPLETED for row in kept.samples)
    assert result.progress.response_tokens == 4


SOURCE = """
import random
from rlpipe.types import Sample
class Source:
    def __init__(self, args):
        self.number = 0
    def get_samples(self, num_samples):
        self.number += num_samples
        numbers = range(self.number - num_samples + 1, self.number + 1)
        texts = [f"{chr(96 + n)}{chr(97 + random.randrange(26))}" for n in numbers]
        return [[Sample(prompt=text, label=text) for _ in range(2)] for text in texts]
"""


def test_the_first_draw_of_a_data_source_is_kept(tmp_path):
    planner = _planner(tmp_path, source=SOURCE)
    first = planner.part(0, DataState(), 0)
    second = planner.part(1, first.plan.after, 0)
    for one in (planner, _planner(tmp_path, source=SOURCE)):
        assert one.part(0, DataState(), 0) == first and one.part(1, first.plan.after, 0) == second
    third = _planner(tmp_path, source=SOURCE).part(2, second.plan.after, 0)
    texts = [group.prompt[0] for part in (first, second, third) for group in part.plan.groups]
    assert texts == list("abcdef"), "a new source repeats the draws of the branch"
    assert planner.part(2, third.plan.after, 0, write=False).digest == ""


def test_a_data_source_needs_no_prompt_file(tmp_path):
    planner = _planner(tmp_path, source=SOURCE, data_source_path="mine.py:Source")
    config = RolloutConfig(rollout_batch_size=2, data_source_path="mine.py:Source")
    data = DataSource((), LETTERS, DataConfig(), config, "b")
    data.check()
    alone = Planner(data, config, Files(tmp_path / "other"), custom=planner.custom)
    assert len(alone.part(0, DataState(), 0).plan.groups) == 2
    with pytest.raises(DataError, match="no rows"):
        DataSource((), LETTERS, DataConfig(), RolloutConfig(rollout_batch_size=2), "b")


def test_a_data_source_with_a_wrong_answer_is_an_error(tmp_path):
    short = _planner(
        tmp_path, source=SOURCE.replace("for text in texts]", "for text in texts[:1]]")
    )
    with pytest.raises(HookError, match=r"(?s)get_samples\(2\).*1 groups.*a list of 2"):
        short.part(0, DataState(), 0)
    (tmp_path / "mine.py").write_text("def Source(args): pass")
    with pytest.raises(ConfigError, match=r"(?s)not a data source.*get_samples"):
        CustomSource(f"{tmp_path / 'mine.py'}:Source", ARGS)


LAST = """
def choose(args, buffer, num_samples):
    buffer.pop(0)
    return [buffer.pop()]
"""


@pytest.mark.parametrize("choose", [LAST, LAST.replace("args, buffer", "args, rollout_id, buffer")])
async def test_a_buffer_filter_takes_keeps_and_drops_groups(tmp_path, choose):
    body = (
        "groups = finish(data_source.get_samples(5))\n"
        "data_source.add_samples(groups[2:])\nreturn groups[:2]"
    )
    before, _ = await _run(tmp_path, _planner(tmp_path), body, 0, DataState())
    waiting = [one.group_id for one in before.after.buffer]
    assert len(waiting) == 4
    planner = _planner(tmp_path, choose=choose)
    result, _ = await _run(
        tmp_path, planner, "return finish(data_source.get_samples(2))", 1, before.after
    )
    _accounted(result)
    assert result.accepted == (waiting[-1], "b:00000006") and result.dropped == {
        waiting[0]: "buffer_filter"
    }
    assert [one.group_id for one in result.after.buffer] == waiting[1:3]


def test_a_buffer_filter_that_returns_other_groups_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def choose(args, buffer, num_samples):\n    return buffer + buffer\n"
    )
    chooser = BufferFilter(f"{tmp_path / 'mine.py'}:choose", ARGS)
    with pytest.raises(HookError, match="did not choose groups of the buffer"):
        chooser.choose(0, [[Sample(group_id="b:1")]], 4)
    (tmp_path / "bad.py").write_text("def choose(buffer):\n    return buffer\n")
    with pytest.raises(ConfigError, match=r"choose\(buffer\)"):
        BufferFilter(f"{tmp_path / 'bad.py'}:choose", ARGS)
