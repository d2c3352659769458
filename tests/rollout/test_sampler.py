"""Which groups run, when they are flushed, and what becomes of failures."""

from __future__ import annotations

import asyncio

import pytest

from rlpipe.errors import DeadlineExceeded, EngineError, EngineUnavailable, StoreError
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.sampler import run_rollout
from rlpipe.types import DataState, Plan, PlannedGroup, Sample, Status

TUNING = {"concurrency": 4, "timeout_s": 20.0, "flush_interval_s": 5.0}


def _plan(groups: int) -> Plan:
    planned = tuple(PlannedGroup(group_id=f"b:{i}", prompt="p", prompt_ids=(5,), seeds=(i,)) for i in range(groups))
    return Plan(branch="b", iteration=3, groups=planned, before=DataState(), after=DataState(draws=groups))


class _Sampling:
    """A generate function that takes `seconds[group_id]` and counts how many run at once."""

    def __init__(self, seconds: dict[str, float] | None = None, errors: dict[str, Exception] | None = None) -> None:
        self.seconds, self.errors = seconds or {}, errors or {}
        self.called: list[str] = []
        self.now = self.most = 0

    async def __call__(self, group: PlannedGroup) -> list[Sample]:
        self.called.append(group.group_id)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds.get(group.group_id, 0.01))
        finally:
            self.now -= 1
        if group.group_id in self.errors:
            raise self.errors[group.group_id]
        sample = planned_sample(group, 0)
        sample.response_ids, sample.status = [1, 2], Status.COMPLETED
        return [sample]


class _Kept:
    """Collects flushed groups."""

    def __init__(self) -> None:
        self.flushes: list[list[list[Sample]]] = []

    def __call__(self, groups: list[list[Sample]]) -> None:
        self.flushes.append(groups)

    @property
    def ids(self) -> list[str]:
        return sorted(samples[0].group_id for groups in self.flushes for samples in groups)


async def test_every_group_is_sampled_once_and_flushed_once():
    sampling, kept, shown = _Sampling(), _Kept(), []
    result = await run_rollout(_plan(10), [], sampling, kept, **TUNING, progress=lambda now: shown.append(now.finished_groups))
    assert kept.ids == sorted(sampling.called) == sorted(f"b:{i}" for i in range(10))
    assert len(kept.flushes) == 1 and sampling.most == 4 and shown == list(range(1, 11))
    now = result.progress
    assert (now.samples, now.prompt_tokens, now.response_tokens, dict(now.statuses)) == (10, 10, 20, {"completed": 10})
    assert result.errors == {} and now.tokens_per_s > 0


async def test_adopted_groups_are_not_sampled_again():
    sampling, kept = _Sampling(), _Kept()
    result = await run_rollout(_plan(4), {"b:0", "b:2"}, sampling, kept, **TUNING)
    assert sampling.called == ["b:1", "b:3"] and kept.ids == ["b:1", "b:3"]
    assert (result.adopted_groups, result.progress.finished_groups) == (2, 4)


async def test_nothing_to_do_is_done():
    kept = _Kept()
    assert (await run_rollout(_plan(1), {"b:0"}, _Sampling(), kept, **TUNING)).adopted_groups == 1
    assert kept.flushes == []


async def test_finished_groups_are_flushed_while_others_still_run():
    kept = _Kept()
    rollout = asyncio.create_task(run_rollout(_plan(3), [], _Sampling({"b:2": 0.6}), kept, **{**TUNING, "flush_interval_s": 0.1}))
    await asyncio.sleep(0.4)
    assert kept.ids == ["b:0", "b:1"]
    await rollout
    assert kept.ids == ["b:0", "b:1", "b:2"]


async def test_a_failed_group_becomes_rows_if_enough_others_did_not_fail():
    kept = _Kept()
    sampling = _Sampling(errors={"b:1": EngineUnavailable("gone", where="group b:1")})
    result = await run_rollout(_plan(4), [], sampling, kept, **TUNING, min_completed_fraction=0.75)
    assert kept.ids == ["b:0", "b:1", "b:2", "b:3"] and list(result.errors) == ["b:1"]
    (failed,) = kept.flushes[-1]
    assert failed[0].status is Status.FAILED and "gone" in str(failed[0].error)
    assert result.progress.failed_groups == 1


async def test_too_many_failed_groups_fail_the_rollout_but_keep_the_others():
    kept = _Kept()
    with pytest.raises(EngineError, match=r"(?s)rollout of b iteration 3.*1 of 4.*b:1.*gone"):
        await run_rollout(_plan(4), [], _Sampling(errors={"b:1": EngineUnavailable("gone")}), kept, **TUNING)
    assert kept.ids == ["b:0", "b:2", "b:3"]


async def test_a_deadline_names_the_groups_and_keeps_the_finished_ones():
    kept = _Kept()
    with pytest.raises(DeadlineExceeded, match=r"(?s)rollout of b iteration 3.*1 running \(b:2\).*within 0.3 s"):
        await run_rollout(_plan(3), [], _Sampling({"b:2": 60}), kept, **{**TUNING, "timeout_s": 0.3})
    assert kept.ids == ["b:0", "b:1"]


async def test_cancelling_keeps_the_finished_groups():
    kept, sampling = _Kept(), _Sampling({"b:2": 60})
    rollout = asyncio.create_task(run_rollout(_plan(3), [], sampling, kept, **TUNING))
    await asyncio.sleep(0.2)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert kept.ids == ["b:0", "b:1"] and sampling.now == 0


async def test_an_error_that_is_not_ours_ends_the_rollout_as_itself():
    kept = _Kept()
    with pytest.raises(ZeroDivisionError):
        await run_rollout(_plan(3), [], _Sampling(errors={"b:1": ZeroDivisionError()}), kept, **TUNING)


async def test_a_flush_that_fails_ends_the_rollout():
    def full(_groups: list[list[Sample]]) -> None:
        raise StoreError("no space")

    with pytest.raises(StoreError, match="no space"):
        await run_rollout(_plan(3), [], _Sampling({"b:2": 60}), full, **{**TUNING, "flush_interval_s": 0.1})
