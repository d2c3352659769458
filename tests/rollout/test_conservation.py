"""Exactly once as a property: random runs of many iterations, killed at random points and retried.

Every drawn group is trained once, dropped with a reason, or in the buffer. Ids are never drawn
twice. The oldest groups of the buffer come first. Finished rows are sampled again only if they are
too old. Store, data source and sampler are real; the engine is a function that finishes, fails,
waits or is cut off.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.batch.build import fix_batch
from rlpipe.batch.files import write_batch
from rlpipe.config.data import DataConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.source import DataSource
from rlpipe.errors import DataError, EngineError, EngineUnavailable
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.rollout.filters import Rejection
from rlpipe.rollout.generate import FINISHED, planned_sample
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import PlanPart, StoredRows
from rlpipe.rollout.rollout_settings import RolloutSettings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.plans import Plans
from rlpipe.types import Commit, DataState, PlannedGroup, Sample, Stage, Status
from tests.data.test_source import FILE, LETTERS, rows
from tests.store.lineage import make_node

LENGTH = 4
"""Tokens of a finished response."""


@dataclass(frozen=True)
class World:
    """Parameters of a random run."""

    seed: int
    batch: int
    over: int
    staleness: int
    partial: bool
    masking: bool
    deterministic: bool
    rejects: float
    fails: float
    crashes: float

    @property
    def config(self) -> RolloutConfig:
        return RolloutConfig(
            rollout_batch_size=self.batch,
            n_samples_per_prompt=2,
            over_sampling_batch_size=self.over,
            dynamic_sampling_filter_path="some.filter" if self.rejects else None,
            partial_rollout=self.partial,
            mask_offpolicy_in_partial_rollout=self.masking,
        )


WORLDS = st.builds(
    World,
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    over=st.integers(3, 6),
    staleness=st.sampled_from([0, 2]),
    partial=st.booleans(),
    masking=st.booleans(),
    deterministic=st.booleans(),
    rejects=st.sampled_from([0.0, 0.4]),
    fails=st.sampled_from([0.0, 0.15]),
    crashes=st.sampled_from([0.0, 0.4]),
)


@dataclass
class Engine:
    """Sample one token per tick, at random pace; the weight version is the iteration."""

    dice: random.Random
    world: World
    version: int
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    begun_from: dict[str, int] = field(default_factory=dict)

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        self.begun_from[group.group_id] = sum(len(sample.response_ids) for sample in so_far)
        assert not so_far or not all(sample.status in FINISHED for sample in so_far), (
            "a finished group is sampled again"
        )
        there = {sample.index: sample for sample in so_far}
        samples = [
            there.get(index) or planned_sample(group, index) for index in range(len(group.seeds))
        ]
        for sample in samples:
            sample.rollout_log_probs = sample.rollout_log_probs or []
        while unfinished := [sample for sample in samples if sample.status not in FINISHED]:
            for _ in range(self.dice.randrange(4)):
                await asyncio.sleep(0)
            if self.cut.is_set():
                for sample in unfinished:
                    sample.status = Status.ABORTED
                break
            if self.dice.random() < self.world.fails / LENGTH:
                raise EngineUnavailable("gone")
            self.step(self.dice.choice(unfinished))
        return samples

    def step(self, sample: Sample) -> None:
        sample.response_ids.append(len(sample.response_ids) + 7)
        assert sample.rollout_log_probs is not None
        sample.rollout_log_probs.append(-1.0)
        sample.weight_versions = [*sample.weight_versions, (1, self.version)]
        sample.status = Status.COMPLETED if len(sample.response_ids) == LENGTH else Status.PENDING

    async def cut_off(self) -> None:
        self.cut.set()


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
        if self.left < 1:
            raise Killed


class Driver:
    """Run iterations one after another against a store, as the flow does."""

    def __init__(self, files: Files, world: World) -> None:
        self.files, self.world, self.dice = files, world, random.Random(world.seed)
        self.plans, self.nodes, self.branches = Plans(files), Nodes(files), Branches(files)
        self.config = world.config
        data = DataConfig(prompts=FILE)
        self.source = DataSource(
            rows(7), LETTERS, data, self.config, "run", async_buffer_size=world.staleness
        )
        self.init = self.nodes.commit(make_node(Stage.INIT, {}, model="tiny")).digest
        self.branches.create("run", {}, self.init)
        self.writing = threading.Lock()
        self.verdicts: dict[str, bool] = {}

    def part(
        self, iteration: int, state: DataState, number: int, *, write: bool = True
    ) -> PlanPart:
        taken = self.source.takes(state)
        earlier = [
            group
            for digest in {one.plan for one in taken}
            for group in self.plans.read(digest).groups
        ]
        plan = self.source.plan(iteration, state, part=number, buffered=earlier)
        with self.writing:
            return PlanPart(self.plans.write(plan) if write else self.plans.find(plan) or "", plan)

    def more(self, part: PlanPart, *, write: bool = True) -> PlanPart:
        return self.part(part.plan.iteration, part.plan.after, part.plan.part + 1, write=write)

    def keep(self, samples: Sequence[Sample]) -> Rejection | None:
        group_id = samples[0].group_id
        kept = self.verdicts.setdefault(group_id, self.dice.random() >= self.world.rejects)
        return None if kept else Rejection("dull", fallback=group_id.endswith(("3", "6")))

    async def attempt(
        self, k: int, state: DataState, *, mortal: bool
    ) -> tuple[RolloutResult, StoredRows, Engine]:
        parts = [self.part(k, state, 0)]
        while not self.config.static and (following := self.more(parts[-1], write=False)).digest:
            parts.append(following)
        store = Mortal(self.files, self.dice.randrange(4) if mortal else float("inf"))
        engine = Engine(self.dice, self.world, k)
        chosen = RolloutSettings(
            batch_size=self.config.rollout_batch_size,
            static=self.config.static,
            in_order=self.world.deterministic,
            partial=self.config.partial_rollout,
            max_rounds=50,
            timeout_s=30.0,
            flush_interval_s=0.0005,
            min_completed_fraction=0.1,
        )
        result = await run_rollout(
            parts,
            chosen,
            engine,
            store,
            judge=GroupJudge(self.keep) if self.world.rejects else GroupJudge(),
            slots=asyncio.Semaphore(3),
            next_part=None if self.config.static else self.more,
            cut_off=engine.cut_off,
        )
        return result, store, engine

    async def rollout(self, k: int, state: DataState) -> tuple[RolloutResult, StoredRows]:
        for attempt in range(8):
            try:
                result, store, engine = await self.attempt(
                    k, state, mortal=attempt < 7 and self.dice.random() < self.world.crashes
                )
            except (Killed, EngineError):
                with self.writing:
                    assert unreachable(self.files, grace_s=-60) == [], (
                        "groups of a killed rollout can still be adopted"
                    )
                continue
            self.check_continuation(result, engine)
            return result, store
        raise EngineError("every attempt failed")

    def check_continuation(self, result: RolloutResult, engine: Engine) -> None:
        """Check that a continued group starts from its rows in the buffer."""
        for part in result.parts:
            for group in part.plan.groups:
                if group.earlier is not None:
                    assert engine.begun_from.get(group.group_id, 1) > 0

    async def iterate(self, k: int) -> bool:
        newest = self.branches.newest("run")
        state = newest.data if newest else DataState()
        result, store = await self.rollout(k, state)
        self.check(state, result)
        digests = [part.digest for part in result.parts]
        after = result.after.model_dump(mode="json")
        outputs = {
            "plans": digests,
            "after": after,
            "dropped": result.dropped,
            "accepted": list(result.accepted),
        }
        node = Inputs(Stage.ROLLOUT, {"plan": digests[0]}).node(
            files=tuple(store.files), outputs=outputs
        )
        self.nodes.commit(node)
        samples = table_to_samples(read_rows(self.files, store.files))
        self.check_rows(result, samples)
        batch = self.batch(k, samples, result)
        trained = batch.groups if batch else ()
        dropped = batch.dropped if batch else {}
        assert not dropped and set(trained) == set(result.accepted), (
            "accepted groups are fresh enough to be trained"
        )
        nodes = {Stage.ROLLOUT: node.digest}
        advantage = make_node(Stage.ADVANTAGE, {"rollout": node.digest})
        if batch is not None and trained:
            record = write_batch(self.files, advantage.digest, batch, batch.columns)
            nodes[Stage.ADVANTAGE] = self.nodes.commit(
                advantage.model_copy(update={"files": (record,)})
            ).digest
        self.branches.commit(
            Commit(
                branch="run",
                iteration=k,
                parent=commit_name("run", k - 1) if k else None,
                plans=tuple(digests),
                nodes=nodes,
                trained=tuple(trained),
                dropped={**result.dropped, **dropped},
                data=result.after,
                config_digest="0" * 64,
            )
        )
        return bool(trained)

    def batch(self, k: int, samples: list[Sample], result: RolloutResult):
        """Return the batch of an iteration; None if no group can be trained."""
        try:
            batch = fix_batch(
                samples,
                [],
                accepted=result.accepted,
                scored=False,
                version=k,
                max_staleness=self.world.staleness,
                mask_stale=self.world.masking,
            )
        except DataError:
            return None
        if batch.staleness is not None:
            counted = batch.staleness[batch.columns.loss_mask > 0]
            assert counted.max() <= self.world.staleness, "a token that is too old is trained"
        return batch

    def check(self, state: DataState, result: RolloutResult) -> None:
        planned = [group.group_id for part in result.parts for group in part.plan.groups]
        buffer = [one.group_id for one in result.after.buffer]
        assert len(set(planned)) == len(planned)
        assert sorted([*result.accepted, *result.dropped, *buffer]) == sorted(
            {*planned, *(one.group_id for one in state.buffer)}
        )
        assert buffer == sorted(buffer), "ids count draws: the oldest groups come first"
        assert len(result.accepted) == self.config.rollout_batch_size or self.config.static

    def check_rows(self, result: RolloutResult, samples: list[Sample]) -> None:
        """Check that the node has complete rows of accepted groups and of finished groups that
        wait."""
        for group_id in result.accepted:
            rows_of_group = [sample for sample in samples if sample.group_id == group_id]
            assert [sample.index for sample in rows_of_group] == [0, 1] and all(
                sample.status in FINISHED for sample in rows_of_group
            )
        for waiting in result.after.buffer:
            rows_of_group = [sample for sample in samples if sample.group_id == waiting.group_id]
            complete = bool(rows_of_group) and all(
                sample.status in FINISHED for sample in rows_of_group
            )
            assert not complete or None not in (waiting.rows, waiting.finished), (
                "finished rows are kept"
            )
            assert not rows_of_group or complete == (waiting.finished is not None)
            versions = [
                version for sample in rows_of_group for _, version in sample.weight_versions
            ]
            assert not rows_of_group or waiting.rows is None or waiting.oldest == min(versions)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORLDS)
def test_every_drawn_group_is_trained_dropped_or_buffered_once(world: World):
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        driver = Driver(files, world)
        for k in range(5):
            asyncio.run(driver.iterate(k))
        assert check_branch(files, "run") == []
        assert unreachable(files, grace_s=-60) == [] or world.crashes


@pytest.mark.parametrize("seed", range(3))
def test_in_deterministic_mode_timing_and_crashes_change_nothing(seed: int):
    def outcome(pace: int, crashes: float) -> list[tuple]:
        with tempfile.TemporaryDirectory(prefix="rl-") as folder:
            world = World(pace, 2, 5, seed, False, False, True, 0.0, 0.0, crashes)
            driver = Driver(Files(folder), world)
            for k in range(4):
                asyncio.run(driver.iterate(k))
            return [
                (commit.trained, commit.plans, commit.data)
                for commit in driver.branches.walk("run")
            ]

    assert outcome(1, 0.0) == outcome(2, 0.0) == outcome(3, 0.5)
