"""Beside the stages: how good one weight version is on a held-out set."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.inputs import eval_inputs
from tasks.context import context
from tasks.record import once, stage_task
from tasks.sync import publish
from tasks.train import hold


@stage_task("evaluate", "evaluate-{dataset}-{version}")
async def evaluate(run: str, version: int, dataset: str) -> State:
    """Sample and score a held-out set with the weights after `version` iterations: the eval node's handle."""
    it = await context(run)
    weights = it.weights_before(version)
    chosen = next(item for item in it.config.evaluation.datasets if item.name == dataset)
    inputs = eval_inputs(it.config, chosen, weights)
    if it.nodes.find(inputs.stage, inputs.digest) is None and it.cluster.has_engines:
        weights = await hold(it, weights, version)
        inputs = eval_inputs(it.config, chosen, weights)

    async def measure() -> dict[str, Any]:
        await publish(it, weights, version=version, everyone=True)
        await it.cluster.sample()
        deadline_s = it.config.rollout.timeout_s + 60
        result = await it.cluster.generator.evaluate(dataset, inputs.digest, version, deadline_s=deadline_s)
        return {"files": result["files"], "outputs": {**result["outputs"], "version": version}}

    return await once(it, inputs, measure)
