"""Stage 2: score the rows of a rollout. Needs no actor, so it also scores stored rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State

from rlpipe.actors.reward_workers import process_workers
from rlpipe.batch.files import read_samples, write_rewards
from rlpipe.config.data import NoReward
from rlpipe.lineage.stage_inputs import reward_inputs
from rlpipe.lineage.visits import group_visits
from rlpipe.observe.pass_rates import draw_metrics
from rlpipe.rewards.post_process import post_process
from rlpipe.rewards.reward_rows import RewardRow, error_note, reward_outputs, score, waits_for
from rlpipe.slime.args import slime_args
from rlpipe.types import Node, NodeRef, Stage
from tasks.context import RunContext, context
from tasks.record import reuse_or_run, stage_task

SHOWN_ERRORS = 3
"""Iterations of a process whose errors of the reward function the terminal shows."""


def _warn_of_errors(ctx: RunContext, k: int, note: str | None) -> None:
    """Show the errors of the reward function: in Prefect always, on the terminal the first ones."""
    if note is None:
        return
    get_run_logger().warning("%s", note)
    ctx.iterations_with_errors += 1
    if ctx.iterations_with_errors <= SHOWN_ERRORS:
        rest = "; later ones: rlpipe rollouts" if ctx.iterations_with_errors == SHOWN_ERRORS else ""
        ctx.progress.say(f"{ctx.config.run}: iteration {k}: {note}{rest}")


@stage_task("reward", "reward-{k}")
async def reward(run: str, k: int, rollout: NodeRef) -> State:
    """Score the samples that a rollout accepted; return the reward node's handle."""
    ctx = await context(run)
    inputs = reward_inputs(ctx.config, rollout.digest, ctx.contracts)

    async def score_rollout() -> dict[str, Any]:
        rollout_node = ctx.nodes.get(Stage.ROLLOUT, rollout.digest)
        # Supervised rows have no reward. Later stages still expect the file.
        if (
            isinstance(ctx.config.reward.function, NoReward)
            and ctx.config.rollout.type == "dataset"
        ):
            metrics = await asyncio.to_thread(_of_curriculum, ctx, rollout_node, [])
            return {
                "outputs": {"scored": 0, "errors": 0, **({"metrics": metrics} if metrics else {})},
                "files": [write_rewards(ctx.files, inputs.digest, [])],
            }
        accepted = set(rollout_node.outputs["accepted"])
        rows = await asyncio.to_thread(
            read_samples, ctx.files, rollout_node, tokens=ctx.config.reward.reads_tokens
        )
        samples = [row for row in rows if row.group_id in accepted]
        args = slime_args(ctx.cluster.config)
        rewards = await score(
            samples,
            ctx.config.reward,
            args=args,
            process=process_workers(ctx.config.reward),
            progress=lambda done, total: ctx.progress.stage(
                "reward", k, done=done, total=total, waits_for=waits_for(ctx.config.reward)
            ),
        )
        # First: post-processing may fail because of the rewards that are missing.
        _warn_of_errors(ctx, k, error_note(rewards, samples, ctx.config.reward))
        if path := ctx.config.reward.custom_reward_post_process_path:
            rewards = await asyncio.to_thread(post_process, path, args, samples, rewards)
        outputs = reward_outputs(rewards, samples, ctx.config.evaluation.datasets)
        outputs["metrics"] |= await asyncio.to_thread(_of_curriculum, ctx, rollout_node, rewards)
        return {
            "outputs": outputs,
            "files": [write_rewards(ctx.files, inputs.digest, rewards)],
        }

    return await reuse_or_run(ctx, inputs, score_rollout)


def _of_curriculum(
    ctx: RunContext, rollout: Node, rewards: Sequence[RewardRow]
) -> dict[str, float]:
    """Return the metrics of the draws of a curriculum; {} without one."""
    curriculum = ctx.config.data.curriculum
    if curriculum is None:
        return {}
    visits = group_visits(rollout, rewards, curriculum.pass_threshold)
    return draw_metrics(map(ctx.plans.read, rollout.outputs["plans"]), visits)
