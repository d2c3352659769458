"""Beside the stages: how good one weight version is on a held-out set.

It needs engines that hold these weights, not the trainer: the next iteration may train meanwhile,
up to its push (`turn.turn_to_push`).
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
from tasks.record import once, stage_task
from tasks.sync import are_served, publish
from tasks.train import hold

LOOK_INTERVAL_S = 5.0


@stage_task("evaluate", "evaluate-{dataset}-{version}")
async def evaluate(run: str, version: int, dataset: str) -> State:
    """Sample and score a held-out set with the weights after `version` iterations: the eval node's
    handle."""
    it = await context(run)
    chosen = next(item for item in it.config.evaluation.datasets if item.name == dataset)
    while True:
        try:
            return await _measured(it, chosen, version)
        except Superseded as error:
            it.progress.say(f"{run}: evaluating {dataset} anew: {error}")


async def _measured(it: RunContext, dataset: EvalDataset, version: int) -> State:
    """Raises: Superseded if the weights had to be rebuilt, and came out different."""
    weights = await asyncio.to_thread(it.weights_before, version)
    inputs = eval_inputs(it.config, dataset, weights, it.contracts)

    async def measure() -> dict[str, Any]:
        if not await are_served(it, weights, version):
            await _give(it, weights, version)
        await it.cluster.sample()
        it.progress.stage("eval")
        deadline_s = it.config.rollout.timeout_s + 60
        async with _served(it, weights, version):
            result = await it.cluster.generator.evaluate(
                dataset.name, inputs.digest, version, deadline_s=deadline_s
            )
        _require(it, weights, await asyncio.to_thread(it.weights_before, version))
        return {"files": result["files"], "outputs": {**result["outputs"], "version": version}}

    return await once(it, inputs, measure)


@asynccontextmanager
async def _served(it: RunContext, weights: str, version: int) -> AsyncIterator[None]:
    """Meanwhile, when no engine holds the weights any more they are given them again, whatever the
    trainer has moved on to: it comes back to that from the store. Raises: what keeps them from
    being given; Superseded."""
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(_serve(it, weights, version))
            yield
            serving.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several


async def _serve(it: RunContext, weights: str, version: int) -> None:
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        if not await are_served(it, weights, version):
            await _give(it, weights, version)
            await it.cluster.sample()
            it.progress.stage("eval")


async def _give(it: RunContext, weights: str, version: int) -> None:
    """All engines are given these weights, of which the trainer takes hold first."""
    _require(it, weights, await hold(it, weights, version))
    await publish(it, weights, version=version, everyone=True)
    _require(it, weights, await asyncio.to_thread(it.weights_before, version))


def _require(it: RunContext, weights: str, found: str) -> None:
    """Raises: Superseded if what was found are other weights: they had to be rebuilt, and came out
    different."""
    if found != weights:
        raise Superseded(
            "these weights came out different",
            where=f"{weights[:12]} of {it.config.run}",
            found=found,
        )
