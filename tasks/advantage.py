"""Stage 3: fix the batch, score it with the trainer, estimate advantages."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.lineage.stage_inputs import advantage_inputs
from rlpipe.types import NodeRef
from tasks.context import context
from tasks.record import once, stage_task
from tasks.train import hold


@stage_task("advantage", "advantage-{k}")
async def advantage(run: str, k: int, rollout: NodeRef, reward: NodeRef) -> State:
    """The batch of iteration k, with its token-level columns: the advantage node's handle."""
    it = await context(run)
    before = await asyncio.to_thread(it.weights_before, k)
    inputs = advantage_inputs(it.config, rollout.digest, reward.digest, before, it.contracts)
    known = await asyncio.to_thread(it.nodes.find, inputs.stage, inputs.digest)
    if known is None and (held := await hold(it, before, k)) != before:
        before = held
        inputs = advantage_inputs(it.config, rollout.digest, reward.digest, held, it.contracts)

    async def estimate() -> dict[str, Any]:
        answers = await it.cluster.trainer.call(
            "advantage",
            key=inputs.digest,
            before=before,
            version=k,
            rollout=rollout.digest,
            reward=reward.digest,
            max_staleness=it.config.async_buffer_size,
            mask_stale=it.config.rollout.mask_offpolicy_in_partial_rollout,
            deadline_s=it.config.train.timeout_s,
        )
        return answers[0]

    return await once(it, inputs, estimate)
