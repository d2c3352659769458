"""One training iteration: the diagram in the README, line by line."""

from __future__ import annotations

from contextlib import suppress

from prefect import flow

from flows.stopping import handle_sigterm
from rlpipe.errors import Superseded
from rlpipe.types import NodeRef
from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.debug import load
from tasks.gates import gates
from tasks.ordering import wait_to_push, wait_to_sample, wait_to_train
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.sync import sync
from tasks.train import train


@flow(
    name="iteration", flow_run_name="{run}-{k}", on_running=[handle_sigterm], persist_result=False
)
async def iteration(run: str, k: int) -> dict[str, NodeRef]:
    """Run rollout → reward → advantage → train → sync → checkpoint; return the stages' handles.

    Stages whose nodes are in the store are reused.
    """
    await wait_to_sample(run, k)
    samples = await load(run, k) or await rollout(run, k)
    rewards = await reward(run, k, samples)
    await wait_to_train(run, k)
    weights = None
    while weights is None:
        batch = await advantage(run, k, samples, rewards)
        # Superseded: the initial weights were rebuilt with other bits. Score the batch again.
        with suppress(Superseded):
            weights = await train(run, k, batch)
    await wait_to_push(run, k)
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
