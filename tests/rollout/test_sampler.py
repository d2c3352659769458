"""Which groups run, when they are written, and the handling of failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlpipe.errors import DeadlineExceeded, EngineError, EngineUnavailable, StoreError
from rlpipe.rollout.filters import Rejection
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import MemoryRows, PlanPart
from rlpipe.rollout.rollout_settings import RolloutSettings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.types import BufferedGroup, DataState, Plan, PlannedGroup, Sample, Status

STATIC = RolloutSettings(
    batch_size=10,
    static=True,
    in_order=False,
    partial=False,
    max_rounds=3,
    timeout_s=20.0,
    flush_interval_s=5.0,
)


def _part(groups: int, first: int = 0, number: int = 0) -> PlanPart:
    planned = tuple(
        PlannedGroup(group_id=f"b:{first + i}", prompt="p", prompt_ids=(5,), seeds=(i,))
        for i in range(groups)
    )
    before = DataState(draws=first)
    after = DataState(draws=first + groups)
    return PlanPart(
        f"plan-{number}",
        Plan(branch="b", iteration=3, part=number, groups=planned, before=before, after=after),
    )


def _more(part: PlanPart) -> PlanPart:
    return _part(len(part.plan.groups), part.plan.after.draws, part.plan.part + 1)


class _Sampling:
    """A generate function that takes `seconds[group_id]` and counts its concurrent calls."""

    def __init__(
        self, seconds: dict[str, float] | None = None, errors: dict[str, Exception] | None = None
    ) -> None:
        self.seconds = seconds or {}
        self.errors = errors or {}
        self.called: list[str] = []
        self.now = self.most = 0
        self.cut = asyncio.Event()

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        self.called.append(group.group_id)
        self.now += 1
        self.most = max(self.most, self.now)
        sample = planned_sample(group, 0)
        sample.response_ids = [1, 2]
        sample.status = Status.COMPLETED
        sample.rollout_log_probs = [-1.0, -1.0]
        sample.weight_versions = [(2, 3)]
        try:
            async with asyncio.timeout(self.seconds.get(group.group_id, 0.01)):
                await self.cut.wait()
            sample.response_ids = [1]
            sample.status = Status.ABORTED
            sample.rollout_log_probs = [-1.0]
            sample.weight_versions = [(1, 3)]
        except TimeoutError:
            pass
        finally:
            self.now -= 1
        if group.group_id in self.errors:
            raise self.errors[group.group_id]
        return [sample]

    async def cut_off(self) -> None:
        self.cut.set()


class _RecordedRows(MemoryRows):
    """Collect written groups; return the groups of an earlier attempt."""

    def __init__(self, finished: Sequence[Sample] = (), cut: Sequence[Sample] = ()) -> None:
        super().__init__()
        self.flushes: list[list[str]] = []
        self.cut: list[str] = []
        self.left = (
            {sample.group_id: [sample] for sample in finished},
            {sample.group_id: [sample] for sample in cut},
        )

    def adopt(self, part):
        of_part = {group.group_id for group in part.plan.groups}
        finished, cut = (
            {key: rows for key, rows in groups.items() if key in of_part} for groups in self.left
        )
        return finished, cut

    def write(self, part, groups, *, cut=False):
        super().write(part, groups, cut=cut)
        ids = [group[0].group_id for group in groups]
        assert set(ids) <= {group.group_id for group in part.plan.groups}, (
            "rows lie below their own part"
        )
        (self.cut.extend if cut else self.flushes.append)(ids)

    @property
    def ids(self) -> list[str]:
        return sorted(group_id for ids in self.flushes for group_id in ids)


def _done(group_id: str, status: Status = Status.COMPLETED) -> Sample:
    return Sample(
        group_id,
        0,
        "p",
        [5],
        response_ids=[1],
        rollout_log_probs=[-1.0],
        weight_versions=[(1, 3)],
        status=status,
    )


async def _run(
    parts, sampling, kept, settings: RolloutSettings = STATIC, slots: int = 4, **keywords
) -> RolloutResult:
    keywords = {"judge": GroupJudge(), "slots": asyncio.Semaphore(slots), **keywords}
    return await run_rollout(
        parts if isinstance(parts, list) else [parts], settings, sampling, kept, **keywords
    )


def _settings(**changes) -> RolloutSettings:
    return RolloutSettings(
        **{**{name: getattr(STATIC, name) for name in STATIC.__dataclass_fields__}, **changes}
    )


async def test_every_group_is_sampled_once_and_flushed_once():
    sampling = _Sampling()
    kept = _RecordedRows()
    shown = []
    result = await _run(
        _part(10),
        sampling,
        kept,
        progress=lambda now: shown.append((now.finished_groups, now.groups)),
    )
    assert kept.ids == sorted(sampling.called) == sorted(f"b:{i}" for i in range(10))
    assert len(kept.flushes) == 1 and sampling.most == 4
    assert shown == [(finished, 10) for finished in range(11)]
    now = result.progress
    assert (now.samples, now.prompt_tokens, now.response_tokens, dict(now.statuses)) == (
        10,
        10,
        20,
        {"completed": 10},
    )
    assert result.errors == {} and now.tokens_per_s > 0
    assert result.accepted == tuple(f"b:{i}" for i in range(10)) and result.after == DataState(
        draws=10
    )


async def test_adopted_groups_are_not_sampled_again():
    sampling = _Sampling()
    kept = _RecordedRows([_done("b:0"), _done("b:2")])
    result = await _run(_part(4), sampling, kept)
    assert sampling.called == ["b:1", "b:3"] and kept.ids == ["b:1", "b:3"]
    assert (result.adopted_groups, result.progress.finished_groups, len(result.accepted)) == (
        2,
        4,
        4,
    )


async def test_a_rollout_with_all_groups_adopted_samples_nothing():
    kept = _RecordedRows([_done("b:0")])
    assert (await _run(_part(1), _Sampling(), kept)).adopted_groups == 1
    assert kept.flushes == []


async def test_finished_groups_are_flushed_while_others_still_run():
    kept = _RecordedRows()
    rollout = asyncio.create_task(
        _run(_part(3), _Sampling({"b:2": 0.6}), kept, _settings(flush_interval_s=0.1))
    )
    await asyncio.sleep(0.4)
    assert kept.ids == ["b:0", "b:1"]
    await rollout
    assert kept.ids == ["b:0", "b:1", "b:2"]


async def test_a_failed_group_becomes_rows_if_enough_others_did_not_fail():
    kept = _RecordedRows()
    sampling = _Sampling(errors={"b:1": EngineUnavailable("gone", where="group b:1")})
    result = await _run(_part(4), sampling, kept, _settings(min_completed_fraction=0.75))
    assert kept.ids == ["b:0", "b:1", "b:2", "b:3"] and list(result.errors) == ["b:1"]
    (failed,) = [sample for sample in kept.samples if sample.group_id == "b:1"]
    assert failed.status is Status.FAILED and "gone" in str(failed.error)
    assert result.progress.failed_groups == 1 and result.dropped == {"b:1": "failed"}


async def test_too_many_failed_groups_fail_the_rollout_but_keep_the_others():
    kept = _RecordedRows()
    with pytest.raises(EngineError, match=r"(?s)rollout of b iteration 3.*1 of 4.*b:1.*gone"):
        await _run(_part(4), _Sampling(errors={"b:1": EngineUnavailable("gone")}), kept)
    assert kept.ids == ["b:0", "b:2", "b:3"]


async def test_a_deadline_names_the_groups_and_keeps_the_finished_ones():
    kept = _RecordedRows()
    with pytest.raises(
        DeadlineExceeded, match=r"(?s)rollout of b iteration 3.*1 running \(b:2\).*within 0.3 s"
    ):
        await _run(_part(3), _Sampling({"b:2": 60}), kept, _settings(timeout_s=0.3))
    assert kept.ids == ["b:0", "b:1"]


async def test_cancelling_keeps_the_finished_groups():
    kept = _RecordedRows()
    sampling = _Sampling({"b:2": 60})
    rollout = asyncio.create_task(_run(_part(3), sampling, kept))
    await asyncio.sleep(0.2)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert kept.ids == ["b:0", "b:1"] and sampling.now == 0


async def test_an_unexpected_exception_ends_the_rollout_unchanged():
    with pytest.raises(ZeroDivisionError):
        await _run(_part(3), _Sampling(errors={"b:1": ZeroDivisionError()}), _RecordedRows())


async def test_a_flush_that_fails_ends_the_rollout():
    class Full(_RecordedRows):
        def write(self, part, groups, *, cut=False):
            raise StoreError("no space")

    with pytest.raises(StoreError, match="no space"):
        await _run(_part(3), _Sampling({"b:2": 60}), Full(), _settings(flush_interval_s=0.1))


async def test_the_first_finished_groups_make_the_batch_and_the_others_wait_in_the_buffer():
    sampling = _Sampling({"b:0": 60, "b:5": 60})
    kept = _RecordedRows()
    settings = _settings(batch_size=3, static=False, partial=True)
    result = await _run(
        _part(6), sampling, kept, settings, slots=6, next_part=_more, cut_off=sampling.cut_off
    )
    assert result.accepted == ("b:1", "b:2", "b:3") and result.dropped == {}
    waiting = {one.group_id: one for one in result.after.buffer}
    assert list(waiting) == ["b:0", "b:4", "b:5"]
    assert waiting["b:4"] == BufferedGroup(
        group_id="b:4", plan="plan-0", rows="plan-0", oldest=3, finished=3
    )
    assert waiting["b:0"] == BufferedGroup(group_id="b:0", plan="plan-0", rows="plan-0", oldest=3)
    assert sorted(kept.cut) == ["b:0", "b:5"] and kept.ids == ["b:1", "b:2", "b:3", "b:4"]


async def test_without_partial_rollout_a_cut_off_group_is_stored_and_starts_again():
    sampling = _Sampling({"b:0": 60})
    kept = _RecordedRows()
    settings = _settings(batch_size=2, static=False)
    result = await _run(
        _part(3), sampling, kept, settings, next_part=_more, cut_off=sampling.cut_off
    )
    assert kept.cut == ["b:0"] and result.after.buffer == (
        BufferedGroup(group_id="b:0", plan="plan-0"),
    )


async def test_groups_without_a_slot_wait_without_rows():
    sampling = _Sampling()
    kept = _RecordedRows()
    result = await _run(
        _part(8), sampling, kept, _settings(batch_size=2, static=False), slots=2, next_part=_more
    )
    assert (
        len(result.after.buffer) == 6 and sum(one.rows is None for one in result.after.buffer) >= 4
    )


async def test_in_order_of_the_plan_the_time_of_finishing_does_not_matter():
    sampling = _Sampling({"b:0": 0.3, "b:1": 0.2})
    result = await _run(
        _part(4),
        sampling,
        _RecordedRows(),
        _settings(batch_size=2, static=False, in_order=True),
        next_part=_more,
    )
    assert result.accepted == ("b:0", "b:1")
    assert [(one.group_id, one.rows) for one in result.after.buffer] == [
        ("b:2", "plan-0"),
        ("b:3", "plan-0"),
    ]


def _odd(samples: Sequence[Sample]) -> Rejection | None:
    return None if int(samples[0].group_id[2:]) % 2 else Rejection("even")


def _odd_or_insufficient(samples: Sequence[Sample]) -> Rejection | None:
    return None if int(samples[0].group_id[2:]) % 2 else Rejection("even", fallback=True)


@pytest.mark.parametrize("in_order", [False, True])
async def test_fallback_groups_fill_a_batch_instead_of_another_round(in_order: bool):
    kept = _RecordedRows()
    settings = _settings(batch_size=3, static=False, in_order=in_order)
    judge = GroupJudge(_odd_or_insufficient)
    result = await _run(
        _part(4), _Sampling(), kept, settings, slots=1, judge=judge, next_part=_more
    )
    assert [part.digest for part in result.parts] == ["plan-0"]
    assert result.accepted == ("b:0", "b:1", "b:3") and result.fallbacks == {"b:0": "even"}
    assert result.dropped == {"b:2": "even"} and result.after == DataState(draws=4)
    assert (result.progress.accepted_groups, len(kept.ids)) == (3, 4)


async def test_fallback_groups_count_in_the_next_round_after_fit_groups():
    def keep(samples: Sequence[Sample]) -> Rejection | None:
        number = int(samples[0].group_id[2:])
        return None if number >= 4 else Rejection("early", fallback=number == 0)

    settings = _settings(batch_size=4, static=False)
    result = await _run(
        _part(4),
        _Sampling({"b:7": 60}),
        _RecordedRows(),
        settings,
        judge=GroupJudge(keep),
        next_part=_part_of_three,
    )
    assert len(result.parts) == 2
    assert result.accepted == ("b:0", "b:4", "b:5", "b:6") and result.fallbacks == {"b:0": "early"}
    assert set(result.dropped) == {"b:1", "b:2", "b:3"}


def _part_of_three(part: PlanPart) -> PlanPart:
    return _part(3, part.plan.after.draws, part.plan.part + 1)


async def test_rejected_groups_are_dropped_and_more_are_drawn():
    kept = _RecordedRows()
    settings = _settings(batch_size=4, static=False)
    result = await _run(
        _part(4), _Sampling(), kept, settings, judge=GroupJudge(_odd), next_part=_more
    )
    assert [part.digest for part in result.parts] == ["plan-0", "plan-1"]
    assert set(result.accepted) == {"b:1", "b:3", "b:5", "b:7"} and len(kept.ids) == 8
    assert result.dropped == {f"b:{i}": "even" for i in (0, 2, 4, 6)} and result.after == DataState(
        draws=8
    )


async def test_a_retry_adopts_all_parts_of_an_earlier_attempt():
    parts = [_part(4), _more(_part(4))]
    kept = _RecordedRows([_done("b:1"), _done("b:2"), _done("b:5")])
    sampling = _Sampling()
    result = await _run(
        parts,
        sampling,
        kept,
        _settings(batch_size=4, static=False),
        judge=GroupJudge(_odd),
        next_part=_more,
    )
    assert not {"b:1", "b:2", "b:5"} & set(sampling.called)
    assert set(result.accepted) == {"b:1", "b:3", "b:5", "b:7"} and len(result.parts) == 2


async def test_a_filter_that_rejects_everything_is_an_error_with_its_reasons():
    settings = _settings(batch_size=2, static=False, max_rounds=3)
    with pytest.raises(
        EngineError, match=r"(?s)0 of 6 in 3 rounds; rejected: 6 no.*max_sampling_rounds"
    ):
        await _run(
            _part(2),
            _Sampling(),
            _RecordedRows(),
            settings,
            judge=GroupJudge(lambda samples: Rejection("no")),
            next_part=_more,
        )


async def test_a_finished_group_of_the_buffer_is_not_sampled():
    class Earlier(_RecordedRows):
        def earlier(self, digest, group_ids):
            assert digest == "old"
            return {group_id: [_done(group_id)] for group_id in group_ids}

    first = _part(2)
    groups = (first.plan.groups[0].model_copy(update={"earlier": "old"}), first.plan.groups[1])
    sampling = _Sampling()
    kept = Earlier()
    part = PlanPart("plan-0", first.plan.model_copy(update={"groups": groups}))
    result = await _run(
        part, sampling, kept, _settings(batch_size=2, static=False), next_part=_more
    )
    assert (
        sampling.called == ["b:1"]
        and kept.ids == ["b:0", "b:1"]
        and result.accepted == ("b:0", "b:1")
    )


async def test_two_rollouts_share_the_slots_first_come_first_served():
    slots = asyncio.Semaphore(2)
    sampling = _Sampling()
    first = asyncio.create_task(
        run_rollout([_part(4)], STATIC, sampling, _RecordedRows(), judge=GroupJudge(), slots=slots)
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0.005)
    second = run_rollout(
        [_part(4, first=4, number=1)],
        STATIC,
        sampling,
        _RecordedRows(),
        judge=GroupJudge(),
        slots=slots,
    )
    await asyncio.gather(first, second)
    assert sampling.most == 2 and sampling.called == [f"b:{i}" for i in range(8)]


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_group_fails_if_its_function_is_cancelled_from_inside(pooled: bool):
    async def cancelled(group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        raise asyncio.CancelledError

    settings = _settings(timeout_s=2.0, static=not pooled)
    pool = Pool(2) if pooled else None
    with pytest.raises(EngineError, match="the generate function was cancelled"):
        await _run(_part(2), cancelled, MemoryRows(), settings, pool=pool, next_part=_more)
