"""Stage 2: score the rows of a rollout. Needs no actor: it runs as well on stored rollouts, long
after."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.batch.files import read_samples, write_rewards
from rlpipe.config.data import NoReward
from rlpipe.lineage.stage_inputs import reward_inputs
from rlpipe.rewards.base import reward_outputs, score
from rlpipe.rewards.post_process import post_process
from rlpipe.slime.args import slime_args
from rlpipe.types import NodeRef, Stage
from tasks.context import context
from tasks.record import once, stage_task


@stage_task("reward", "reward-{k}")
async def reward(run: str, k: int, rollout: NodeRef) -> State:
    """Rewards of the samples that a rollout accepted: the reward node's handle."""
    it = await context(run)
    inputs = reward_inputs(it.config, rollout.digest, it.contracts)

    async def judge() -> dict[str, Any]:
        if isinstance(it.config.reward.function, NoReward) and it.config.rollout.type == "dataset":
            return {
                "outputs": {"scored": 0, "errors": 0},
                "files": [write_rewards(it.files, inputs.digest, [])],
            }
        sampled = it.nodes.get(Stage.ROLLOUT, rollout.digest)
        accepted = set(sampled.outputs["accepted"])
        samples = [
            row
            for row in await asyncio.to_thread(read_samples, it.files, sampled)
            if row.group_id in accepted
        ]
        args = slime_args(it.config)
        rows = await score(samples, it.config.reward, args=args, progress=_shown(it))
        if path := it.config.reward.custom_reward_post_process_path:
            rows = await asyncio.to_thread(post_process, path, args, samples, rows)
        return {
            "outputs": reward_outputs(rows),
            "files": [write_rewards(it.files, inputs.digest, rows)],
        }

    return await once(it, inputs, judge)


def _shown(it: Any) -> Any:
    return lambda done, total: it.progress.stage("reward", done=done, total=total)
