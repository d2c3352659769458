"""Stage 1: write the plan, sample it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.calls import call
from rlpipe.inputs import rollout_inputs
from rlpipe.types import DataState
from tasks.context import RunContext, context
from tasks.record import once, stage_task
from tasks.sync import keep_engines, publish

PROGRESS_INTERVAL_S = 0.25


@stage_task("rollout", "rollout-{k}")
async def rollout(run: str, k: int) -> State:
    """Samples of iteration k: the rollout node's handle."""
    it = await context(run)
    plan = await plan_iteration(it, k)

    async def sample() -> dict[str, Any]:
        if it.config.rollout.type == "dataset":
            return await _sampled(it, k, plan)
        weights = it.weights_before(k)
        await publish(it, weights, version=k)
        return await _guarded(it, k, _sampled(it, k, plan), weights)

    return await once(it, rollout_inputs(it.config, it.fingerprint, plan), sample)


async def _sampled(it: RunContext, k: int, plan: str) -> dict[str, Any]:
    """The generator's answer, while the terminal shows how far it is."""
    answer = it.cluster.generator.rollout.remote(plan)
    watching = asyncio.create_task(_show(it))
    try:
        return await call(answer, where=f"generator.rollout {k}", deadline_s=it.config.rollout.timeout_s + 60)
    finally:
        watching.cancel()


async def _guarded(it: RunContext, k: int, work: Coroutine[Any, Any, dict[str, Any]], weights: str) -> dict[str, Any]:
    """The result of `work`, with engines kept alive meanwhile. If one cannot be brought back, that is the error."""
    working = asyncio.ensure_future(work)
    keeping = asyncio.ensure_future(keep_engines(it, weights, version=k))
    try:
        await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await call(it.cluster.generator.abandon.remote(), where="generator.abandon", deadline_s=60.0)
            keeping.result()
        return await working
    finally:
        for task in (working, keeping):
            task.cancel()
        await asyncio.gather(working, keeping, return_exceptions=True)


async def plan_iteration(it: RunContext, k: int) -> str:
    """Digest of the plan of iteration k. The same commit before gives the same plan, so a retry finds it."""
    before = it.before(k)
    answer = it.cluster.generator.plan.remote(k, before.data if before else DataState())
    planned = await call(answer, where=f"generator.plan {k}", deadline_s=it.config.rollout.timeout_s)
    return planned["plan"]


async def _show(it: RunContext) -> None:
    while True:
        now = await call(it.cluster.generator.progress.remote(), where="generator.progress", deadline_s=60.0)
        it.progress.stage("rollout", done=now["done"], total=now["total"], tokens=now["tokens"])
        await asyncio.sleep(PROGRESS_INTERVAL_S)
