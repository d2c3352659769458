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
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.errors import EngineUnavailable
from rlpipe.rollout.generate import FINISHED, planned_sample
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import PlanPart, StoredRows
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.gc import unreachable
from rlpipe.store.objects.files import Files
from rlpipe.types import PlannedGroup, Sample, Status
from tests.rollout.random_runs import PARAMETERS, RandomRun, World

LENGTH = 4
"""Tokens of a finished response."""


@dataclass(frozen=True, kw_only=True)
class CutWorld(World):
    """Parameters of a random run that cuts groups off."""

    partial: bool
    deterministic: bool


WORLDS = st.builds(
    CutWorld,
    **PARAMETERS,
    over=st.integers(3, 6),
    staleness=st.sampled_from([0, 2]),
    partial=st.booleans(),
    deterministic=st.booleans(),
)


@dataclass
class Engine:
    """Sample one token per tick, at random pace; the weight version is the iteration."""

    dice: random.Random
    fails: float
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
            if self.dice.random() < self.fails / LENGTH:
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


class CutRun(RandomRun[CutWorld]):
    """A random run that cuts groups off once the batch is full."""

    def __init__(self, files: Files, world: CutWorld) -> None:
        super().__init__(
            files,
            world,
            world.config(
                over_sampling_batch_size=world.over,
                partial_rollout=world.partial,
            ),
        )

    async def attempt(self, k: int, parts: list[PlanPart], store: StoredRows) -> RolloutResult:
        engine = Engine(self.dice, self.world.fails, k)
        result = await self.sample(
            parts, engine, store, in_order=self.world.deterministic, cut_off=engine.cut_off
        )
        for group in (group for part in result.parts for group in part.plan.groups):
            assert group.earlier is None or engine.begun_from.get(group.group_id, 1) > 0, (
                "a continued group starts from its rows in the buffer"
            )
        return result

    async def after_kill(self) -> None:
        with self.planning:
            assert unreachable(self.files, grace_s=-60) == [], (
                "groups of a killed rollout can still be adopted"
            )

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
def test_every_drawn_group_is_trained_dropped_or_buffered_once(world: CutWorld):
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        files = Files(folder)
        run = CutRun(files, world)
        for k in range(5):
            asyncio.run(run.iterate(k))
        assert check_branch(files, "run") == []
        assert unreachable(files, grace_s=-60) == [] or world.crashes


@pytest.mark.parametrize("seed", range(3))
def test_in_deterministic_mode_timing_and_crashes_change_nothing(seed: int):
    def outcome(pace: int, crashes: float) -> list[tuple]:
        with tempfile.TemporaryDirectory(prefix="rl-") as folder:
            world = CutWorld(
                seed=pace,
                batch=2,
                over=5,
                staleness=seed,
                partial=False,
                deterministic=True,
                crashes=crashes,
            )
            run = CutRun(Files(folder), world)
            for k in range(4):
                asyncio.run(run.iterate(k))
            return [
                (commit.trained, commit.plans, commit.data) for commit in run.branches.walk("run")
            ]

    assert outcome(1, 0.0) == outcome(2, 0.0) == outcome(3, 0.5)
