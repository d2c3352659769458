"""Random runs against a store: iterations one after another, killed at random points and retried.

Store, planner, data source and sampler are real. A property adds its engine and its checks.

Entry points: `World`, `RandomRun`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st

from rlpipe.batch.build import fix_batch
from rlpipe.batch.files import write_batch
from rlpipe.config.data import DataConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.source import DataSource
from rlpipe.errors import DataError, EngineError
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.rollout.filters import Rejection
from rlpipe.rollout.generate import Generate
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.planner import Planner
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import PlanPart, StoredRows
from rlpipe.rollout.rollout_settings import rollout_settings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Commit, DataState, Sample, Stage
from tests.data.test_source import FILE, LETTERS, rows
from tests.rows import rows_of
from tests.store.lineage import make_node


@dataclass(frozen=True, kw_only=True)
class World:
    """Parameters of a random run."""

    seed: int
    batch: int
    over: int
    staleness: int
    masking: bool = False
    rejects: float = 0.0
    fails: float = 0.0
    crashes: float = 0.0

    def config(self, **selection: Any) -> RolloutConfig:
        """Return the configuration of the rollouts; `selection` adds keys."""
        return RolloutConfig(
            rollout_batch_size=self.batch,
            n_samples_per_prompt=2,
            dynamic_sampling_filter_path="some.filter" if self.rejects else None,
            mask_offpolicy_in_partial_rollout=self.masking,
            max_sampling_rounds=50,
            timeout_s=30.0,
            flush_interval_s=0.0005,
            min_completed_fraction=0.1,
            **selection,
        )


PARAMETERS = {
    "seed": st.integers(0, 10**6),
    "batch": st.integers(1, 3),
    "masking": st.booleans(),
    "rejects": st.sampled_from([0.0, 0.4]),
    "fails": st.sampled_from([0.0, 0.15]),
    "crashes": st.sampled_from([0.0, 0.4]),
}
"""Strategies of the parameters that have the same values in each property."""


W = TypeVar("W", bound=World)


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


class RandomRun(Generic[W]):
    """Run iterations one after another against a store, as flow and generator do."""

    def __init__(self, files: Files, world: W, config: RolloutConfig) -> None:
        self.files, self.world, self.config = files, world, config
        self.dice = random.Random(world.seed)
        source = DataSource(
            rows(7),
            LETTERS,
            DataConfig(prompts=FILE),
            config,
            "run",
            async_buffer_size=world.staleness,
        )
        self.planner = Planner(source, config, files)
        self.planning = threading.Lock()
        self.nodes, self.branches = Nodes(files), Branches(files)
        init = self.nodes.commit(make_node(Stage.INIT, {}, model="tiny")).digest
        self.branches.create("run", {}, init)
        self.verdicts: dict[str, bool] = {}

    async def iterate(self, k: int) -> RolloutResult:
        """Sample, check and commit an iteration."""
        newest = self.branches.newest("run")
        state = newest.data if newest else DataState()
        result, store = await self._rollout(k, state)
        self.check(state, result)
        self._commit(k, result, store)
        return result

    async def _rollout(self, k: int, state: DataState) -> tuple[RolloutResult, StoredRows]:
        for attempt in range(8):
            is_mortal = attempt < 7 and self.dice.random() < self.world.crashes
            store = Mortal(self.files, self.dice.randrange(4) if is_mortal else float("inf"))
            try:
                first = self.planner.part(k, state, 0)
                return await self.attempt(k, self.planner.parts(first.digest), store), store
            except (Killed, EngineError):
                await self.after_kill()
        raise EngineError("every attempt failed")

    @abstractmethod
    async def attempt(self, k: int, parts: list[PlanPart], store: StoredRows) -> RolloutResult:
        """Run one attempt at the rollout of an iteration, with `sample`."""

    async def sample(
        self,
        parts: list[PlanPart],
        generate: Generate,
        store: StoredRows,
        *,
        in_order: bool = False,
        oldest_version: int | None = None,
        **keywords: Any,
    ) -> RolloutResult:
        """Call `run_rollout` with the settings of this run."""
        return await run_rollout(
            parts,
            rollout_settings(self.config, in_order=in_order, oldest_version=oldest_version),
            generate,
            store,
            judge=GroupJudge(self._keep if self.world.rejects else None),
            slots=asyncio.Semaphore(3),
            next_part=None if self.config.static else self._following,
            **keywords,
        )

    def _following(self, part: PlanPart) -> PlanPart:
        with self.planning:
            return self.planner.following(part)

    def _keep(self, samples: Sequence[Sample]) -> Rejection | None:
        group_id = samples[0].group_id
        kept = self.verdicts.setdefault(group_id, self.dice.random() >= self.world.rejects)
        return None if kept else Rejection("dull", fallback=group_id.endswith(("3", "6")))

    @abstractmethod
    async def after_kill(self) -> None:
        """Check or change the run after a failed attempt."""

    def check(self, state: DataState, result: RolloutResult) -> None:
        """Check that each group is accepted, dropped or in the buffer once."""
        planned = [group.group_id for part in result.parts for group in part.plan.groups]
        buffer = [one.group_id for one in result.after.buffer]
        assert len(set(planned)) == len(planned)
        assert sorted([*result.accepted, *result.dropped, *buffer]) == sorted(
            {*planned, *(one.group_id for one in state.buffer)}
        )
        assert buffer == sorted(buffer), "ids count draws: the oldest groups come first"
        assert len(result.accepted) == self.config.rollout_batch_size or self.config.static

    def check_rows(self, result: RolloutResult, samples: list[Sample]) -> None:
        """Check the rows of a rollout's node."""

    def _commit(self, k: int, result: RolloutResult, store: StoredRows) -> None:
        digests = [part.digest for part in result.parts]
        node = Inputs(Stage.ROLLOUT, {"plan": digests[0]}).node(
            files=tuple(store.files), outputs=result.outputs()
        )
        self.nodes.commit(node)
        samples = table_to_samples(read_rows(self.files, store.files))
        self.check_rows(result, samples)
        batch = self._batch(k, samples, result)
        trained = batch.groups if batch else ()
        assert set(trained) == set(result.accepted) and not (batch and batch.dropped), (
            "accepted groups are fresh enough to be trained"
        )
        nodes = {Stage.ROLLOUT: node.digest}
        if batch is not None and trained:
            advantage = make_node(Stage.ADVANTAGE, {"rollout": node.digest})
            written = write_batch(self.files, advantage.digest, batch, batch.columns)
            advantage = self.nodes.commit(advantage.model_copy(update={"files": written.files}))
            nodes[Stage.ADVANTAGE] = advantage.digest
        self.write(
            Commit(
                branch="run",
                iteration=k,
                parent=commit_name("run", k - 1) if k else None,
                plans=tuple(digests),
                nodes=nodes,
                trained=tuple(trained),
                dropped=result.dropped,
                data=result.after,
                config_digest="0" * 64,
            )
        )

    def write(self, commit: Commit) -> None:
        """Write a commit."""
        self.branches.commit(commit)

    def _batch(self, k: int, samples: list[Sample], result: RolloutResult):
        """Return the batch of an iteration; None if no group can be trained."""
        try:
            batch = fix_batch(
                rows_of(samples),
                [],
                accepted=result.accepted,
                scored=False,
                version=k,
                max_staleness=self.world.staleness,
                mask_stale=self.world.masking,
            ).batch()
        except DataError:
            return None
        if batch.staleness is not None:
            counted = batch.staleness[batch.columns.loss_mask > 0]
            assert counted.max() <= self.world.staleness, "a token that is too old is trained"
        return batch
