"""Stage 4: optimizer steps.

A repeated call trains nothing twice, because each rank knows which state it holds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.trainer.states import TrainerStates
from rlpipe.batch.files import write_packing
from rlpipe.batch.packing import PackingPlan
from rlpipe.errors import ActorLost, Superseded, TrainerError
from rlpipe.lineage.stage_inputs import train_inputs
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import NodeRef, Stage
from tasks.context import RunContext, context, packages
from tasks.record import reuse_or_run, stage_task
from tasks.uploads import settle


@stage_task("train", "train-{k}")
async def train(run: str, k: int, advantage: NodeRef) -> State:
    """Train on the batch of iteration k; return the train node's handle."""
    ctx = await context(run)
    batch = await asyncio.to_thread(ctx.nodes.get, Stage.ADVANTAGE, advantage.digest)
    before = batch.parents["before"]
    inputs = train_inputs(ctx.config, advantage.digest, before, ctx.contracts)

    async def step() -> dict[str, Any]:
        held = await ctx.cluster.trainer.held()
        if held != inputs.digest and await hold(ctx, before, k, held=held) != before:
            raise Superseded(
                "a segment replaced the weights that the batch was scored with",
                where=f"train {k}",
                do="score the batch with the segment's weights",
            )
        answers = await ctx.cluster.trainer.call(
            "train",
            key=inputs.digest,
            before=before,
            advantage=advantage.digest,
            deadline_s=ctx.config.train.timeout_s,
        )
        return _agreed(ctx, inputs.digest, k, answers)

    return await reuse_or_run(ctx, inputs, step)


async def hold(ctx: RunContext, state: str, version: int, *, held: str | None = None) -> str:
    """Make the trainer hold a state; return the state that it holds.

    The trainer loads the newest checkpoint before the state and replays the later batches. `held`:
    the state that all ranks have just reported; None: ask them.

    If the replay gives other bits, the returned state is a recorded segment, and the branch
    continues from that. Raises: Mismatch instead in deterministic mode.
    """
    # Another process may have recorded a segment since the caller read the state.
    state = await asyncio.to_thread(
        current_state, Segments(ctx.files), ctx.config.run, version, state
    )
    if state == (held or await ctx.cluster.trainer.held()):
        return state
    with suppress(ActorLost):  # dead ranks upload nothing
        # A restore may replace the ranks that upload, or need the checkpoint.
        await settle(ctx, wait=True)
    trainer_states = TrainerStates(
        trainer=ctx.cluster.trainer,
        files=ctx.files,
        branch=ctx.config.run,
        init=ctx.init,
        deterministic=ctx.config.deterministic,
        train_timeout_s=ctx.config.train.timeout_s,
        checkpoint_timeout_s=ctx.config.checkpoint.timeout_s,
        packages=packages(),
        ref_update_interval=ctx.config.ref_update_interval,
        ref_update_offset=ctx.config.ref_update_offset,
    )
    with ctx.progress.running("restore", note=f"restoring weights {state[:12]} from the store"):
        restored = await trainer_states.restore(state, version=version, epoch=ctx.epoch.number)
    if restored != state:
        ctx.progress.say(
            f"{ctx.config.run}: the replay of weights {version} gave other bits than {state[:12]}; "
            f"continuing from {restored[:12]}"
        )
    return restored


def _agreed(ctx: RunContext, digest: str, k: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the common result of all ranks. Raises: TrainerError if their state digests differ."""
    states = {answer["state_digest"] for answer in answers}
    # Every rank returns the digest of the whole state.
    if len(states) != 1:
        raise TrainerError(
            "trainer ranks hold different states",
            where=f"train {k}",
            found=sorted(states),
            expected="one digest",
        )
    result = answers[0]
    records = [write_packing(ctx.files, digest, PackingPlan.model_validate(result["packing"]))]
    records += result["files"]
    resources = ctx.config.resources
    if resources.critic_ranks and (
        (critic_packing := answers[resources.trainer_ranks]["packing"]) != result["packing"]
    ):
        plan = PackingPlan.model_validate(critic_packing)
        records.append(write_packing(ctx.files, digest, plan, critic=True))
    metrics = {f"train/{name}": value for name, value in _mean(result["steps"]).items()}
    metrics |= result["metrics"]
    outputs = {
        "state_digest": result["state_digest"],
        "version": k + 1,
        "steps": result["steps"],
        "tokens": result["tokens"],
        "machine": result["machine"],
        "metrics": metrics,
    }
    return {"files": records, "outputs": outputs}


def _mean(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the optimizer steps. The learning rate is the last step's."""
    names = dict.fromkeys(name for step in steps for name in step)
    mean = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
    return {**mean, "lr": steps[-1]["lr"]} if "lr" in steps[-1] else mean
