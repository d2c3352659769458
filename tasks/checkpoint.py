"""Stage 6: a torch_dist checkpoint when one is due, and the commit of the iteration.

A checkpoint is on local disk when the stage ends; it is uploaded while the next iterations run, and counts once its node is
recorded. A run that dies before that is rebuilt from the checkpoint before.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import uuid4

from rlpipe.actors.checkpoints import prune
from rlpipe.errors import RlpipeError, TrainerError
from rlpipe.inputs import Inputs, checkpoint_inputs, config_digest
from rlpipe.store.branches import commit_name
from rlpipe.types import Commit, FileRecord, NodeRef, Stage
from tasks.context import RunContext, Stopwatch, Upload, context
from tasks.record import stage_task
from tasks.train import hold

PACKAGES = ("rlpipe", "torch", "megatron-core", "mbridge", "sglang", "sglang-router", "transformers", "ray", "prefect", "pyarrow")


@stage_task("checkpoint", "checkpoint-{k}")
async def checkpoint(run: str, k: int, nodes: dict[str, NodeRef]) -> str:
    """Checkpoint weight version k + 1 if it is due, then commit iteration k; the commit's name. `nodes`: its stages' handles."""
    it = await context(run)
    train = nodes["train"].digest
    digests = {Stage(name): node.digest for name, node in nodes.items()}
    await settle(it)
    if checkpoint_due(it, k):
        it.progress.stage("checkpoint")
        with Stopwatch(it, "checkpoint"):
            await save(it, train, k + 1)
    commit = it.branches.commit(_commit(it, k, digests), fence=it.epoch.check)
    return commit_name(run, commit.iteration)


@stage_task("keep-last", "keep-last")
async def keep_last(run: str) -> None:
    """Checkpoint the newest weights of a run that ends, and wait until that is in the store."""
    it = await context(run)
    newest = it.branches.newest(run)
    if newest is not None and newest.branch == run:
        await save(it, newest.nodes[Stage.TRAIN], newest.iteration + 1)
        await settle(it, wait=True)
        if it.nodes.find(Stage.CHECKPOINT, checkpoint_inputs(newest.nodes[Stage.TRAIN]).digest) is None:
            raise TrainerError("the last checkpoint was lost before it was in the store", where=f"checkpoint {newest.iteration}")


async def keep_if_held(run: str, *, within_s: float) -> bool:
    """On the way out: checkpoint the newest committed weights if the trainer holds them just now. Did it?

    Without it nothing is lost: the weights are rebuilt from the checkpoint before and the batches since.
    """
    it = await context(run)
    newest = it.branches.newest(run)
    if newest is None or newest.branch != run:
        return False
    try:
        async with asyncio.timeout(within_s):
            if not await it.cluster.trainer.holds(newest.nodes[Stage.TRAIN]):
                return False
            await save(it, newest.nodes[Stage.TRAIN], newest.iteration + 1)
            await settle(it, wait=True)
    except (TimeoutError, RlpipeError):
        return False
    return True


def checkpoint_due(it: RunContext, k: int) -> bool:
    """Every `save_interval` iterations, and after the last."""
    return (k + 1) % it.config.checkpoint.save_interval == 0 or k + 1 == it.config.num_rollout


async def save(it: RunContext, weights: str, weight_version: int) -> None:
    """Write a checkpoint of these weights to local disk and begin its upload, unless it is recorded or on its way."""
    inputs = checkpoint_inputs(weights)
    if it.nodes.find(inputs.stage, inputs.digest) is not None or (it.upload and it.upload.inputs == inputs):
        return
    await settle(it, wait=True)
    await hold(it, weights)
    await begin_checkpoint(it, inputs, weights, weight_version)


async def begin_checkpoint(it: RunContext, inputs: Inputs, held: str, weight_version: int, **outputs: Any) -> None:
    """Write the state that the trainer holds under this name, and upload it in the background; `settle` records it."""
    prefix = f"checkpoints/{it.config.run}/iter_{weight_version:07d}/{uuid4().hex[:12]}"
    deadline_s = it.config.checkpoint.timeout_s
    await it.cluster.trainer.call("save", held=held, version=weight_version, prefix=prefix, deadline_s=deadline_s)
    it.upload = Upload(prefix, inputs, {"version": weight_version, **outputs})


async def settle(it: RunContext, *, wait: bool = False) -> None:
    """Record the checkpoint whose upload is complete; with `wait`, wait for it.

    An upload whose process died is forgotten: the next checkpoint that is due counts. Raises: StoreFull and what else an
    upload met.
    """
    upload, deadline_s = it.upload, it.config.checkpoint.timeout_s
    if upload is None:
        return
    if not wait and not all(await it.cluster.trainer.call("upload_done", prefix=upload.prefix, deadline_s=deadline_s)):
        return
    it.upload = None
    shares = await it.cluster.trainer.call("uploaded", prefix=upload.prefix, deadline_s=deadline_s)
    files: tuple[FileRecord, ...] = tuple(record for share in shares for record in share or ())
    if any(share is None for share in shares) or not any(record.path.endswith("/.metadata") for record in files):
        return
    size_bytes = sum(record.size_bytes for record in files)
    it.nodes.commit(upload.inputs.node(files=files, outputs={**upload.outputs, "bytes": size_bytes}))
    await asyncio.to_thread(prune, it.directory / "checkpoints", it.config.checkpoint.keep_local)


def _commit(it: RunContext, k: int, nodes: dict[Stage, str]) -> Commit:
    run = it.config.run
    plan_digest = it.nodes.get(Stage.ROLLOUT, nodes[Stage.ROLLOUT]).parents["plan"]
    batch = it.nodes.get(Stage.ADVANTAGE, nodes[Stage.ADVANTAGE]).outputs
    return Commit(
        branch=run,
        iteration=k,
        parent=commit_name(run, k - 1) if k else None,
        plan=plan_digest,
        nodes=nodes,
        trained=tuple(batch["groups"]),
        dropped=batch["dropped"],
        data=it.plans.read(plan_digest).after,
        config_digest=config_digest(it.config),
        packages=packages(),
        epoch=it.epoch.number,
    )


def packages() -> dict[str, str]:
    """Versions of what computes the result; a package that is not installed is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
