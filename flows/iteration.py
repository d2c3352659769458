"""One training iteration: the picture in the README, line by line."""

from __future__ import annotations

from prefect import flow

from rlpipe.types import NodeRef
from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.sync import sync
from tasks.train import train


@flow(name="iteration", flow_run_name="{run}-{k}")
async def iteration(run: str, k: int) -> dict[str, NodeRef]:
    """rollout → reward → advantage → train → sync → checkpoint. What the store has already is reused; handles of the stages."""
    samples = await rollout(run, k)
    rewards = await reward(run, k, samples)
    batch = await advantage(run, k, samples, rewards)
    weights = await train(run, k, batch)
    engines = await sync(run, k, weights, batch)
    nodes = {"rollout": samples, "reward": rewards, "advantage": batch, "train": weights, "sync": engines}
    await checkpoint(run, k, nodes)
    return nodes
