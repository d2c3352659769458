"""One training iteration: the picture in the README, line by line."""

from __future__ import annotations

from contextlib import suppress

from prefect import flow

from flows.stopping import hear_sigterm
from rlpipe.errors import Superseded
from rlpipe.types import NodeRef
from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.debug import load
from tasks.gates import gates
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.sync import sync
from tasks.train import train
from tasks.turn import turn_to_push, turn_to_sample, turn_to_train


@flow(name="iteration", flow_run_name="{run}-{k}", on_running=[hear_sigterm], persist_result=False)
async def iteration(run: str, k: int) -> dict[str, NodeRef]:
    """rollout → reward → advantage → train → sync → checkpoint. What the store has already is
    reused; handles of the stages."""
    await turn_to_sample(run, k)
    samples = await load(run, k) or await rollout(run, k)
    rewards = await reward(run, k, samples)
    await turn_to_train(run, k)
    weights = None
    while weights is None:
        batch = await advantage(run, k, samples, rewards)
        with suppress(
            Superseded
        ):  # the weights before had to be rebuilt, and came out different: score again
            weights = await train(run, k, batch)
    await turn_to_push(run, k)
    await gates(
        run, k, {"rollout": samples, "reward": rewards, "advantage": batch, "train": weights}
    )
    engines = await sync(run, k, weights, batch)
    nodes = {
        "rollout": samples,
        "reward": rewards,
        "advantage": batch,
        "train": weights,
        "sync": engines,
    }
    await checkpoint(run, k, nodes)
    return nodes
