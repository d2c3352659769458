"""Stage 5: weights to engines. What an engine holds is what its server says, so this is repeated whenever one is behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.calls import call, gather
from rlpipe.actors.generator import GeneratorSpec
from rlpipe.errors import Mismatch, RlpipeError
from rlpipe.inputs import sync_inputs
from rlpipe.types import NodeRef, Stage, WeightVersion
from tasks.context import RunContext, context
from tasks.record import once, stage_task
from tasks.train import hold

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.3}
CALL_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 2.0


@stage_task("sync", "sync-{k}")
async def sync(run: str, k: int, train: NodeRef, advantage: NodeRef) -> State:
    """Weight version k + 1 in every engine: the sync node's handle. The record is reused; an engine that is behind is not."""
    it = await context(run)

    async def push() -> dict[str, Any]:
        sent = await publish(it, train.digest, version=k + 1)
        apart = await probe(it, train.digest, advantage.digest)
        metrics = {"sync/seconds": sent["seconds"], "sync/bytes": float(sent["bytes"])}
        if apart is not None:
            metrics["sync/logprob_difference"] = apart
        return {"outputs": {**sent, "version": k + 1, "metrics": metrics}}

    return await once(it, sync_inputs(train.digest), push)


async def publish(it: RunContext, weights: str, *, version: int) -> dict[str, Any]:
    """Make every engine hold the weights of a node, starting those again that died. Pushes only to engines that are behind.

    Before its first byte an engine's weights are marked unknown, and so they stay if the push is not seen to end: nobody
    samples from it before another push does. Answers `{"engines", "bytes", "seconds"}`.
    Raises: SyncError, EngineUnavailable, TrainerError, DeadlineExceeded.
    """
    if it.cluster.router is None:
        return {"engines": 0, "bytes": 0, "seconds": 0.0}
    statuses = await it.cluster.engine_status()
    routing = await call(it.cluster.router.workers.remote(), where="router.workers", deadline_s=CALL_TIMEOUT_S)
    if routing is None or not all(status["alive"] for status in statuses):
        it.progress.stage("restart", note="an engine or the router had died")
        await it.cluster.serve(it.config, GeneratorSpec(it.config, it.model_dir, it.files.root))
        statuses = await it.cluster.engine_status()
    stamp = _stamp(it, weights, version)
    behind = {status["number"]: status["url"] for status in statuses if status["stamp"] != stamp}
    sent: dict[str, Any] = {"bytes": 0, "seconds": 0.0}
    if behind:
        await hold(it, weights)
        await _mark(it, list(behind), unknown=True)
        sent = await _push(it, weights, list(behind.values()), stamp)
        await _mark(it, list(behind), unknown=False)
    if admitted := [status["url"] for status in statuses if status["url"] not in (routing or ())]:
        await call(it.cluster.router.admit.remote(admitted), where="router.admit", deadline_s=2 * CALL_TIMEOUT_S)
    return {"engines": len(behind), **sent}


async def keep_engines(it: RunContext, weights: str, *, version: int) -> None:
    """Until cancelled: an engine (or the router) that dies or hangs is replaced and given the weights before it takes requests.

    Raises: what keeps one from coming back.
    """
    config = it.config.engine
    tested_s = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        if time.monotonic() - tested_s > config.rollout_health_check_interval:
            await _end_hung_engines(it, config.rollout_health_check_timeout)
            tested_s = time.monotonic()
        await publish(it, weights, version=version)


async def _end_hung_engines(it: RunContext, timeout_s: float) -> None:
    tests = [engine.generates.remote(timeout_s) for engine in it.cluster.engines]
    answers = await gather(tests, where="engine.generates", deadline_s=timeout_s + CALL_TIMEOUT_S)
    hung = [engine for engine, generates in zip(it.cluster.engines, answers, strict=True) if not generates]
    await gather([engine.stop.remote() for engine in hung], where="engine.stop", deadline_s=CALL_TIMEOUT_S)


async def probe(it: RunContext, weights: str, batch: str) -> float | None:
    """The largest difference between what engines and trainer compute for a few samples of a batch; None without a check.

    Raises: Mismatch if it is more than `sync.max_logprob_difference`; the engines are ended then.
    """
    config = it.config.sync
    if it.cluster.router is None or not config.probe_samples:
        return None
    await hold(it, weights)
    urls = [status["url"] for status in await it.cluster.engine_status()]
    answers = await it.cluster.trainer.call(
        "probe", held=weights, engines=urls, batch=batch, sync=config, deadline_s=config.timeout_s + CALL_TIMEOUT_S
    )
    limit = config.max_logprob_difference or LARGEST_DIFFERENCE[it.config.model.dtype]
    if not answers[0] <= limit:
        stops = [engine.stop.remote() for engine in it.cluster.engines]
        await gather(stops, where="engine.stop", deadline_s=CALL_TIMEOUT_S)
        raise Mismatch(
            "the engines compute other log-probs than the trainer",
            where=f"sync of {it.config.run}",
            found=f"a difference of {answers[0]:.3g}",
            expected=f"at most {limit:g} (sync.max_logprob_difference)",
            do="check that model.source and model.dtype are right for both; the same command starts engines anew",
        )
    return answers[0]


async def _push(it: RunContext, weights: str, urls: list[str], stamp: str) -> dict[str, Any]:
    assert it.cluster.router is not None
    config = it.config.sync
    try:
        answers = await it.cluster.trainer.call(
            "push", held=weights, engines=urls, stamp=stamp, sync=config, deadline_s=config.timeout_s + CALL_TIMEOUT_S
        )
    except RlpipeError:
        await call(it.cluster.router.remove.remote(urls), where="router.remove", deadline_s=CALL_TIMEOUT_S)
        raise
    return answers[0]


async def _mark(it: RunContext, numbers: list[int], *, unknown: bool) -> None:
    marks = [it.cluster.engines[number].mark.remote(unknown=unknown) for number in numbers]
    await gather(marks, where="engine.mark", deadline_s=CALL_TIMEOUT_S)


def _stamp(it: RunContext, weights: str, version: int) -> str:
    stage = Stage.INIT if weights == it.init else Stage.TRAIN
    digest = it.nodes.get(stage, weights).outputs["state_digest"]
    return WeightVersion(branch=it.config.run, version=version, digest=digest).stamp()
