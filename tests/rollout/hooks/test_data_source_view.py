"""Groups that a rollout function makes itself take the draws of the plan (data_source_view)."""

from __future__ import annotations

import pytest

from rlpipe.errors import HookError
from rlpipe.types import DataState
from tests.rollout.hooks.test_rollout_function import _accounted, _planner, _run

MAKE = """
from slime.utils.types import Sample
def made(*names, size=2):
    return [
        [
            Sample(index=name, prompt="p", tokens=[50, 51, 7], response_length=1, reward=1.0,
                   status=Sample.Status.COMPLETED, metadata={"round": 1})
            for _ in range(size)
        ]
        for name in names
    ]
"""


async def test_made_groups_take_the_next_draws_and_wait_in_the_buffer(tmp_path):
    planner = _planner(tmp_path)
    body = f"""{MAKE}
assert data_source.get_metadata() == {{}}
data_source.update_metadata({{"0": ["a"]}})
data_source.add_samples(made("a", "b", "c"))
assert data_source.get_buffer_length() == 3
return data_source.get_samples(2)
"""
    first, _ = await _run(tmp_path, planner, body, 0, DataState())
    _accounted(first)
    assert first.accepted == ("b:00000000", "b:00000001")
    assert first.dropped == {}
    waiting = {one.group_id: one for one in first.after.buffer}
    assert waiting["b:00000002"].rows is not None and waiting["b:00000003"].rows is None
    # The group that was left over comes first, with its tokens, then a new one.
    body = f"""{MAKE}
data_source.add_samples(made("d"))
groups = data_source.get_samples(2)
assert [group[0].group_id for group in groups] == ["b:00000002", "b:00000003"]
assert [group[0].metadata["instance_id"] for group in groups] == ["c", "d"]
assert groups[0][0].tokens == [50, 51, 7]
return groups
"""
    second, _ = await _run(tmp_path, planner, body, 1, first.after)
    _accounted(second)
    assert second.accepted == ("b:00000002", "b:00000003")


async def test_made_groups_may_be_returned_at_once(tmp_path):
    result, _ = await _run(
        tmp_path, _planner(tmp_path), f"{MAKE}\nreturn made('a', 'b', 'c')", 0, DataState()
    )
    _accounted(result)
    assert result.accepted == ("b:00000000", "b:00000001")
    assert [one.group_id for one in result.after.buffer] == ["b:00000002", "b:00000003"]


async def test_a_made_group_of_another_size_is_refused(tmp_path):
    body = f"{MAKE}\nreturn made('a', 'b', size=1)"
    with pytest.raises(HookError, match="a group is not complete"):
        await _run(tmp_path, _planner(tmp_path), body, 0, DataState())


async def test_a_group_of_another_rollout_is_refused(tmp_path):
    body = f"""{MAKE}
groups = made("a", "b")
for sample in groups[0]:
    sample.group_id = "b:00000077"
return groups
"""
    with pytest.raises(HookError, match="the group was not handed out"):
        await _run(tmp_path, _planner(tmp_path), body, 0, DataState())
