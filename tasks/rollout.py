"""Stage 1: write the plan of an iteration, then sample its groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.errors import DeadlineExceeded, EngineUnavailable, ObjectMissing, RlpipeError
from rlpipe.lineage.stage_inputs import Inputs, rollout_inputs
from rlpipe.observe.terminal import duration
from rlpipe.types import DataState, Node
from tasks.context import RunContext, context
from tasks.record import reuse_or_run, stage_task
from tasks.sync import ensure_weights

PROGRESS_INTERVAL_S = 0.25
ENGINE_CHECK_INTERVAL_S = 2.0
LONGEST_PAUSE_S = 0.5
SOON_S = 60.0
"""An engine that ends within this time of its start ends soon."""
MOST_SOON_ENDS = 3
"""Times in a row that all engines may end soon without a finished group of samples."""


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
    checked_s = time.monotonic()
    reports = EngineReports(ctx)
    tokens = 0
    while True:
        state = await ctx.cluster.generator.progress(k)
        if state["tokens"] > tokens:
            tokens = state["tokens"]
            reports.forget_ends()
        ctx.progress.stage(
            "rollout", k, done=state["done"], total=state["total"], tokens=state["tokens"]
        )
        if ctx.cluster.has_engines and time.monotonic() - checked_s > ENGINE_CHECK_INTERVAL_S:
            checked_s = time.monotonic()
            reports.show(await ctx.cluster.engines())
            # Otherwise the rollout would wait for engines until its deadline.
            if error := await ctx.cluster.trouble() or reports.trouble():
                await ctx.cluster.generator.abandon(k)
                raise error
        await asyncio.sleep(PROGRESS_INTERVAL_S)


class EngineReports:
    """Lines in the terminal about engines that end and come back during a rollout."""

    def __init__(self, ctx: RunContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._ctx = ctx
        self._clock = clock
        self._down_since: dict[int, float] = {}
        self._up_since: dict[int, float] = {}
        self._soon_ends: dict[int, int] = {}

    def show(self, engines: Sequence[Mapping[str, Any]]) -> None:
        """Print the changes since the last call. `engines`: status of each, as `Fleet.status`."""
        now = self._clock()
        for engine in engines:
            number = engine["number"]
            ends = self._soon_ends.setdefault(number, 0)
            where = f"{self._ctx.config.run}: engine {number}"
            if engine["alive"]:
                if (since := self._down_since.pop(number, None)) is not None:
                    self._up_since[number] = now
                    self._ctx.progress.say(f"{where} is back ({duration(now - since)})")
            elif number not in self._down_since:
                self._down_since[number] = now
                soon = now - self._up_since.get(number, now) <= SOON_S
                self._soon_ends[number] = ends + 1 if soon else 1
                self._ctx.progress.say(f"{where} {self._action(number)}")

    def forget_ends(self) -> None:
        """Count the ends of engines from 0, because a group of samples is finished."""
        self._soon_ends = dict.fromkeys(self._soon_ends, 0)

    def trouble(self) -> RlpipeError | None:
        """Return an error if all engines end soon after each start, else None.

        Such engines can be started, so that their supervisor finds no fault. An example is a kernel
        that fails in the first request.
        """
        is_external = bool(self._ctx.config.resources.external_engines)
        if is_external or min(self._soon_ends.values(), default=0) < MOST_SOON_ENDS:
            return None
        return EngineUnavailable(
            "the engines end before a group of samples is finished",
            where=f"{self._ctx.config.run}: engines",
            found=f"each ended {MOST_SOON_ENDS} times, at most {SOON_S:g} s after its start",
            expected="a finished group of samples",
            do=f"see the end of {self._log(min(self._soon_ends))}, remove the cause, and start the "
            "same command again",
        )

    def _action(self, number: int) -> str:
        if self._ctx.config.resources.external_engines:
            return "does not answer; the run waits for it"
        return f"has ended and is started again; its log is {self._log(number)}"

    def _log(self, number: int) -> Path:
        return self._ctx.directory / "logs" / f"engine-{number}.log"
