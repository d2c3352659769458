"""Stage 5: weights to engines. What an engine holds is what its server says; keeping it so is the
conductor's."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.engines.fleet import Weights
from rlpipe.errors import Mismatch
from rlpipe.lineage.stage_inputs import sync_inputs
from rlpipe.lineage.states import state_node
from rlpipe.store.segments import Segments, current_state
from rlpipe.sync.probe import BOUNDS, Agreement, probe_metrics
from rlpipe.types import NodeRef, WeightVersion
from tasks.context import RunContext, context
from tasks.machine import distinct
from tasks.record import once, stage_task
from tasks.train import hold
from tasks.turn import sampled_after

CALL_TIMEOUT_S = 60.0


@stage_task("sync", "sync-{k}")
async def sync(run: str, k: int, train: NodeRef, advantage: NodeRef) -> State:
    """Weight version k + 1 in every engine, if it is due: the sync node's handle."""
    it = await context(run)
    due = push_due(it, k + 1)

    async def push() -> dict[str, Any]:
        sent = await publish(it, train.digest, version=k + 1, everyone=due)
        metrics = {"sync/seconds": sent["seconds"], "sync/bytes": float(sent["bytes"])}
        if due:
            metrics |= await probe(it, train.digest, advantage.digest, k + 1)
        if "share" in sent:
            metrics["sync/share_of_weights"] = sent["share"]
        machines = distinct([engine["facts"] for engine in await it.cluster.engines()])
        return {"outputs": {**sent, "version": k + 1, "machines": machines, "metrics": metrics}}

    return await once(it, sync_inputs(train.digest), push)


def push_due(it: RunContext, version: int) -> bool:
    """Every `update_weights_interval` iterations, and after the last."""
    return version % it.config.sync.update_weights_interval == 0 or version == it.config.num_rollout


async def publish(it: RunContext, weights: str, *, version: int, everyone: bool) -> dict[str, Any]:
    """Let engines have the weights of a node: all of them now if `everyone`, else those that come
    back from a restart.

    Answers `{"engines", "bytes", "seconds"}`. Raises: SyncError, EngineUnavailable, TrainerError,
    Mismatch, DeadlineExceeded.
    """
    if not it.cluster.has_engines:
        return {"engines": 0, "bytes": 0, "seconds": 0.0}
    wanted = await asyncio.to_thread(_weights, it, weights, version)
    restore_s = (
        it.config.checkpoint.timeout_s + len(wanted.lineage.replay) * it.config.train.timeout_s
    )
    deadline_s = it.config.resources.start_timeout_s + it.config.sync.timeout_s + restore_s
    try:
        return await it.cluster.publish(wanted, everyone=everyone, deadline_s=deadline_s)
    except Mismatch:
        held = await hold(it, wanted.digest, version)
        if held == wanted.digest:
            raise
    return await publish(it, held, version=version, everyone=everyone)


def _weights(it: RunContext, weights: str, version: int) -> Weights:
    """What is said of the weights of a node to who publishes them; of the segment that took their
    place, if one did."""
    digest = current_state(Segments(it.files), it.config.run, version, weights)
    return Weights(digest, version, stamp(it, digest, version), it.lineages.to(digest))


def stamp(it: RunContext, weights: str, version: int) -> str:
    """How engines name the weights of a node."""
    digest = state_node(it.nodes, weights).outputs["state_digest"]
    return WeightVersion(branch=it.config.run, version=version, digest=digest).stamp()


async def are_served(it: RunContext, weights: str, version: int) -> bool:
    """Does an engine hold the weights of a node, as far as was last seen? Without engines nobody
    asks for them."""
    sought = await asyncio.to_thread(stamp, it, weights, version)
    return not it.cluster.has_engines or any(
        engine["stamp"] == sought for engine in await it.cluster.engines()
    )


async def serve(it: RunContext, k: int) -> None:
    """Before rollout k: engines have weights of this run. They do, but after the conductor was
    lost, or before the first push.

    A run that trains nothing (`debug.debug_rollout_only`) samples all its rollouts with the first
    ones.
    """
    trained = 0 if it.config.debug.debug_rollout_only else k
    known = sampled_after(
        trained, it.config.async_buffer_size, it.config.sync.update_weights_interval
    )
    version, weights = await asyncio.to_thread(_newest, it, known)
    await publish(it, weights, version=version, everyone=False)
    await it.cluster.sample()


def _newest(it: RunContext, known: int) -> tuple[int, str]:
    """The newest weight version, and the digest of the node that made it. `known`: an iteration
    that is committed if it is one of the branch's own."""
    newest = it.branches.newest(it.config.run, after=known if known >= it.first else None)
    version = newest.iteration + 1 if newest else 0
    return version, it.weights_before(version)


async def probe(it: RunContext, weights: str, batch: str, version: int) -> dict[str, float]:
    """Compare what engines and trainer compute for a few samples of a batch; return metrics.

    `rlpipe.sync.probe` defines the statistics and says which faults they find. Without engines or
    with `sync.probe_samples: 0` nothing is compared and the result is empty.
    Raises: Mismatch if the weights of an engine are wrong; all engines are stopped then.
    """
    config = it.config.sync
    urls = [status["url"] for status in await it.cluster.engines() if status["stamp"] is not None]
    if not urls or not config.probe_samples:
        return {}
    held = await hold(it, weights, version)
    trainer = it.cluster.trainer
    deadline_s = config.timeout_s + CALL_TIMEOUT_S
    await trainer.call(
        "probe", held=held, batch=batch, samples=config.probe_samples, deadline_s=deadline_s
    )
    answers = await trainer.call(
        "compare", engines=urls, timeout_s=config.timeout_s, deadline_s=deadline_s
    )
    agreements = [Agreement(**answer) for answer in answers[0]]
    kind = it.config.engine.quantization or it.config.model.dtype
    bound = config.max_logprob_difference or BOUNDS[kind]
    faults = [fault for agreement in agreements if (fault := agreement.fault(bound))]
    if faults:
        await it.cluster.stop_engines()
        raise Mismatch(
            "the engines compute other log-probs than the trainer",
            where=f"sync of {it.config.run}",
            found="; ".join(faults),
            expected=f"at most {bound:g} on average (sync.max_logprob_difference)",
            do="check that model.source and model.dtype are right for both, and compare all weights "
            "with sync.check_weight_update_equal=true; the same command starts new engines",
        )
    return probe_metrics(agreements)
