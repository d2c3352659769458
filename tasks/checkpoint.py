"""Stage 6: save a torch_dist checkpoint when one is due, and commit the iteration.

A checkpoint is on local disk when the stage ends. The upload runs during the next iterations. The
checkpoint counts once its node is recorded; a run that dies earlier restores the one before.
"""

from __future__ import annotations

import asyncio

from rlpipe.errors import RlpipeError, TrainerError
from rlpipe.lineage.stage_inputs import checkpoint_inputs, config_digest, eval_inputs
from rlpipe.observe.trace import traced
from rlpipe.store.branches import commit_name
from rlpipe.store.chain import leaf_paths
from rlpipe.store.signatures import SigningKey
from rlpipe.types import Commit, DataState, NodeRef, Stage
from tasks.context import RunContext, Stopwatch, context, packages
from tasks.ordering import evaluation_due
from tasks.record import stage_task
from tasks.train import hold
from tasks.uploads import begin_checkpoint, pending, settle


@stage_task("checkpoint", "checkpoint-{k}")
async def checkpoint(run: str, k: int, nodes: dict[str, NodeRef]) -> str:
    """Save weight version k + 1 if due, then commit iteration k; return the commit's name.

    `nodes`: stage → handle.
    """
    ctx = await context(run)
    train = nodes["train"].digest
    digests = {Stage(name): node.digest for name, node in nodes.items()}
    with traced(ctx.directory, "checkpoint", k):
        # Record an earlier upload first, so that this commit finds its node.
        await settle(ctx)
        if checkpoint_due(ctx, k):
            with ctx.progress.running("checkpoint", k), Stopwatch(ctx, "checkpoint"):
                await save(ctx, train, k + 1)
        commit = await asyncio.to_thread(_record, ctx, k, digests)
    ctx.notify()
    return commit_name(run, commit.iteration)


@stage_task("keep-last", "keep-last")
async def keep_last(run: str) -> None:
    """Save the newest weights at the end of a run, and wait until the upload is recorded."""
    ctx = await context(run)
    newest = await asyncio.to_thread(ctx.branches.newest, run)
    # A fork without own commits has its parent's newest commit.
    if newest is not None and newest.branch == run:
        version = newest.iteration + 1
        await save(ctx, await asyncio.to_thread(ctx.weights_before, version), version)
        await settle(ctx, wait=True)
        if not await is_saved(ctx, await asyncio.to_thread(ctx.weights_before, version)):
            raise TrainerError(
                "the last checkpoint was lost before its upload was complete",
                where=f"checkpoint {newest.iteration}",
            )


async def keep_if_held(run: str, *, within_s: float) -> bool:
    """Save the newest committed weights before exit, if the trainer holds them. True if saved.

    Without this checkpoint nothing is lost: a later start replays batches from the checkpoint
    before.
    """
    ctx = await context(run)
    try:
        async with asyncio.timeout(within_s):
            newest = await asyncio.to_thread(ctx.branches.newest, run)
            if newest is None or newest.branch != run:
                return False
            version = newest.iteration + 1
            weights = await asyncio.to_thread(ctx.weights_before, version)
            # Restoring them would take longer than the process has left.
            if await ctx.cluster.trainer.held() != weights:
                return False
            await save(ctx, weights, version)
            await settle(ctx, wait=True)
    # The process is about to end: a failed save costs a replay, not the run.
    except (TimeoutError, RlpipeError):
        return False
    return True


def checkpoint_due(ctx: RunContext, k: int) -> bool:
    """True every `save_interval` iterations, at each reference refresh, and after the last."""
    done = ctx.config.start_rollout_id + k + 1
    refresh = ctx.config.ref_update_interval
    refreshed = refresh is not None and done % refresh == 0
    return (
        refreshed
        or done % ctx.config.checkpoint.save_interval == 0
        or k + 1 == ctx.config.num_rollout
    )


async def save(ctx: RunContext, weights: str, weight_version: int) -> None:
    """Write a checkpoint to local disk and begin its upload, unless it is recorded or uploading."""
    inputs = checkpoint_inputs(weights)
    uploading = await pending(ctx)
    if await is_saved(ctx, weights) or (uploading and uploading[0].inputs == inputs):
        return
    await settle(ctx, wait=True)
    if await hold(ctx, weights, weight_version) != weights:
        return  # A segment replaced this state; the segment has its own checkpoint.
    await begin_checkpoint(ctx, inputs, weights, weight_version)


async def is_saved(ctx: RunContext, weights: str) -> bool:
    """True if the store has a checkpoint of these weights."""
    digest = checkpoint_inputs(weights).digest
    return await asyncio.to_thread(ctx.nodes.find, Stage.CHECKPOINT, digest) is not None


def _record(ctx: RunContext, k: int, nodes: dict[Stage, str]) -> Commit:
    """Commit iteration k, and sign the commit if there is a key.

    The commit names records of the weights before: checkpoint and evaluations. It also lists the
    ones still due of the weights that the iteration made.
    """
    before = ctx.nodes.get(Stage.TRAIN, nodes[Stage.TRAIN]).parents["before"]
    recorded = leaf_paths(before, _evaluations(ctx, before, k))
    commit = ctx.branches.commit(_commit(ctx, k, nodes), fence=ctx.epoch.check, look_for=recorded)
    # Sign the stored bytes, which a later verification reads.
    if (key := SigningKey.of_environment()) is not None:
        key.sign(ctx.files, commit.branch, k, ctx.branches.read_stored(commit.branch, k)[1])
    return commit


def _evaluations(ctx: RunContext, weights: str, version: int) -> list[str]:
    """Return the digests of the evaluations that are due for these weights."""
    datasets = ctx.config.evaluation.datasets if evaluation_due(ctx.config, version) else ()
    return [eval_inputs(ctx.config, dataset, weights, ctx.contracts).digest for dataset in datasets]


def _awaited(ctx: RunContext, k: int, weights: str) -> tuple[str, ...]:
    """Return paths of the records due for the iteration's weights.

    A checkpoint may upload for several iterations.
    """
    checkpoint, *evaluations = leaf_paths(weights, _evaluations(ctx, weights, k + 1))
    return (*([checkpoint] if checkpoint_due(ctx, k) else []), *evaluations)


def _commit(ctx: RunContext, k: int, nodes: dict[Stage, str]) -> Commit:
    run = ctx.config.run
    rollout = ctx.nodes.get(Stage.ROLLOUT, nodes[Stage.ROLLOUT]).outputs
    batch = ctx.nodes.get(Stage.ADVANTAGE, nodes[Stage.ADVANTAGE]).outputs
    return Commit(
        branch=run,
        iteration=k,
        parent=ctx.branches.parent_name(run, k),
        plans=tuple(rollout["plans"]),
        nodes=nodes,
        trained=tuple(batch["groups"]),
        dropped={**rollout["dropped"], **batch["dropped"]},
        data=DataState.model_validate(rollout["after"]),
        config_digest=config_digest(ctx.config),
        awaited=_awaited(ctx, k, nodes[Stage.TRAIN]),
        packages=packages(),
        epoch=ctx.epoch.number,
    )
