"""Stage 1: write the plan of an iteration, then sample its groups."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.errors import DeadlineExceeded, ObjectMissing
from rlpipe.lineage.stage_inputs import Inputs, rollout_inputs
from rlpipe.types import DataState, Node
from tasks.context import RunContext, context
from tasks.record import reuse_or_run, stage_task
from tasks.sync import ensure_weights

PROGRESS_INTERVAL_S = 0.25
LONGEST_PAUSE_S = 0.5


@stage_task("rollout", "rollout-{k}")
async def rollout(run: str, k: int) -> State:
    """Sample iteration k; return the rollout node's handle."""
    ctx = await context(run)
    # Before `reuse_or_run`: the plan's digest is an input of the node.
    plan, _ = await plan_iteration(ctx, k, await data_before(ctx, k))

    async def sample() -> dict[str, Any]:
        if ctx.cluster.has_engines and ctx.config.rollout.type == "sample":
            await ensure_weights(ctx, k)
        return await _sample(ctx, k, plan)

    state = await reuse_or_run(
        ctx, rollout_inputs(ctx.config, ctx.fingerprint, plan, ctx.contracts), sample
    )
    # The next rollout may wait for the groups that this one leaves.
    ctx.notify()
    return state


async def plan_iteration(ctx: RunContext, k: int, before: DataState) -> tuple[str, DataState]:
    """Write the plan of iteration k; return its digest and the data state after it.

    Equal inputs give the same plan, so a retry finds it.
    """
    plan = await ctx.cluster.generator.plan(k, before, deadline_s=ctx.config.rollout.timeout_s)
    return plan["plan"], plan["after"]


async def data_before(ctx: RunContext, k: int) -> DataState:
    """Return the data state before iteration k, from the commit before or from the rollout before.

    If only the rollout before decides the state, wait for that rollout. Raises: DeadlineExceeded.
    """
    if k == 0:
        return DataState()
    try:
        before = ctx.commit_before(k)
        assert before is not None
        return before.data
    except ObjectMissing:
        # The commit before does not exist yet: iterations are in flight.
        plan, after = await plan_iteration(ctx, k - 1, await data_before(ctx, k - 1))
    # A static rollout draws exactly its plan, so the plan gives the state after it.
    if ctx.config.rollout.static:
        return after
    node = await _wait_for_node(
        ctx, rollout_inputs(ctx.config, ctx.fingerprint, plan, ctx.contracts), k - 1
    )
    return DataState.model_validate(node.outputs["after"])


async def _wait_for_node(ctx: RunContext, inputs: Inputs, k: int) -> Node:
    """Poll the store until the rollout of iteration k is recorded. Raises: DeadlineExceeded."""
    deadline_s = time.monotonic() + ctx.config.rollout.timeout_s
    pause_s = 0.02
    # Taken before each look: a rollout that is recorded during the look is not missed.
    changed = ctx.store_changed
    while (node := ctx.nodes.find(inputs.stage, inputs.digest)) is None:
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                "the rollout before was not recorded in time",
                where=f"rollout {k + 1}",
                found=f"no rollout node of iteration {k}",
                expected=f"within {ctx.config.rollout.timeout_s:g} s (rollout.timeout_s)",
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), pause_s)
        changed = ctx.store_changed
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return node


async def _sample(ctx: RunContext, k: int, plan: str) -> dict[str, Any]:
    """Run the generator and show its progress. Raises: the error that keeps all engines down."""
    sampling = asyncio.ensure_future(
        ctx.cluster.generator.rollout(plan, deadline_s=ctx.config.rollout.timeout_s)
    )
    watching = asyncio.ensure_future(_watch(ctx, k))
    try:
        await asyncio.wait({sampling, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            watching.result()  # raises
        return await sampling
    finally:
        for task in (sampling, watching):
            task.cancel()
        await asyncio.gather(sampling, watching, return_exceptions=True)


async def _watch(ctx: RunContext, k: int) -> None:
    """Show progress and dead engines.

    If no engine can come back, abandon the rollout and raise the cause.
    """
    reports = ctx.engine_reports
    reports.forget_ends()  # of an earlier attempt
    tokens = 0
    while True:
        state = await ctx.cluster.generator.progress(k)
        if state["tokens"] > tokens:
            tokens = state["tokens"]
            reports.forget_ends()
        ctx.progress.stage(
            "rollout", k, done=state["done"], total=state["total"], tokens=state["tokens"]
        )
        if ctx.cluster.has_engines and reports.is_due():
            reports.show(await ctx.cluster.engines())
            # Otherwise the rollout would wait for engines until its deadline.
            if error := await ctx.cluster.trouble() or reports.trouble():
                await ctx.cluster.generator.abandon(k)
                raise error
        await asyncio.sleep(PROGRESS_INTERVAL_S)
