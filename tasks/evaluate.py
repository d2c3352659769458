"""Evaluate one weight version on a held-out set.

An evaluation needs engines with these weights, but no trainer: the next iteration may train
meanwhile, up to its push (`tasks.ordering.wait_to_push`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.config.data import EvalDataset
from rlpipe.errors import Superseded
from rlpipe.lineage.stage_inputs import eval_inputs
from tasks.context import RunContext, context
from tasks.record import reuse_or_run, stage_task
from tasks.sync import are_served, publish
from tasks.train import hold

POLL_INTERVAL_S = 5.0


@stage_task("evaluate", "evaluate-{dataset}-{version}")
async def evaluate(run: str, version: int, dataset: str) -> State:
    """Evaluate a weight version on a held-out set; return the eval node's handle."""
    ctx = await context(run)
    # The flow names data sets of the configuration only.
    chosen = next(item for item in ctx.config.evaluation.datasets if item.name == dataset)
    while True:
        try:
            return await _evaluate_version(ctx, chosen, version)
        except Superseded as error:
            ctx.progress.say(f"{run}: evaluating {dataset} again: {error}")


async def _evaluate_version(ctx: RunContext, dataset: EvalDataset, version: int) -> State:
    """Evaluate the current state of a version. Raises: Superseded if a segment replaced it."""
    weights = await asyncio.to_thread(ctx.weights_before, version)
    inputs = eval_inputs(ctx.config, dataset, weights, ctx.contracts)

    async def measure() -> dict[str, Any]:
        if not await are_served(ctx, weights, version):
            await _push_weights(ctx, weights, version)
        await ctx.cluster.sample()
        ctx.progress.stage(
            "eval",
            waits_for=f"samples and rewards of {dataset.name} "
            f"(rollout.timeout_s={ctx.config.rollout.timeout_s:g})",
        )
        # Longer than the generator's own deadline, so that its error is the reported one.
        deadline_s = ctx.config.rollout.timeout_s + 60
        async with _weights_served(ctx, weights, version):
            result = await ctx.cluster.generator.evaluate(
                dataset.name, inputs.digest, version, deadline_s=deadline_s
            )
        _require_same(ctx, weights, await asyncio.to_thread(ctx.weights_before, version))
        return {"files": result["files"], "outputs": {**result["outputs"], "version": version}}

    return await reuse_or_run(ctx, inputs, measure)


@asynccontextmanager
async def _weights_served(ctx: RunContext, weights: str, version: int) -> AsyncIterator[None]:
    """Keep at least one engine supplied with these weights during the block.

    If no engine holds them any more, push them again. The trainer may hold a later state: it
    restores this state from the store first. Raises: errors of that push; Superseded.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(_keep_weights_served(ctx, weights, version))
            yield
            # The samples are done: engines may get other weights now.
            serving.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several


async def _keep_weights_served(ctx: RunContext, weights: str, version: int) -> None:
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        if not await are_served(ctx, weights, version):
            await _push_weights(ctx, weights, version)
            await ctx.cluster.sample()
            ctx.progress.stage("eval")


async def _push_weights(ctx: RunContext, weights: str, version: int) -> None:
    """Restore these weights in the trainer and push them to every engine. Raises: Superseded."""
    _require_same(ctx, weights, await hold(ctx, weights, version))
    await publish(ctx, weights, version=version, everyone=True)
    _require_same(ctx, weights, await asyncio.to_thread(ctx.weights_before, version))


def _require_same(ctx: RunContext, expected: str, found: str) -> None:
    """Compare states. Raises: Superseded if a rebuild of the weights gave other bits."""
    if found != expected:
        raise Superseded(
            "a rebuild of the weights gave other bits",
            where=f"{expected[:12]} of {ctx.config.run}",
            found=found,
            expected=expected,
        )
