"""Stage 1: write the plan, sample it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.errors import DeadlineExceeded, ObjectMissing
from rlpipe.lineage.stage_inputs import Inputs, rollout_inputs
from rlpipe.types import DataState, Node
from tasks.context import RunContext, context
from tasks.record import once, stage_task
from tasks.sync import serve

PROGRESS_INTERVAL_S = 0.25
TROUBLE_INTERVAL_S = 2.0
LONGEST_PAUSE_S = 0.5
CALL_TIMEOUT_S = 60.0


@stage_task("rollout", "rollout-{k}")
async def rollout(run: str, k: int) -> State:
    """Samples of iteration k: the rollout node's handle."""
    it = await context(run)
    plan, _ = await planned(it, k, await data_before(it, k))

    async def sample() -> dict[str, Any]:
        if it.cluster.has_engines and it.config.rollout.type == "sample":
            await serve(it, k)
        return await _sampled(it, k, plan)

    return await once(it, rollout_inputs(it.config, it.fingerprint, plan, it.contracts), sample)


async def planned(it: RunContext, k: int, before: DataState) -> tuple[str, DataState]:
    """Digest of the plan of iteration k, and where the data source stands after it. Equal every
    time, so a retry finds it."""
    plan = await it.cluster.generator.plan(k, before, deadline_s=it.config.rollout.timeout_s)
    return plan["plan"], plan["after"]


async def data_before(it: RunContext, k: int) -> DataState:
    """Where the data source stands before iteration k: what its predecessor left, committed yet or
    not.

    Waits for the predecessor's rollout where only that decides it. Raises: DeadlineExceeded.
    """
    if k == 0:
        return DataState()
    try:
        before = it.before(k)
        assert before is not None
        return before.data
    except ObjectMissing:
        plan, after = await planned(it, k - 1, await data_before(it, k - 1))
    if it.config.rollout.static:
        return after
    node = await _recorded(it, rollout_inputs(it.config, it.fingerprint, plan, it.contracts), k - 1)
    return DataState.model_validate(node.outputs["after"])


async def _recorded(it: RunContext, inputs: Inputs, k: int) -> Node:
    end_s = time.monotonic() + it.config.rollout.timeout_s
    pause_s = 0.02
    while (node := it.nodes.find(inputs.stage, inputs.digest)) is None:
        if time.monotonic() > end_s:
            raise DeadlineExceeded(
                "the rollout before is not recorded",
                where=f"rollout {k + 1}",
                found=f"none of iteration {k}",
            )
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return node


async def _sampled(it: RunContext, k: int, plan: str) -> dict[str, Any]:
    """The generator's answer, while the terminal shows how far it is. If no engine can be brought
    back, that is the error."""
    working = asyncio.ensure_future(
        it.cluster.generator.rollout(plan, deadline_s=it.config.rollout.timeout_s)
    )
    watching = asyncio.ensure_future(_watch(it, k))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _watch(it: RunContext, k: int) -> None:
    """Show the rollout's progress. Raises: what keeps every engine from coming back, once the
    rollout is abandoned."""
    looked_s = time.monotonic()
    while True:
        now = await it.cluster.generator.progress(k)
        it.progress.stage("rollout", done=now["done"], total=now["total"], tokens=now["tokens"])
        if it.cluster.has_engines and time.monotonic() - looked_s > TROUBLE_INTERVAL_S:
            looked_s = time.monotonic()
            if error := await it.cluster.trouble():
                await it.cluster.generator.abandon(k)
                raise error
        await asyncio.sleep(PROGRESS_INTERVAL_S)
