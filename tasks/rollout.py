"""Stage 1: write the plan, sample it."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.calls import call
from rlpipe.inputs import rollout_inputs
from rlpipe.types import DataState
from tasks.context import RunContext, context
from tasks.record import once, stage_task
from tasks.sync import publish

PROGRESS_INTERVAL_S = 0.25


@stage_task("rollout", "rollout-{k}")
async def rollout(run: str, k: int) -> State:
    """Samples of iteration k: the rollout node's handle."""
    it = await context(run)
    plan = await plan_iteration(it, k)

    async def sample() -> dict[str, Any]:
        if it.config.rollout.type == "sample":
            await publish(it, it.weights_before(k), version=k)
        answer = it.cluster.generator.rollout.remote(plan)
        watching = asyncio.create_task(_show(it))
        try:
            return await call(answer, where=f"generator.rollout {k}", deadline_s=it.config.rollout.timeout_s + 60)
        finally:
            watching.cancel()

    return await once(it, rollout_inputs(it.config, it.fingerprint, plan), sample)


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
