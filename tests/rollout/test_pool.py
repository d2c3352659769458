"""Groups that are sampled across rollouts (rlpipe.rollout.pool).

One file because the tests of the audit and of garbage collection use the world of the property.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.batch.build import fix_batch
from rlpipe.batch.files import write_batch
from rlpipe.config.data import DataConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.source import DataSource
from rlpipe.errors import EngineError, EngineUnavailable, StoreError
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.rollout.filters import Rejection
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.planner import Planner
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import RolloutProgress, RolloutResult, build_result
from rlpipe.rollout.rollout_rows import MemoryRows, PlanPart, StoredRows
from rlpipe.rollout.rollout_settings import RolloutSettings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.store.audit.verification import check_branch, check_store
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import BufferedGroup, Commit, DataState, Plan, PlannedGroup, Sample, Stage, Status
from tests.data.test_source import FILE, LETTERS, rows
from tests.store.lineage import collect, make_node

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


class _FailingRows(MemoryRows):
    """Rows of a store that fails for some writes."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def write(self, part, groups, *, cut=False):
        if self.failures:
            self.failures -= 1
            raise StoreError("S3 request failed")
        super().write(part, groups, cut=cut)


@pytest.mark.parametrize("failures", [0, 2])
async def test_groups_that_finish_between_rollouts_are_written_once_the_store_answers(
    failures: int,
):
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
    kept = _FailingRows(failures)
    pool.leave(result, kept, 0.0)
    async with asyncio.timeout(10):
        while len(kept.samples) < 2:  # noqa: ASYNC110 - rows have no event for a write
            await asyncio.sleep(0.001)
    await pool.stop_writing()
    assert sorted(sample.group_id for sample in kept.samples) == ["b:0", "b:1"]
    assert pool.group_ids == {"b:0", "b:1"}


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


# ---- a run with crashes ----


@dataclass(frozen=True)
class World:
    """Parameters of a random run."""

    seed: int
    batch: int
    in_flight: int
    """Groups in flight."""
    over: int
    staleness: int
    masking: bool
    rejects: float
    fails: float
    crashes: float
    losses: float
    """Probability that the pool is lost between two iterations."""

    @property
    def config(self) -> RolloutConfig:
        return RolloutConfig(
            rollout_batch_size=self.batch,
            n_samples_per_prompt=2,
            selection="first_finished",
            pool_size=self.in_flight,
            over_sampling_batch_size=self.batch + self.over,
            dynamic_sampling_filter_path="some.filter" if self.rejects else None,
            mask_offpolicy_in_partial_rollout=self.masking,
        )


WORLDS = st.builds(
    World,
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    in_flight=st.integers(1, 7),
    over=st.integers(0, 2),
    staleness=st.integers(1, 3),
    masking=st.booleans(),
    rejects=st.sampled_from([0.0, 0.4]),
    fails=st.sampled_from([0.0, 0.15]),
    crashes=st.sampled_from([0.0, 0.4]),
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


class Killed(Exception):
    """The process was killed."""


class Mortal(StoredRows):
    """Rows of a process that is killed after `writes` writes."""

    def __init__(self, files: Files, writes: float) -> None:
        super().__init__(files)
        self.left = writes

    def write(self, part, groups, *, cut=False):
        if self.left < 1:
            raise Killed
        self.left -= 1
        super().write(part, groups, cut=cut)


class Driver:
    """Run iterations one after another against a store, as flow and generator do."""

    def __init__(self, files: Files, world: World) -> None:
        self.files, self.world, self.dice = files, world, random.Random(world.seed)
        self.config = world.config
        data = DataConfig(prompts=FILE)
        source = DataSource(
            rows(7), LETTERS, data, self.config, "run", async_buffer_size=world.staleness
        )
        self.planner = Planner(source, self.config, files)
        self.nodes, self.branches = Nodes(files), Branches(files)
        self.init = self.nodes.commit(make_node(Stage.INIT, {}, model="tiny")).digest
        self.branches.create("run", {}, self.init)
        self.verdicts: dict[str, bool] = {}
        self.engine = Engine(self.dice, world.fails)
        self.pool = Pool(self.config.groups_in_pool(self.world.staleness))
        self.surplus: set[str] = set()
        """Groups that finished and waited in the buffer."""

    def keep(self, samples: Sequence[Sample]) -> Rejection | None:
        group_id = samples[0].group_id
        kept = self.verdicts.setdefault(group_id, self.dice.random() >= self.world.rejects)
        return None if kept else Rejection("dull", fallback=group_id.endswith(("3", "6")))

    async def attempt(self, k: int, state: DataState, writes: float) -> tuple:
        first = self.planner.part(k, state, 0)
        parts = self.planner.parts(first.digest)
        store = Mortal(self.files, writes)
        self.pool.retain({group.group_id for part in parts for group in part.plan.groups})
        result = await run_rollout(
            parts,
            RolloutSettings(
                batch_size=self.config.rollout_batch_size,
                static=False,
                in_order=False,
                partial=False,
                max_rounds=50,
                timeout_s=30.0,
                flush_interval_s=0.0005,
                min_completed_fraction=0.1,
                groups_per_round=self.config.groups_per_round,
                oldest_version=k - self.world.staleness,
                mask_stale=self.world.masking,
            ),
            self.engine,
            store,
            judge=GroupJudge(self.keep) if self.world.rejects else GroupJudge(),
            slots=asyncio.Semaphore(1),
            pool=self.pool,
            next_part=self.planner.following,
        )
        return result, store

    async def lose_pool(self) -> None:
        await self.pool.close()
        self.pool = Pool(self.config.groups_in_pool(self.world.staleness))

    async def rollout(self, k: int, state: DataState) -> tuple[RolloutResult, StoredRows]:
        for attempt in range(8):
            is_mortal = attempt < 7 and self.dice.random() < self.world.crashes
            try:
                return await self.attempt(
                    k, state, self.dice.randrange(4) if is_mortal else float("inf")
                )
            except (Killed, EngineError):
                if self.dice.random() < 0.5:
                    await self.lose_pool()
        raise EngineError("every attempt failed")

    async def iterate(self, k: int) -> None:
        newest = self.branches.newest("run")
        state = newest.data if newest else DataState()
        result, store = await self.rollout(k, state)
        self.check(state, result)
        self.pool.leave(result, StoredRows(self.files), 0.0005)
        self.commit(k, result, store)
        self.engine.version = k + 1
        for _ in range(self.dice.randrange(30)):
            await asyncio.sleep(0.0001)
        await self.pool.stop_writing()
        if self.dice.random() < self.world.losses:
            await self.lose_pool()

    def commit(self, k: int, result: RolloutResult, store: StoredRows) -> None:
        digests = [part.digest for part in result.parts]
        outputs = {
            "plans": digests,
            "after": result.after.model_dump(mode="json"),
            "dropped": result.dropped,
            "accepted": list(result.accepted),
        }
        node = Inputs(Stage.ROLLOUT, {"plan": digests[0]}).node(
            files=tuple(store.files), outputs=outputs
        )
        self.nodes.commit(node)
        samples = table_to_samples(read_rows(self.files, store.files))
        batch = fix_batch(
            samples,
            [],
            accepted=result.accepted,
            scored=False,
            version=k,
            max_staleness=self.world.staleness,
            mask_stale=self.world.masking,
        )
        assert not batch.dropped and set(batch.groups) == set(result.accepted), (
            "accepted groups are fresh enough to be trained"
        )
        advantage = make_node(Stage.ADVANTAGE, {"rollout": node.digest})
        record = write_batch(self.files, advantage.digest, batch, batch.columns)
        self.nodes.commit(advantage.model_copy(update={"files": (record,)}))
        self.write(
            Commit(
                branch="run",
                iteration=k,
                parent=commit_name("run", k - 1) if k else None,
                plans=tuple(digests),
                nodes={Stage.ROLLOUT: node.digest, Stage.ADVANTAGE: advantage.digest},
                trained=tuple(batch.groups),
                dropped=result.dropped,
                data=result.after,
                config_digest="0" * 64,
            )
        )

    def write(self, commit: Commit) -> Commit:
        return self.branches.commit(commit)

    def check(self, state: DataState, result: RolloutResult) -> None:
        planned = [group.group_id for part in result.parts for group in part.plan.groups]
        buffer = [one.group_id for one in result.after.buffer]
        assert len(set(planned)) == len(planned)
        assert sorted([*result.accepted, *result.dropped, *buffer]) == sorted(planned)
        assert {one.group_id for one in state.buffer} <= set(planned)
        assert len(result.accepted) == self.config.rollout_batch_size
        self.surplus |= {one.group_id for one in result.after.buffer if one.finished is not None}
        if self.world.fails or self.world.crashes:
            return  # an attempt before may have needed more parts than this one
        # A part is planned when the last group of the part before has begun.
        surplus = self.config.groups_in_pool(self.world.staleness) + self.config.groups_per_round
        assert len([one for one in result.after.buffer if one.finished is None]) <= surplus


async def _run(driver: Driver, iterations: int) -> None:
    for k in range(iterations):
        await driver.iterate(k)
    await driver.pool.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORLDS)
def test_every_drawn_group_of_the_pool_is_trained_dropped_or_open_once(world: World):
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        driver = Driver(files, world)
        asyncio.run(_run(driver, 5))
        assert check_branch(files, "run") == []
        assert check_store(files, "run").findings == []
        if not world.fails and not world.crashes and not world.losses:
            begun = Counter(driver.engine.begun)
            again = {group_id for group_id, count in begun.items() if count > 1}
            assert again <= driver.surplus, "only a finished group whose tokens became too old"


CALM = World(1, 2, 4, 1, 3, False, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        ("lost", "is neither trained nor dropped nor buffered"),
        ("doubled", "is accounted for 2 times"),
        ("foreign", "was never drawn"),
    ],
)
def test_the_audit_finds_an_open_group_that_a_commit_loses_or_doubles(planted: str, problem: str):
    class Planting(Driver):
        def write(self, commit: Commit) -> Commit:
            *others, last = commit.data.buffer
            if planted == "lost":
                buffer = tuple(others)
            elif planted == "doubled":
                buffer = (*others, last, last)
            else:
                buffer = (*others, last, last.model_copy(update={"group_id": "run:00009999"}))
            data = commit.data.model_copy(update={"buffer": buffer})
            return super().write(commit.model_copy(update={"data": data}))

    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        driver = Planting(files, CALM)
        asyncio.run(_run(driver, 1))
        assert any(problem in finding.problem for finding in check_branch(files, "run"))


def test_a_group_that_finished_between_two_rollouts_is_no_garbage_and_is_not_sampled_again():
    async def lose_the_pool_after_late_groups(driver: Driver, files: Files) -> None:
        k = 0
        late: set[str] = set()
        while not late:
            assert k < 20, "a group finishes between two rollouts"
            await driver.iterate(k)
            newest = driver.branches.newest("run")
            assert newest is not None
            late = _late(files, newest)
            k += 1
        await driver.lose_pool()
        collect(files, grace_s=-60)
        driver.engine.begun.clear()
        await driver.iterate(k)
        assert not late & set(driver.engine.begun)
        await driver.pool.close()

    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        asyncio.run(lose_the_pool_after_late_groups(Driver(files, CALM), files))
        assert check_branch(files, "run") == []


def test_a_rollout_reads_no_shards_of_the_one_before_if_the_pool_has_all_its_open_groups(
    monkeypatch: pytest.MonkeyPatch,
):
    def finished(rows: StoredRows, digest: str, group_ids: Sequence[str]) -> None:
        raise AssertionError(f"{digest} is read")

    monkeypatch.setattr(Mortal, "finished", finished)
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        asyncio.run(_run(Driver(files, CALM), 4))
        assert check_branch(files, "run") == []


def _late(files: Files, commit: Commit) -> set[str]:
    """Return the open groups of a commit that have finished since."""
    open_ids = {one.group_id for one in commit.data.buffer if one.finished is None}
    rows = StoredRows(files)
    plans = {one.plan for one in commit.data.buffer}
    return {group_id for plan in plans for group_id in rows.finished(plan, open_ids)}
