"""Stage 1: write the plan of an iteration, then sample its groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from prefect.client.schemas.objects import State

from rlpipe.config.run import RunConfig
from rlpipe.engines.sglang.admin import EngineLoad
from rlpipe.errors import DeadlineExceeded, ObjectMissing
from rlpipe.lineage.stage_inputs import Inputs, rollout_inputs
from rlpipe.observe.flops import speed_metrics
from rlpipe.rewards.reward_rows import waits_for
from rlpipe.system.gpus import GpuReading, gpu_metrics
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
    readings = EngineReadings()
    sampling = asyncio.ensure_future(
        ctx.cluster.generator.rollout(plan, deadline_s=ctx.config.rollout.timeout_s)
    )
    watching = asyncio.ensure_future(_watch(ctx, k, readings))
    try:
        await asyncio.wait({sampling, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            watching.result()  # raises
        result = await sampling
    finally:
        for task in (sampling, watching):
            task.cancel()
        await asyncio.gather(sampling, watching, return_exceptions=True)
    if ctx.cluster.has_engines and ctx.config.rollout.type == "sample":
        config = ctx.cluster.config
        engines = readings.engines or config.resources.num_engines
        speed = speed_metrics(
            "rollout",
            result["outputs"].get("flops", 0.0),
            result["seconds"],
            devices=engines * config.resources.rollout_num_gpus_per_engine,
            gpu=readings.gpu,
            fp8=config.engine.quantization == "fp8",
        )
        result["outputs"]["metrics"] |= readings.metrics() | speed
    return result


async def _watch(ctx: RunContext, k: int, readings: EngineReadings) -> None:
    """Show progress and dead engines, and read the loads of the engines.

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
            "rollout",
            k,
            done=state["done"],
            total=state["total"],
            tokens=state["tokens"],
            waits_for=_waits_for(ctx.config),
            unit="groups",
        )
        if ctx.cluster.has_engines and reports.is_due():
            engines = await ctx.cluster.engines()
            readings.add(engines)
            reports.show(engines)
            # Otherwise the rollout would wait for engines until its deadline.
            if error := await ctx.cluster.trouble() or reports.trouble():
                await ctx.cluster.generator.abandon(k)
                raise error
        await asyncio.sleep(PROGRESS_INTERVAL_S)


def _waits_for(config: RunConfig) -> str:
    """Return what a rollout waits for, with the deadlines, for the terminal."""
    text = f"responses (rollout.timeout_s={config.rollout.timeout_s:g})"
    scores = config.rollout.scores_while_sampling
    return f"{text} or {waits_for(config.reward)}" if scores else text


class EngineReadings:
    """Loads of all engines and their GPUs, as their supervisors saw them during a rollout."""

    def __init__(self) -> None:
        self.gpu: str | None = None
        """Name of the engines' GPUs; None: unknown, or CPUs."""
        self.engines = 0
        """Most engines that were up at once; engines may join and leave. 0: no reading."""
        self._loads: list[np.ndarray] = []
        """Means of the numbers in `EngineLoad` over all engines, at each time."""
        self._gpus: list[GpuReading] = []
        """Mean utilization and largest memory of all GPUs, at each time."""

    def add(self, engines: Sequence[Mapping[str, Any]]) -> None:
        """Add a reading of each engine. `engines`: as `Fleet.status`."""
        self.engines = max(self.engines, sum(bool(engine["alive"]) for engine in engines))
        loads: list[EngineLoad] = [engine["load"] for engine in engines if engine["load"]]
        if loads:
            self._loads.append(np.mean(loads, axis=0))
        gpus: list[GpuReading] = [gpu for engine in engines for gpu in engine["gpus"]]
        if gpus:
            self.gpu = gpus[0].name
            utilization = sum(gpu.utilization for gpu in gpus) / len(gpus)
            used_bytes = max(gpu.used_bytes for gpu in gpus)
            self._gpus.append(GpuReading(self.gpu, utilization, used_bytes))

    def metrics(self) -> dict[str, float]:
        """Return means over engines and times; {} for a rollout without a reading."""
        gpus = gpu_metrics("rollout", self._gpus)
        if not self._loads:
            return gpus
        running, queued, cache_used = np.mean(self._loads, axis=0).tolist()
        return {
            "engine/running_requests": running,
            "engine/queued_requests": queued,
            "engine/kv_cache_usage": cache_used,
            **gpus,
        }
