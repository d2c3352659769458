"""Stage 4: the optimizer steps. Repeating it trains nothing twice: the ranks know which state they
hold."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from prefect.client.schemas.objects import State

from rlpipe.actors.trainer.states import StateKeeper
from rlpipe.batch.files import write_packing
from rlpipe.batch.packing import PackingPlan
from rlpipe.errors import ActorLost, Superseded, TrainerError
from rlpipe.lineage.stage_inputs import train_inputs
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import NodeRef, Stage
from tasks.context import RunContext, context, packages
from tasks.record import once, stage_task
from tasks.uploads import settle


@stage_task("train", "train-{k}")
async def train(run: str, k: int, advantage: NodeRef) -> State:
    """The weights after iteration k: the train node's handle."""
    it = await context(run)
    before = (await asyncio.to_thread(it.nodes.get, Stage.ADVANTAGE, advantage.digest)).parents[
        "before"
    ]
    inputs = train_inputs(it.config, advantage.digest, before, it.contracts)

    async def step() -> dict[str, Any]:
        if (
            not await it.cluster.trainer.holds(inputs.digest)
            and await hold(it, before, k) != before
        ):
            raise Superseded(
                "the weights before are others now",
                where=f"train {k}",
                do="score the batch with them first",
            )
        answers = await it.cluster.trainer.call(
            "train",
            key=inputs.digest,
            before=before,
            advantage=advantage.digest,
            deadline_s=it.config.train.timeout_s,
        )
        return _agreed(it, inputs.digest, k, answers)

    return await once(it, inputs, step)


async def hold(it: RunContext, state: str, version: int) -> str:
    """Make the trainer hold a state, from its checkpoint and the batches since, if it does not; the
    state that it holds then.

    That is another one where training the same batches again gave other bits: a segment, which the
    branch goes on from. Raises: Mismatch instead in deterministic mode.
    """
    state = await asyncio.to_thread(
        current_state, Segments(it.files), it.config.run, version, state
    )
    if await it.cluster.trainer.holds(state):
        return state
    with suppress(ActorLost):  # ranks that are gone upload nothing
        await settle(it, wait=True)
    it.progress.stage("restore", note=f"rebuilding weights {state[:12]} from the store")
    keeper = StateKeeper(
        trainer=it.cluster.trainer,
        files=it.files,
        branch=it.config.run,
        init=it.init,
        deterministic=it.config.deterministic,
        train_timeout_s=it.config.train.timeout_s,
        checkpoint_timeout_s=it.config.checkpoint.timeout_s,
        packages=packages(),
        ref_update_interval=it.config.ref_update_interval,
    )
    held = await keeper.hold(state, version=version, epoch=it.epoch.number)
    if held != state:
        it.progress.say(
            f"{it.config.run}: weights {version} came out different from {state[:12]}; going on from {held[:12]}"
        )
    return held


def _agreed(it: RunContext, digest: str, k: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks. Raises: TrainerError if they do not hold the same state."""
    states = {answer["state_digest"] for answer in answers}
    if len(states) != 1:
        raise TrainerError(
            "the ranks do not agree on the state",
            where=f"train {k}",
            found=sorted(states),
            expected="one digest",
        )
    result = answers[0]
    records = [write_packing(it.files, digest, PackingPlan.model_validate(result["packing"]))]
    if (other := answers[-1]["packing"]) != result[
        "packing"
    ]:  # of a critic that has ranks of its own
        records.append(
            write_packing(it.files, digest, PackingPlan.model_validate(other), critic=True)
        )
    metrics = {f"train/{name}": value for name, value in _mean(result["steps"]).items()}
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
    """Metrics of an iteration: the mean over its optimizer steps; the learning rate is the last
    one's."""
    names = dict.fromkeys(name for step in steps for name in step)
    mean = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}
    return {**mean, **{name: steps[-1][name] for name in ("lr",) if name in steps[-1]}}
