"""Checkpoints on their way to the store: written to local disk, uploaded in the background,
recorded when they are complete.

The ranks remember what they upload, so that any process of the run can record it. Not here: when
one is due (`checkpoint`).
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from rlpipe.actors.trainer.checkpoints import Upload, prune, shares_complete
from rlpipe.lineage.stage_inputs import Inputs
from tasks.context import RunContext


async def begin_checkpoint(
    it: RunContext, inputs: Inputs, held: str, weight_version: int, **outputs: Any
) -> None:
    """Write the state that the trainer holds under this name, and upload it in the background;
    `settle` records it."""
    prefix = f"{_folder(it)}iter_{weight_version:07d}/{uuid4().hex[:12]}"
    upload = Upload(prefix, inputs, {"version": weight_version, **outputs})
    deadline_s = it.config.checkpoint.timeout_s
    await it.cluster.trainer.call(
        "save", held=held, version=weight_version, upload=upload, deadline_s=deadline_s
    )


async def settle(it: RunContext, *, wait: bool = False) -> None:
    """Record the checkpoint whose upload is complete, whichever process of the run began it; with
    `wait`, wait for it.

    An upload that met a store that was away or full is begun again by the next call. One whose
    process died, or of which a file was removed meanwhile, is forgotten: the next checkpoint that
    is due counts. Raises: StoreFull and what else an upload met.
    """
    found = await pending(it)
    deadline_s = it.config.checkpoint.timeout_s
    if found is None or not (wait or found[1]):
        return
    upload = found[0]
    shares = await it.cluster.trainer.call("uploaded", prefix=upload.prefix, deadline_s=deadline_s)
    files = shares_complete(shares)
    if files is not None and await asyncio.to_thread(
        lambda: all(it.files.exists(record.path) for record in files)
    ):
        size_bytes = sum(record.size_bytes for record in files)
        await asyncio.to_thread(
            it.nodes.commit,
            upload.inputs.node(files=files, outputs={**upload.outputs, "bytes": size_bytes}),
        )
        await asyncio.to_thread(it.lineages.forget)
        await asyncio.to_thread(
            prune, it.directory / "checkpoints", it.config.checkpoint.keep_local
        )
    await it.cluster.trainer.call("forget_upload", prefix=upload.prefix, deadline_s=deadline_s)


async def pending(it: RunContext) -> tuple[Upload, bool] | None:
    """The upload of this run that some rank still has, and whether all of them have it complete."""
    answers = await it.cluster.trainer.call("upload", deadline_s=it.config.checkpoint.timeout_s)
    own = _folder(it)  # ranks that served another run before may have one of it
    there = [
        answer for answer in answers if answer is not None and answer[0].prefix.startswith(own)
    ]
    return (there[0][0], all(done for _, done in there)) if there else None


def _folder(it: RunContext) -> str:
    return f"checkpoints/{it.config.run}/"
