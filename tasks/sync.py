"""Stage 5: weights to engines. What an engine holds is what its server says, so this is repeated whenever one is behind."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.calls import call
from rlpipe.actors.generator import GeneratorSpec
from rlpipe.errors import RlpipeError
from rlpipe.inputs import sync_inputs
from rlpipe.types import NodeRef, Stage, WeightVersion
from tasks.context import RunContext, context
from tasks.record import once, stage_task
from tasks.train import hold


@stage_task("sync", "sync-{k}")
async def sync(run: str, k: int, train: NodeRef, advantage: NodeRef) -> State:
    """Weight version k + 1 in every engine: the sync node's handle. The record is reused; an engine that is behind is not."""
    it = await context(run)

    async def push() -> dict[str, Any]:
        sent = await publish(it, train.digest, version=k + 1, batch=advantage.digest)
        metrics = {"sync/seconds": sent.get("seconds", 0.0), "sync/bytes": float(sent.get("bytes", 0))}
        if sent.get("logprob_difference") is not None:
            metrics["sync/logprob_difference"] = sent["logprob_difference"]
        return {"outputs": {**sent, "version": k + 1, "metrics": metrics}}

    return await once(it, sync_inputs(train.digest), push)


async def publish(it: RunContext, weights: str, *, version: int, batch: str | None = None) -> dict[str, Any]:
    """Make every engine hold the weights of a node, starting those again that died. Pushes only to engines that are behind.

    While an engine takes weights it is paused; if the push fails it gets no more requests, because nobody knows what it holds.

    `batch`: an advantage node whose first samples engine and trainer both score after the push.
    Raises: SyncError, EngineUnavailable, TrainerError, DeadlineExceeded.
    """
    if it.cluster.router is None:
        return {"engines": 0}
    statuses = await it.cluster.engine_status()
    routing = await call(it.cluster.router.workers.remote(), where="router.workers", deadline_s=60.0)
    if not all(status["alive"] and status["url"] in routing for status in statuses):
        it.progress.stage("restart", note="an engine or the router had died")
        await it.cluster.serve(it.config, GeneratorSpec(it.config, it.model_dir, it.files.root))
        statuses = await it.cluster.engine_status()
    stamp = _stamp(it, weights, version)
    behind = [status["url"] for status in statuses if status["stamp"] != stamp]
    if not behind:
        return {"engines": 0}
    await hold(it, weights)
    config = it.config.sync
    try:
        answers = await it.cluster.trainer.call(
            "push", held=weights, engines=behind, stamp=stamp, sync=config, batch=batch, deadline_s=config.timeout_s + 60
        )
    except RlpipeError:
        await call(it.cluster.router.remove.remote(behind), where="router.remove", deadline_s=config.timeout_s)
        raise
    return {"engines": len(behind), **answers[0]}


def _stamp(it: RunContext, weights: str, version: int) -> str:
    stage = Stage.INIT if weights == it.init else Stage.TRAIN
    digest = it.nodes.get(stage, weights).outputs["state_digest"]
    return WeightVersion(branch=it.config.run, version=version, digest=digest).stamp()
