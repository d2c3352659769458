"""Groups that are sampled across rollouts (rlpipe.rollout.pool)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from rlpipe.errors import EngineError, EngineUnavailable, StoreError
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import RolloutProgress, build_result
from rlpipe.rollout.rollout_rows import MemoryRows, PlanPart
from rlpipe.rollout.rollout_settings import RolloutSettings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.types import BufferedGroup, DataState, Plan, PlannedGroup, Sample, Status

GROUP = PlannedGroup(group_id="b:0", prompt="p", prompt_ids=(5,), seeds=(1,))
OTHER = GROUP.model_copy(update={"group_id": "b:1"})


async def _generate(group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
    await asyncio.sleep(0.01)
    sample = planned_sample(group, 0)
    sample.response_ids = [7]
    sample.rollout_log_probs = [-1.0]
    sample.status = Status.COMPLETED
    return [sample]


async def test_a_cancelled_rollout_leaves_its_groups_in_flight_for_the_next_one():
    pool = Pool(2)
    await pool.begin(GROUP, (), _generate)
    waiting = asyncio.ensure_future(pool.result("b:0"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    await pool.begin(GROUP, (), None)  # type: ignore[arg-type]  # it has begun already
    assert (await pool.result("b:0"))[0].response_ids == [7]


async def test_a_full_pool_begins_a_group_once_another_ends():
    pool = Pool(1)
    await pool.begin(GROUP, (), _generate)
    beginning = asyncio.ensure_future(pool.begin(OTHER, (), _generate))
    await asyncio.sleep(0)
    assert pool.group_ids == {"b:0"}
    await pool.result("b:0")
    await beginning
    assert pool.group_ids == {"b:0", "b:1"}
    await pool.close()
    assert pool.group_ids == set()


async def test_a_failed_group_begins_again():
    async def fail(group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        raise EngineUnavailable("gone")

    pool = Pool(1)
    await pool.begin(GROUP, (), fail)
    with pytest.raises(EngineUnavailable):
        await pool.result("b:0")
    await pool.begin(GROUP, (), _generate)
    assert (await pool.result("b:0"))[0].response_ids == [7]


async def test_servers_of_a_generate_function_run_until_its_last_group_has_ended():
    events = []

    @asynccontextmanager
    async def servers() -> AsyncIterator:
        yield _generate
        events.append("stopped")

    pool = Pool(1)
    async with pool.lease(servers()) as generate:
        await pool.begin(GROUP, (), generate)
    assert events == []
    await pool.result("b:0")
    await pool.close()
    assert events == ["stopped"]


async def test_an_error_at_the_start_of_servers_is_raised_by_the_lease():
    @asynccontextmanager
    async def servers() -> AsyncIterator:
        raise EngineError("no port")
        yield

    with pytest.raises(EngineError, match="no port"):
        async with Pool(1).lease(servers()):
            pass


async def test_an_error_at_the_end_of_servers_is_logged(caplog: pytest.LogCaptureFixture):
    @asynccontextmanager
    async def servers() -> AsyncIterator:
        yield _generate
        raise EngineError("port in use")

    pool = Pool(1)
    async with pool.lease(servers()):
        pass
    await pool.close()
    assert "servers of a rollout did not stop" in caplog.text and "port in use" in caplog.text


class _Rows(MemoryRows):
    """Rows of a store that fails for some writes, or waits."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.begun = threading.Event()
        self.answer = threading.Event()
        self.answer.set()

    def write(self, part, groups, *, cut=False):
        self.begun.set()
        assert self.answer.wait(10)
        if self.failures:
            self.failures -= 1
            raise StoreError("S3 request failed")
        super().write(part, groups, cut=cut)


async def _pool_of_open_groups(kept: _Rows) -> Pool:
    """Return a pool after a rollout that left both groups open."""
    pool = Pool(2)
    plan = Plan(
        branch="b", iteration=0, groups=(GROUP, OTHER), before=DataState(), after=DataState()
    )
    for group in (GROUP, OTHER):
        await pool.begin(group, (), _generate)
    waiting = [BufferedGroup(group_id=group_id, plan="plan") for group_id in ("b:0", "b:1")]
    result = build_result(
        RolloutProgress(),
        [PlanPart("plan", plan)],
        (),
        {},
        newer=waiting,
        adopted_groups=0,
        cut_groups=0,
        errors={},
    )
    pool.leave(result, kept, 0.0)
    return pool


@pytest.mark.parametrize("failures", [0, 2])
async def test_groups_that_finish_between_rollouts_are_written_once_the_store_answers(
    failures: int,
):
    kept = _Rows(failures)
    pool = await _pool_of_open_groups(kept)
    async with asyncio.timeout(10):
        while len(kept.samples) < 2:  # noqa: ASYNC110 - rows have no event for a write
            await asyncio.sleep(0.001)
    await pool.stop_writing()
    assert sorted(sample.group_id for sample in kept.samples) == ["b:0", "b:1"]
    assert pool.group_ids == {"b:0", "b:1"}


async def test_each_call_that_stops_the_writing_waits_for_the_write_that_has_begun():
    kept = _Rows()
    kept.answer.clear()
    pool = await _pool_of_open_groups(kept)
    assert await asyncio.to_thread(kept.begun.wait, 10)
    stopping = []
    for _ in range(2):
        stopping.append(asyncio.create_task(pool.stop_writing()))
        await asyncio.sleep(0.02)
    assert not any(task.done() for task in stopping)
    kept.answer.set()
    await asyncio.gather(*stopping)
    assert kept.samples


async def test_a_rollout_of_a_pool_plans_no_further_groups_once_too_many_have_failed():
    async def fail(group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        raise EngineUnavailable("gone")

    def part(number: int) -> PlanPart:
        ids = [f"b:{2 * number + n}" for n in range(2)]
        groups = tuple(GROUP.model_copy(update={"group_id": group_id}) for group_id in ids)
        state = DataState(draws=2 * number)
        plan = Plan(
            branch="b", iteration=0, part=number, groups=groups, before=state, after=DataState()
        )
        return PlanPart(str(number), plan)

    planned = []

    def following(last: PlanPart) -> PlanPart:
        planned.append(last.plan.part + 1)
        return part(planned[-1])

    with pytest.raises(EngineError, match="too many groups failed"):
        await run_rollout(
            [part(0)],
            RolloutSettings(
                batch_size=4,
                static=False,
                in_order=False,
                partial=False,
                max_rounds=20,
                timeout_s=30.0,
                flush_interval_s=1.0,
                groups_per_round=2,
                oldest_version=0,
            ),
            fail,
            MemoryRows(),
            judge=GroupJudge(),
            slots=asyncio.Semaphore(1),
            pool=Pool(2),
            next_part=following,
        )
    assert planned in ([], [1]), "part 1 may be planned before a group fails"
