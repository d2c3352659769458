"""A small run written through the store's own functions, for the tests of audit and gc.

Each iteration draws three groups and takes those of the buffer. The first planned group goes to the
buffer, the second is dropped every other time, and the rest are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa

from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.gc import remove, unreachable
from rlpipe.store.nodes import Nodes, input_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.arrays import from_ragged
from rlpipe.store.parquet.rows import rewards_to_table
from rlpipe.store.parquet.schema import BATCH, make_table
from rlpipe.store.parquet.shards import ShardWriter, adopt, data_folder, write_data, write_table
from rlpipe.store.plans import Plans
from rlpipe.types import (
    BufferedGroup,
    Commit,
    DataState,
    FileRecord,
    Node,
    Plan,
    PlannedGroup,
    Sample,
    Stage,
    Status,
)


@dataclass
class Reward:
    """A verifier's answer."""

    group_id: str
    index: int
    reward: float | None = 1.0
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def sample(group_id: str, index: int) -> Sample:
    """Return a completed sample of three tokens."""
    return Sample(
        group_id=group_id,
        index=index,
        prompt=f"prompt of {group_id}",
        prompt_ids=[1, 2],
        response="abc",
        response_ids=[3, 4, 5],
        rollout_log_probs=[-0.5, -0.25, -0.125],
        weight_versions=[(3, 0)],
        status=Status.COMPLETED,
    )


def group(group_id: str, size: int = 2) -> list[Sample]:
    """Return all samples of one group."""
    return [sample(group_id, index) for index in range(size)]


def batch_table(groups: Sequence[str]) -> pa.Table:
    """Return the batch rows of the two samples of each of these groups."""
    rows = [(group_id, index) for group_id in groups for index in range(2)]
    tokens = np.arange(len(rows) + 1) * 5
    response = np.arange(len(rows) + 1) * 3
    columns = {
        "group_id": [group_id for group_id, _ in rows],
        "index": [index for _, index in rows],
        "tokens": from_ragged(np.tile(np.arange(1, 6), len(rows)), tokens, pa.int32()),
        "prompt_len": [2] * len(rows),
        "loss_mask": from_ragged(np.ones(response[-1]), response, pa.uint8()),
        "advantages": from_ragged(np.zeros(response[-1]), response, pa.float32()),
    }
    return make_table(BATCH, columns, "batch")


def make_node(
    stage: Stage, parents: dict[str, str], files: Sequence[FileRecord] = (), **config: object
) -> Node:
    """Return a node with the digest of its inputs."""
    digest = input_digest(stage, parents, config, {})
    return Node(stage=stage, digest=digest, parents=parents, config=config, files=tuple(files))


def collect(files: Files, grace_s: float) -> list[str]:
    """Remove unreachable objects while no driver is active, and return their names."""
    paths = unreachable(files, grace_s)
    remove(files, paths, lambda: None)
    return paths


@dataclass
class Run:
    """Writes a branch iteration by iteration. `stop_after` leaves an iteration uncommitted, as
    after a crash."""

    files: Files
    branch: str = "run"

    def start(self, parent: str | None = None) -> Self:
        init = Nodes(self.files).commit(make_node(Stage.INIT, {}, model="tiny"))
        Branches(self.files).create(self.branch, {"lr": 1e-6}, init.digest, parent)
        return self

    def iterate(self, stop_after: Stage | None = None) -> Commit | None:
        newest = Branches(self.files).newest(self.branch)
        before = newest.data if newest else DataState()
        plan = self.plan(newest.iteration + 1 if newest else 0, before)
        digest = Plans(self.files).write(plan)
        nodes = self.nodes(plan, digest, newest, stop_after)
        if stop_after:
            return None
        return Branches(self.files).commit(self.commit_of(plan, digest, nodes, newest))

    def plan(self, iteration: int, before: DataState) -> Plan:
        drawn = [f"{self.branch}:{before.draws + n:08d}" for n in range(3)]
        ids = [*(waiting.group_id for waiting in before.buffer), *drawn]
        groups = tuple(
            PlannedGroup(group_id=g, prompt="p", prompt_ids=(1, 2), seeds=(7, 8)) for g in ids
        )
        after = DataState(offset=before.offset + 3, draws=before.draws + 3)
        return Plan(
            branch=self.branch, iteration=iteration, groups=groups, before=before, after=after
        )

    def fates(self, plan: Plan) -> tuple[list[str], dict[str, str], str]:
        """Return the trained, dropped and buffered groups. Groups from the buffer are trained."""
        fresh = self.fresh(plan)
        dropped = {fresh[1]: "filtered"} if plan.iteration % 2 else {}
        trained = [
            g.group_id for g in plan.groups if g.group_id not in dropped and g.group_id != fresh[0]
        ]
        return trained, dropped, fresh[0]

    @staticmethod
    def fresh(plan: Plan) -> list[str]:
        """Return the groups that the plan drew itself."""
        waited = {waiting.group_id for waiting in plan.before.buffer}
        return [g.group_id for g in plan.groups if g.group_id not in waited]

    def after(self, plan: Plan, digest: str) -> DataState:
        """Return the state after an iteration. Its one buffered group has rows."""
        waiting = BufferedGroup(
            group_id=self.fates(plan)[2], plan=digest, rows=digest, oldest=0, finished=0
        )
        return plan.after.model_copy(update={"buffer": (waiting,)})

    def nodes(
        self, plan: Plan, digest: str, newest: Commit | None, stop_after: Stage | None
    ) -> dict[Stage, str]:
        trained, dropped, _ = self.fates(plan)
        writer = ShardWriter(self.files, Plans.groups_prefix(digest), plan.iteration)
        fresh = [group(group_id) for group_id in self.fresh(plan)]
        shards = [*self.waited(plan), writer.write(fresh[:1]), writer.write(fresh[1:], dropped)]
        state = newest.nodes[Stage.TRAIN] if newest else Branches(self.files).get(self.branch).init
        made: dict[Stage, str] = {}
        parents = {"plan": digest}
        for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.TRAIN):
            if stage is Stage.TRAIN:
                parents["state"] = state
            node = make_node(stage, dict(parents))
            node = node.model_copy(update={"files": tuple(self.stage_files(node, shards, trained))})
            if stage is Stage.ROLLOUT:
                after = self.after(plan, digest).model_dump(mode="json")
                outputs = {
                    "plans": [digest],
                    "after": after,
                    "dropped": dropped,
                    "accepted": trained,
                }
                node = node.model_copy(update={"outputs": outputs})
            if stage is Stage.TRAIN:
                metrics = {"train/loss": 0.5 / (plan.iteration + 1)}
                outputs = {
                    "version": plan.iteration + 1,
                    "state_digest": digest[::-1],
                    "metrics": metrics,
                }
                node = node.model_copy(update={"outputs": outputs})
            made[stage] = Nodes(self.files).commit(node).digest
            parents = {str(stage): node.digest}
            if stage is stop_after:
                break
        return made

    def waited(self, plan: Plan) -> list[FileRecord]:
        """Return the shards of earlier iterations with the groups of the buffer."""
        shards = [
            adopt(self.files, Plans.groups_prefix(waiting.rows))
            for waiting in plan.before.buffer
            if waiting.rows
        ]
        wanted = {waiting.group_id for waiting in plan.before.buffer}
        return [record for found in shards for record, groups in found if wanted & set(groups)]

    def stage_files(
        self, node: Node, shards: list[FileRecord], trained: list[str]
    ) -> list[FileRecord]:
        folder = data_folder(node.stage, node.digest)
        if node.stage is Stage.ROLLOUT:
            return shards
        if node.stage is Stage.REWARD:
            rows = [Reward(g, i) for g in trained for i in range(2)]
            return [write_table(self.files, folder, "rewards", rewards_to_table(rows))]
        if node.stage is Stage.ADVANTAGE:
            return [write_table(self.files, folder, "batch", batch_table(trained))]
        return [write_data(self.files, folder, "packing.json", b"[]")]

    def commit_of(
        self, plan: Plan, digest: str, nodes: dict[Stage, str], newest: Commit | None
    ) -> Commit:
        trained, dropped, _ = self.fates(plan)
        return Commit(
            branch=self.branch,
            iteration=plan.iteration,
            parent=commit_name(newest.branch, newest.iteration) if newest else None,
            plans=(digest,),
            nodes=nodes,
            trained=tuple(trained),
            dropped=dropped,
            data=self.after(plan, digest),
            config_digest="0" * 64,
        )
