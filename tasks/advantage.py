"""Stage 3: choose the batch, score it with the trainer, estimate advantages."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.lineage.stage_inputs import advantage_inputs
from rlpipe.types import NodeRef
from tasks.context import context
from tasks.record import reuse_or_run, stage_task
from tasks.train import hold


@stage_task("advantage", "advantage-{k}")
async def advantage(run: str, k: int, rollout: NodeRef, reward: NodeRef) -> State:
    """Compute the batch of iteration k with its token-level columns; return the node's handle."""
    ctx = await context(run)
    before = await asyncio.to_thread(ctx.weights_before, k)
    inputs = advantage_inputs(ctx.config, rollout.digest, reward.digest, before, ctx.contracts)
    stored = await asyncio.to_thread(ctx.nodes.find, inputs.stage, inputs.digest)
    # A rebuild with other bits gives other weights: the batch is scored with those.
    if stored is None and (held := await hold(ctx, before, k)) != before:
        before = held
        inputs = advantage_inputs(ctx.config, rollout.digest, reward.digest, held, ctx.contracts)

    async def estimate() -> dict[str, Any]:
        answers = await ctx.cluster.trainer.call(
            "advantage",
            key=inputs.digest,
            before=before,
            version=k,
            rollout=rollout.digest,
            reward=reward.digest,
            max_staleness=ctx.config.async_buffer_size,
            mask_stale=ctx.config.rollout.mask_offpolicy_in_partial_rollout,
            deadline_s=ctx.config.train.timeout_s,
        )
        return answers[0]

    return await reuse_or_run(ctx, inputs, estimate)
