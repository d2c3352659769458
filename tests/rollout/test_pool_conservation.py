"""Exactly once as a property, for groups that are sampled across rollouts.

Every drawn group is trained once, dropped with a reason, or open, also if rollouts are killed and
pools are lost.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.errors import EngineUnavailable
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import PlanPart, StoredRows
from rlpipe.store.audit.verification import check_branch, check_store
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, PlannedGroup, Sample, Status
from tests.rollout.random_runs import PARAMETERS, Mortal, RandomRun, World
from tests.store.lineage import collect


@dataclass(frozen=True, kw_only=True)
class PoolWorld(World):
    """Parameters of a random run with a pool."""

    in_flight: int
    """Groups in flight."""
    losses: float
    """Probability that the pool is lost between two iterations."""


WORLDS = st.builds(
    PoolWorld,
    **PARAMETERS,
    over=st.integers(0, 2),
    staleness=st.integers(1, 3),
    in_flight=st.integers(1, 7),
    losses=st.sampled_from([0.0, 0.4]),
)


@dataclass
class Engine:
    """Sample one token per tick at random pace, with the weights of the moment."""

    dice: random.Random
    fails: float
    version: int = 0
    begun: list[str] = field(default_factory=list)

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        self.begun.append(group.group_id)
        samples = [planned_sample(group, index) for index in range(len(group.seeds))]
        for sample in samples:
            sample.rollout_log_probs = []
            for _ in range(self.dice.choice([1, 2, 3, 20])):
                await asyncio.sleep(0)
                if self.dice.random() < self.fails / 5:
                    raise EngineUnavailable("gone")
                sample.response_ids.append(7)
                sample.rollout_log_probs.append(-1.0)
                sample.weight_versions.append((1, self.version))
            sample.status = Status.COMPLETED
        return samples


class PoolRun(RandomRun[PoolWorld]):
    """A random run with open groups."""

    def __init__(self, files: Files, world: PoolWorld) -> None:
        config = world.config(
            selection="first_finished",
            pool_size=world.in_flight,
            over_sampling_batch_size=world.batch + world.over,
        )
        super().__init__(files, world, config)
        self.engine = Engine(self.dice, world.fails)
        self.pool = Pool(world.in_flight)
        self.surplus: set[str] = set()
        """Groups that finished and waited in the buffer."""

    async def attempt(self, k: int, parts: list[PlanPart], store: StoredRows) -> RolloutResult:
        self.pool.retain({group.group_id for part in parts for group in part.plan.groups})
        oldest_version = k - self.world.staleness
        return await self.sample(
            parts, self.engine, store, oldest_version=oldest_version, pool=self.pool
        )

    async def after_kill(self) -> None:
        if self.dice.random() < 0.5:
            await self.lose_pool()

    async def lose_pool(self) -> None:
        await self.pool.close()
        self.pool = Pool(self.world.in_flight)

    async def iterate(self, k: int) -> RolloutResult:
        result = await super().iterate(k)
        self.pool.leave(result, StoredRows(self.files), 0.0005)
        self.engine.version = k + 1
        for _ in range(self.dice.randrange(30)):
            await asyncio.sleep(0.0001)
        await self.pool.stop_writing()
        if self.dice.random() < self.world.losses:
            await self.lose_pool()
        return result

    def check(self, state: DataState, result: RolloutResult) -> None:
        super().check(state, result)
        planned = {group.group_id for part in result.parts for group in part.plan.groups}
        assert {one.group_id for one in state.buffer} <= planned
        self.surplus |= {one.group_id for one in result.after.buffer if one.finished is not None}
        if self.world.fails or self.world.crashes:
            return  # an attempt before may have needed more parts than this one
        # A part is planned when the last group of the part before has begun.
        surplus = self.world.in_flight + self.config.groups_per_round
        assert len([one for one in result.after.buffer if one.finished is None]) <= surplus


async def _run(run: PoolRun, iterations: int) -> None:
    for k in range(iterations):
        await run.iterate(k)
    await run.pool.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORLDS)
def test_every_drawn_group_of_the_pool_is_trained_dropped_or_open_once(world: PoolWorld):
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        run = PoolRun(files, world)
        asyncio.run(_run(run, 5))
        assert check_branch(files, "run") == []
        assert check_store(files, "run").findings == []
        if not world.fails and not world.crashes and not world.losses:
            begun = Counter(run.engine.begun)
            again = {group_id for group_id, count in begun.items() if count > 1}
            assert again <= run.surplus, "only a finished group whose tokens became too old"


CALM = PoolWorld(seed=1, batch=2, over=1, staleness=3, in_flight=4, losses=0.0)


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        ("lost", "is neither trained nor dropped nor buffered"),
        ("doubled", "is accounted for 2 times"),
        ("foreign", "was never drawn"),
    ],
)
def test_the_audit_finds_an_open_group_that_a_commit_loses_or_doubles(planted: str, problem: str):
    class Planting(PoolRun):
        def write(self, commit: Commit) -> None:
            *others, last = commit.data.buffer
            if planted == "lost":
                buffer = tuple(others)
            elif planted == "doubled":
                buffer = (*others, last, last)
            else:
                buffer = (*others, last, last.model_copy(update={"group_id": "run:00009999"}))
            data = commit.data.model_copy(update={"buffer": buffer})
            super().write(commit.model_copy(update={"data": data}))

    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        run = Planting(files, CALM)
        asyncio.run(_run(run, 1))
        assert any(problem in finding.problem for finding in check_branch(files, "run"))


def test_a_group_that_finished_between_two_rollouts_is_no_garbage_and_is_not_sampled_again():
    async def lose_the_pool_after_late_groups(run: PoolRun, files: Files) -> None:
        k = 0
        late: set[str] = set()
        while not late:
            assert k < 20, "a group finishes between two rollouts"
            await run.iterate(k)
            newest = run.branches.newest("run")
            assert newest is not None
            late = _late(files, newest)
            k += 1
        await run.lose_pool()
        collect(files, grace_s=-60)
        run.engine.begun.clear()
        await run.iterate(k)
        assert not late & set(run.engine.begun)
        await run.pool.close()

    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        asyncio.run(lose_the_pool_after_late_groups(PoolRun(files, CALM), files))
        assert check_branch(files, "run") == []


def test_a_rollout_reads_no_shards_of_the_one_before_if_the_pool_has_all_its_open_groups(
    monkeypatch: pytest.MonkeyPatch,
):
    def finished(rows: StoredRows, digest: str, group_ids: Sequence[str]) -> None:
        raise AssertionError(f"{digest} is read")

    monkeypatch.setattr(Mortal, "finished", finished)
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        asyncio.run(_run(PoolRun(files, CALM), 4))
        assert check_branch(files, "run") == []


def _late(files: Files, commit: Commit) -> set[str]:
    """Return the open groups of a commit that have finished since."""
    open_ids = {one.group_id for one in commit.data.buffer if one.finished is None}
    rows = StoredRows(files)
    plans = {one.plan for one in commit.data.buffer}
    return {group_id for plan in plans for group_id in rows.finished(plan, open_ids)}
