"""Making a trainer hold a state of the store, and writing down what it holds when that could not be
had again.

    hold:  the state is held already, or its checkpoint is loaded and the batches since are trained again
           → the recorded state came out: that one → another one, in deterministic mode: Mismatch →
           another one else: its checkpoint, its segment node, then the branch's pointer to it, in
           this order

Killed between any two of these, the next attempt starts over from the recorded state, and makes
another segment or the state itself. Not here: which state is needed, and what has to be scored
again because it is another one (the driver).
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
    """What is asked of the ranks as a group (`trainer_group.TrainerGroup`)."""

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call all ranks; their answers in order of rank."""
        ...

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> dict[str, Any] | None:
        """Make all ranks hold the end of a lineage. None if they did already, else what `restore`
        answered."""
        ...


@dataclass(frozen=True)
class StateKeeper:
    """The states of one branch and a trainer that is set up for it."""

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

    async def hold(self, state: str, *, version: int, epoch: int) -> str:
        """Make the trainer hold the state that a node made; the digest of that node, or of the
        segment that is held instead.

        `version`: its weight version. `epoch`: the driver's, for the pointer to a segment. Raises:
        Mismatch in deterministic mode; ObjectMissing if the state cannot be rebuilt; what the ranks
        raised.
        """
        nodes = Nodes(self.files)
        lineage = await asyncio.to_thread(
            lineage_to, nodes, state, self.init, ref_update_interval=self.ref_update_interval
        )
        inputs = segment_inputs(lineage.target, lineage.base, uuid4().hex[:12])
        if lineage.replay and not self.deterministic:
            lineage = replace(lineage, segment=inputs.digest)
        deadline_s = self.checkpoint_timeout_s + len(lineage.replay) * self.train_timeout_s
        restored = await self.trainer.ensure(lineage, deadline_s=deadline_s)
        if restored is None or restored["mismatch"] is None:
            return state
        if self.deterministic:
            raise mismatch(restored)
        node = segment_node(nodes, inputs, restored, version=version, packages=self.packages)
        await self.save(checkpoint_inputs(inputs.digest), inputs.digest, version)
        nodes.commit(node)
        counts = Segments(self.files).record(
            self.branch, version, epoch, weights=state, segment=inputs.digest
        )
        if counts.segment == inputs.digest:
            return inputs.digest
        return await self.hold(counts.segment, version=version, epoch=epoch)

    async def save(self, inputs: Inputs, held: str, version: int, **outputs: Any) -> Node:
        """Write a checkpoint of what the trainer holds and wait until it is in the store: its node.

        Raises: StoreFull and what else an upload meets; DeadlineExceeded; TrainerError if it is not
        complete.
        """
        prefix = f"checkpoints/{self.branch}/iter_{version:07d}/{uuid4().hex[:12]}"
        deadline_s = self.checkpoint_timeout_s
        upload = Upload(prefix, inputs, {"version": version, **outputs})
        await self.trainer.call(
            "save", held=held, version=version, upload=upload, deadline_s=2 * deadline_s
        )
        shares = await self.trainer.call("uploaded", prefix=prefix, deadline_s=deadline_s)
        files = shares_complete(shares)
        if files is None:
            found = f"{sum(share is not None for share in shares)} of {len(shares)} ranks' shares"
            raise TrainerError(
                "a checkpoint was lost before it was in the store", where=prefix, found=found
            )
        size_bytes = sum(record.size_bytes for record in files)
        node = Nodes(self.files).commit(
            inputs.node(files=files, outputs={"version": version, **outputs, "bytes": size_bytes})
        )
        await self.trainer.call("forget_upload", prefix=prefix, deadline_s=deadline_s)
        return node


def mismatch(restored: Mapping[str, Any]) -> Mismatch:
    """The error of a replay that had to be exact and was not."""
    return Mismatch(
        "training the stored batches again gave another state than the recorded one",
        where=f"nodes/train/{restored['mismatch']}.json",
        found=f"{restored['state_digest']} after {restored['replayed']} batches",
        expected="the recorded state_digest",
        do="resume on the machine type and layout the run was made with, or fork from the newest checkpoint",
    )
