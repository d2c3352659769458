"""Stage 6: a torch_dist checkpoint when one is due, and the commit of the iteration.

A checkpoint is on local disk when the stage ends; it is uploaded while the next iterations run, and
counts once its node is recorded. A run that dies before that is rebuilt from the checkpoint before.
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
from tasks.record import stage_task
from tasks.train import hold
from tasks.turn import evaluation_due
from tasks.uploads import begin_checkpoint, pending, settle


@stage_task("checkpoint", "checkpoint-{k}")
async def checkpoint(run: str, k: int, nodes: dict[str, NodeRef]) -> str:
    """Checkpoint weight version k + 1 if it is due, then commit iteration k; the commit's name.
    `nodes`: its stages' handles."""
    it = await context(run)
    train = nodes["train"].digest
    digests = {Stage(name): node.digest for name, node in nodes.items()}
    with traced(it.directory, "checkpoint", k):
        await settle(it)
        if checkpoint_due(it, k):
            it.progress.stage("checkpoint")
            with Stopwatch(it, "checkpoint"):
                await save(it, train, k + 1)
        commit = await asyncio.to_thread(_record, it, k, digests)
    it.tell()
    return commit_name(run, commit.iteration)


@stage_task("keep-last", "keep-last")
async def keep_last(run: str) -> None:
    """Checkpoint the newest weights of a run that ends, and wait until that is in the store."""
    it = await context(run)
    newest = await asyncio.to_thread(it.branches.newest, run)
    if newest is not None and newest.branch == run:
        version = newest.iteration + 1
        await save(it, await asyncio.to_thread(it.weights_before, version), version)
        await settle(it, wait=True)
        if not await is_saved(it, await asyncio.to_thread(it.weights_before, version)):
            raise TrainerError(
                "the last checkpoint was lost before it was in the store",
                where=f"checkpoint {newest.iteration}",
            )


async def keep_if_held(run: str, *, within_s: float) -> bool:
    """On the way out: checkpoint the newest committed weights if the trainer holds them just now.
    Did it?

    Without it nothing is lost: the weights are rebuilt from the checkpoint before and the batches
    since.
    """
    it = await context(run)
    try:
        async with asyncio.timeout(within_s):
            newest = await asyncio.to_thread(it.branches.newest, run)
            if newest is None or newest.branch != run:
                return False
            version = newest.iteration + 1
            weights = await asyncio.to_thread(it.weights_before, version)
            if not await it.cluster.trainer.holds(weights):
                return False
            await save(it, weights, version)
            await settle(it, wait=True)
    except (TimeoutError, RlpipeError):
        return False
    return True


def checkpoint_due(it: RunContext, k: int) -> bool:
    """Every `save_interval` iterations, with every refresh of the reference, and after the last."""
    refresh = it.config.ref_update_interval
    refreshed = refresh is not None and (k + 1) % refresh == 0
    return (
        refreshed
        or (k + 1) % it.config.checkpoint.save_interval == 0
        or k + 1 == it.config.num_rollout
    )


async def save(it: RunContext, weights: str, weight_version: int) -> None:
    """Write a checkpoint of these weights to local disk and begin its upload, unless it is recorded
    or on its way."""
    inputs = checkpoint_inputs(weights)
    going = await pending(it)
    if await is_saved(it, weights) or (going and going[0].inputs == inputs):
        return
    await settle(it, wait=True)
    if await hold(it, weights, weight_version) != weights:
        return  # another state took its place, with a checkpoint of its own
    await begin_checkpoint(it, inputs, weights, weight_version)


async def is_saved(it: RunContext, weights: str) -> bool:
    """Is there a checkpoint of these weights in the store?"""
    digest = checkpoint_inputs(weights).digest
    return await asyncio.to_thread(it.nodes.find, Stage.CHECKPOINT, digest) is not None


def _record(it: RunContext, k: int, nodes: dict[Stage, str]) -> Commit:
    """Commit iteration k, and sign it if there is a key.

    The chain looks for what is known of the weights before, and waits for what is due of those that
    the iteration made.
    """
    before = it.nodes.get(Stage.TRAIN, nodes[Stage.TRAIN]).parents["before"]
    known = leaf_paths(before, _evaluations(it, before, k))
    commit = it.branches.commit(_commit(it, k, nodes), fence=it.epoch.check, look_for=known)
    if (key := SigningKey.of_environment()) is not None:
        key.sign(it.files, commit.branch, k, it.branches.read_stored(commit.branch, k)[1])
    return commit


def _evaluations(it: RunContext, weights: str, version: int) -> list[str]:
    """Digests of the evaluations that these weights get."""
    datasets = it.config.evaluation.datasets if evaluation_due(it.config, version) else ()
    return [eval_inputs(it.config, dataset, weights, it.contracts).digest for dataset in datasets]


def _awaited(it: RunContext, k: int, weights: str) -> tuple[str, ...]:
    """Paths of what is due of the weights that iteration k made; a checkpoint may be uploaded for
    some iterations."""
    checkpoint, *evaluations = leaf_paths(weights, _evaluations(it, weights, k + 1))
    return (*([checkpoint] if checkpoint_due(it, k) else []), *evaluations)


def _commit(it: RunContext, k: int, nodes: dict[Stage, str]) -> Commit:
    run = it.config.run
    rollout = it.nodes.get(Stage.ROLLOUT, nodes[Stage.ROLLOUT]).outputs
    batch = it.nodes.get(Stage.ADVANTAGE, nodes[Stage.ADVANTAGE]).outputs
    return Commit(
        branch=run,
        iteration=k,
        parent=it.branches.parent_name(run, k),
        plans=tuple(rollout["plans"]),
        nodes=nodes,
        trained=tuple(batch["groups"]),
        dropped={**rollout["dropped"], **batch["dropped"]},
        data=DataState.model_validate(rollout["after"]),
        config_digest=config_digest(it.config),
        awaited=_awaited(it, k, nodes[Stage.TRAIN]),
        packages=packages(),
        epoch=it.epoch.number,
    )
