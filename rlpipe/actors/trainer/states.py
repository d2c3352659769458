"""Restore a recorded state in the trainer, and record the state that a replay gave instead.

`TrainerStates.restore` loads the newest checkpoint and trains the later batches again. Then:

    the recorded state came out              hold it
    another state, in deterministic mode     Mismatch
    another state otherwise                  save its checkpoint, then its segment node, then the
                                             branch's pointer to the node, in this order

If the process is killed between two of these steps, the next attempt starts from the recorded state
again, and makes another segment or the recorded state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from rlpipe.actors.trainer.checkpoints import Upload, shares_complete
from rlpipe.errors import Mismatch, TrainerError
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs, segment_inputs
from rlpipe.lineage.states import Lineage, lineage_to, segment_node
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments
from rlpipe.types import Node


class Trainer(Protocol):
    """The ranks as a group: `TrainerGroup`, or `RemoteTrainer` in a driver."""

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call a method of all ranks; return their answers in order of rank."""
        ...

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> dict[str, Any] | None:
        """Make all ranks hold the end of a lineage; return None if they held it already."""
        ...


@dataclass(frozen=True)
class TrainerStates:
    """The states of one branch in a trainer that is set up for the branch."""

    trainer: Trainer
    files: Files
    branch: str
    init: str
    """Digest of the branch's init node."""
    deterministic: bool
    train_timeout_s: float
    checkpoint_timeout_s: float
    packages: Mapping[str, str] = field(default_factory=dict)
    ref_update_interval: int | None = None
    ref_update_offset: int = 0

    async def restore(self, state: str, *, version: int, epoch: int) -> str:
        """Make the trainer hold a state; return its node's digest, or that of a segment instead.

        `state`: digest of the node that made the state. `version`: its weight version. `epoch` of
        the driver, for the pointer to a segment. Raises: Mismatch in deterministic mode;
        ObjectMissing if the state cannot be rebuilt; errors of the ranks.
        """
        nodes = Nodes(self.files)
        lineage = await asyncio.to_thread(
            lineage_to,
            nodes,
            state,
            self.init,
            ref_update_interval=self.ref_update_interval,
            ref_update_offset=self.ref_update_offset,
        )
        # The name of a segment is needed before the replay: ranks hold their state under it.
        inputs = segment_inputs(lineage.target, lineage.base, uuid4().hex[:12])
        if lineage.replay and not self.deterministic:
            lineage = replace(lineage, segment=inputs.digest)
        deadline_s = self.checkpoint_timeout_s + len(lineage.replay) * self.train_timeout_s
        restored = await self.trainer.ensure(lineage, deadline_s=deadline_s)
        if restored is None or restored["mismatch"] is None:
            return state
        if self.deterministic:
            raise replay_mismatch(restored)
        node = segment_node(nodes, inputs, restored, version=version, packages=self.packages)
        # The checkpoint first: a segment without one could never be restored.
        await self.save(checkpoint_inputs(inputs.digest), inputs.digest, version)
        nodes.commit(node)
        pointer = Segments(self.files).record(
            self.branch, version, epoch, weights=state, segment=inputs.digest
        )
        if pointer.segment == inputs.digest:
            return inputs.digest
        # Another process recorded its segment first; all continue from that one.
        return await self.restore(pointer.segment, version=version, epoch=epoch)

    async def save(self, inputs: Inputs, held: str, version: int, **outputs: Any) -> Node:
        """Write a checkpoint of the held state, wait for its upload, and return its node.

        Raises: StoreFull and other errors of the upload; DeadlineExceeded; TrainerError if a rank
        lost its share.
        """
        prefix = f"checkpoints/{self.branch}/iter_{version:07d}/{uuid4().hex[:12]}"
        deadline_s = self.checkpoint_timeout_s
        upload = Upload(prefix, inputs, {"version": version, **outputs})
        # Twice the time: ranks first wait for the upload of the checkpoint before.
        await self.trainer.call(
            "save", held=held, version=version, upload=upload, deadline_s=2 * deadline_s
        )
        shares = await self.trainer.call("uploaded", prefix=prefix, deadline_s=deadline_s)
        files = shares_complete(shares)
        if files is None:
            num_uploaded = sum(share is not None for share in shares)
            raise TrainerError(
                "a checkpoint was lost before it was in the store",
                where=prefix,
                found=f"{num_uploaded} of {len(shares)} ranks' shares",
            )
        size_bytes = sum(record.size_bytes for record in files)
        node = Nodes(self.files).commit(
            inputs.node(files=files, outputs={"version": version, **outputs, "bytes": size_bytes})
        )
        await self.trainer.call("forget_upload", prefix=prefix, deadline_s=deadline_s)
        return node


def replay_mismatch(restored: Mapping[str, Any]) -> Mismatch:
    """Return the error of a replay that gave another state in deterministic mode."""
    return Mismatch(
        "training the stored batches again gave another state than the recorded one",
        where=f"nodes/train/{restored['mismatch']}.json",
        found=f"{restored['state_digest']} after {restored['replayed']} batches",
        expected="the recorded state_digest",
        do="resume on the machine type and layout of the run, or fork from the newest checkpoint",
    )
