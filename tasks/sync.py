"""Stage 5: push weights to the engines.

An engine's server reports which weights it holds. The conductor actor orders the pushes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.engines.fleet import Weights
from rlpipe.config.run import RunConfig
from rlpipe.errors import Mismatch
from rlpipe.lineage.stage_inputs import sync_inputs
from rlpipe.lineage.states import state_node
from rlpipe.store.segments import Segments, current_state
from rlpipe.sync.probe import BOUNDS, Agreement, probe_metrics
from rlpipe.system.parts import Parts
from rlpipe.types import NodeRef, WeightVersion
from tasks.context import RunContext, context
from tasks.ordering import commit_before_sampling, is_committed, pushed_at_interval
from tasks.record import reuse_or_run, stage_task
from tasks.train import hold

CALL_TIMEOUT_S = 60.0


@stage_task("sync", "sync-{k}")
async def sync(run: str, k: int, train: NodeRef, advantage: NodeRef) -> State:
    """Push weight version k + 1 to every engine if a push is due; return the sync node's handle."""
    ctx = await context(run)
    due = push_due(ctx, k + 1)

    async def push() -> dict[str, Any]:
        parts = Parts()
        with parts.part("publish"):
            result = await publish(ctx, train.digest, version=k + 1, everyone=due)
        parts.inside("publish", result.pop("parts", {}))
        metrics = {"sync/seconds": result["seconds"], "sync/bytes": float(result["bytes"])}
        if due:
            metrics |= await probe(ctx, train.digest, advantage.digest, k + 1, parts)
        if "share" in result:
            metrics["sync/share_of_weights"] = result["share"]
        machines = distinct_machines([engine["facts"] for engine in await ctx.cluster.engines()])
        outputs = {
            **result,
            "version": k + 1,
            "machines": machines,
            "metrics": metrics,
            "parts": parts.seconds,
        }
        if ctx.cluster.memory is not None:
            outputs["gpu_memory"] = ctx.cluster.memory
        return {"outputs": outputs}

    state = await reuse_or_run(ctx, sync_inputs(train.digest), push)
    if due and state.name == "Reused":
        await publish_reused(ctx, k, train.digest)
    return state


async def publish_reused(ctx: RunContext, k: int, weights: str) -> None:
    """Make engines hold the weights of a recorded push before its iteration is committed.

    The engines may have been started after the push. The commit of iteration k tells rollout
    k + 1 + async_buffer_size that they hold version k + 1; a rollout in flight may have given them
    the version before.
    """
    # A retry of an iteration that is committed must not replace newer weights.
    if not await asyncio.to_thread(is_committed, ctx, k):
        await publish(ctx, weights, version=k + 1, everyone=True)


def distinct_machines(machines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each distinct description once, in order. Engines usually have equal ones."""
    distinct: list[dict[str, Any]] = []
    for machine in machines:
        if machine and machine not in distinct:
            distinct.append(machine)
    return distinct


def push_due(ctx: RunContext, version: int) -> bool:
    """True for every `update_weights_interval`-th version, and for the last one."""
    return pushed_at_interval(ctx.config, version) or version == ctx.config.num_rollout


async def publish(ctx: RunContext, weights: str, *, version: int, everyone: bool) -> dict[str, Any]:
    """Publish the weights of a node to every engine (`everyone`), or only to restarted ones.

    Returns `{"engines", "bytes", "seconds"}`.
    Raises: SyncError, EngineUnavailable, TrainerError, Mismatch, DeadlineExceeded.
    """
    if not ctx.cluster.has_engines:
        return {"engines": 0, "bytes": 0, "seconds": 0.0}
    published = await asyncio.to_thread(_published_weights, ctx, weights, version)
    # The trainer may have to load a checkpoint and replay batches before it can push.
    restore_s = (
        ctx.config.checkpoint.timeout_s + len(published.lineage.replay) * ctx.config.train.timeout_s
    )
    deadline_s = ctx.config.resources.start_timeout_s + ctx.config.sync.timeout_s + restore_s
    try:
        return await ctx.cluster.publish(published, everyone=everyone, deadline_s=deadline_s)
    except Mismatch:
        # A rebuild that gave other bits recorded a segment: publish the segment's weights.
        held = await hold(ctx, published.digest, version)
        if held == published.digest:
            raise
    return await publish(ctx, held, version=version, everyone=everyone)


def _published_weights(ctx: RunContext, weights: str, version: int) -> Weights:
    """Return the description of weights for the conductor.

    If a segment replaced the state of the node, the description is the segment's.
    """
    digest = current_state(Segments(ctx.files), ctx.config.run, version, weights)
    return Weights(digest, version, stamp(ctx, digest, version), ctx.lineages.to(digest))


def stamp(ctx: RunContext, weights: str, version: int) -> str:
    """Return the name by which engines report the weights of a node."""
    digest = state_node(ctx.nodes, weights).outputs["state_digest"]
    return WeightVersion(branch=ctx.config.run, version=version, digest=digest).stamp()


async def are_served(ctx: RunContext, weights: str, version: int) -> bool:
    """True if an engine held the weights at its last report, or if there are no engines."""
    expected = await asyncio.to_thread(stamp, ctx, weights, version)
    return not ctx.cluster.has_engines or any(
        engine["stamp"] == expected for engine in await ctx.cluster.engines()
    )


async def ensure_weights(ctx: RunContext, k: int) -> None:
    """Make sure that engines hold weights of this run before rollout k.

    They already do, except after a loss of the conductor or before the first push. A run that
    trains nothing (`debug.debug_rollout_only`) samples every rollout with the first weights.
    """
    trained = 0 if ctx.config.debug.debug_rollout_only else k
    config = ctx.config
    known = commit_before_sampling(
        trained,
        config.async_buffer_size,
        config.sync.update_weights_interval,
        config.start_rollout_id,
    )
    version, weights = await asyncio.to_thread(_newest_weights, ctx, known)
    await publish(ctx, weights, version=version, everyone=False)
    await ctx.cluster.sample()


def _newest_weights(ctx: RunContext, known: int) -> tuple[int, str]:
    """Return the newest weight version and the digest of its node.

    `known`: an iteration that is certainly committed, if it belongs to this branch.
    """
    newest = ctx.branches.newest(
        ctx.config.run, after=known if known >= ctx.first_iteration else None
    )
    version = newest.iteration + 1 if newest else 0
    return version, ctx.weights_before(version)


def logprob_bound(config: RunConfig) -> float:
    """Return the bound of the mean log-prob difference of engines and trainer, in nats."""
    kind = config.engine.quantization or config.model.dtype
    return config.sync.max_logprob_difference or BOUNDS[kind]


async def probe(
    ctx: RunContext, weights: str, batch: str, version: int, parts: Parts
) -> dict[str, float]:
    """Compare log-probs of engines and trainer for a few samples of a batch; return metrics.

    `parts` get the seconds of both sides.
    `rlpipe.sync.probe` defines the statistics and the faults that they detect. The result is empty
    without engines or with `sync.probe_samples: 0`.
    Raises: Mismatch if an engine has wrong weights; all engines are stopped before that.
    """
    config = ctx.config.sync
    urls = [status["url"] for status in await ctx.cluster.engines() if status["stamp"] is not None]
    if not urls or not config.probe_samples:
        return {}
    # The trainer may hold the state of a concurrent evaluation.
    held = await hold(ctx, weights, version)
    trainer = ctx.cluster.trainer
    deadline_s = config.timeout_s + CALL_TIMEOUT_S
    with parts.part("probe of the trainer"):
        scored = await trainer.call(
            "probe", held=held, batch=batch, samples=config.probe_samples, deadline_s=deadline_s
        )
    parts.inside("probe of the trainer", scored[0])
    with parts.part("probe of the engines"):
        answers = await trainer.call(
            "compare", engines=urls, timeout_s=config.timeout_s, deadline_s=deadline_s
        )
    agreements = [Agreement(**answer) for answer in answers[0]]
    bound = logprob_bound(ctx.config)
    faults = [fault for agreement in agreements if (fault := agreement.fault(bound))]
    if faults:
        # Wrong weights must not sample. A restart loads them again.
        await ctx.cluster.stop_engines()
        raise Mismatch(
            "engines and trainer compute different log-probs",
            where=f"sync of {ctx.config.run}",
            found="; ".join(faults),
            expected=f"at most {bound:g} on average (sync.max_logprob_difference)",
            do="check that model.source and model.dtype are right for both, and compare all "
            "weights with sync.check_weight_update_equal=true; the same command starts new engines",
        )
    return probe_metrics(agreements)
