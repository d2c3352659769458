"""Upload checkpoints in the background and record them when they are complete.

The trainer ranks remember their upload, so any process of the run can record it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from rlpipe.actors.trainer.checkpoints import Upload, prune, shares_complete
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.store.objects.files import Files
from rlpipe.types import FileRecord
from tasks.context import RunContext

READERS = 16
"""Requests to the store at once. One after another, files of 512 ranks take 10 s at 20 ms each."""


async def begin_checkpoint(
    ctx: RunContext, inputs: Inputs, held: str, weight_version: int, **outputs: Any
) -> None:
    """Write the trainer's state to local disk and begin its upload. `settle` records it."""
    # A random suffix: a repeated upload never overwrites files of an earlier one.
    prefix = f"{_folder(ctx)}iter_{weight_version:07d}/{uuid4().hex[:12]}"
    upload = Upload(prefix, inputs, {"version": weight_version, **outputs})
    deadline_s = ctx.config.checkpoint.timeout_s
    await ctx.cluster.trainer.call(
        "save", held=held, version=weight_version, upload=upload, deadline_s=deadline_s
    )


async def settle(ctx: RunContext, *, wait: bool = False) -> None:
    """Record the checkpoint whose upload is complete. With `wait`, wait for the upload.

    An upload that failed because the store was full or unreachable is repeated by the next call. An
    upload whose process died, or whose file was removed meanwhile, is forgotten: the next due
    checkpoint counts. Raises: StoreFull and other errors of the upload.
    """
    upload, complete = await pending(ctx) or (None, False)
    deadline_s = ctx.config.checkpoint.timeout_s
    if upload is None or not (wait or complete):
        return
    shares = await ctx.cluster.trainer.call("uploaded", prefix=upload.prefix, deadline_s=deadline_s)
    files = shares_complete(shares)
    # Garbage collection may have removed files that no node named yet.
    if files is not None and await asyncio.to_thread(_all_exist, ctx.files, files):
        size_bytes = sum(record.size_bytes for record in files)
        await asyncio.to_thread(
            ctx.nodes.commit,
            upload.inputs.node(files=files, outputs={**upload.outputs, "bytes": size_bytes}),
        )
        # Cached lineages do not know the new checkpoint.
        await asyncio.to_thread(ctx.lineages.forget)
        await asyncio.to_thread(
            prune, ctx.directory / "checkpoints", ctx.config.checkpoint.keep_local
        )
    await ctx.cluster.trainer.call("forget_upload", prefix=upload.prefix, deadline_s=deadline_s)


async def pending(ctx: RunContext) -> tuple[Upload, bool] | None:
    """Return the upload of this run, and whether every rank has completed it."""
    deadline_s = ctx.config.checkpoint.timeout_s
    folder = _folder(ctx)
    # All ranks begin and forget an upload together, and most iterations have none.
    (prefix,) = await ctx.cluster.trainer.call("uploading", deadline_s=deadline_s)
    if prefix is None:
        return None
    answers = await ctx.cluster.trainer.call("upload", deadline_s=deadline_s)
    # Ranks that served another run before may still hold an upload of that run.
    uploads = [
        answer for answer in answers if answer is not None and answer[0].prefix.startswith(folder)
    ]
    return (uploads[0][0], all(complete for _, complete in uploads)) if uploads else None


def _all_exist(files: Files, records: Sequence[FileRecord]) -> bool:
    """True if the store has all of these files. Each rank has at least one."""
    with ThreadPoolExecutor(READERS) as pool:
        return all(pool.map(lambda record: files.exists(record.path), records))


def _folder(ctx: RunContext) -> str:
    return f"checkpoints/{ctx.config.run}/"
