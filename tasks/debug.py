"""Run half an iteration (`rlpipe.config.run`): only rollouts, or training on stored rollouts."""

from __future__ import annotations

from rlpipe.errors import ConfigError
from rlpipe.lineage.rollouts import find
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.types import Node, NodeRef, Stage
from tasks.context import context
from tasks.record import handle
from tasks.reward import reward
from tasks.rollout import rollout


async def sample_only(run: str, k: int) -> dict[str, NodeRef]:
    """Run rollout and reward of iteration k with the first weights; return their handles."""
    ctx = await context(run)
    samples = await rollout(run, k)
    rewards = await reward(run, k, samples)
    write_note(ctx.files, run, k, {Stage.ROLLOUT: samples.digest, Stage.REWARD: rewards.digest})
    outputs = ctx.nodes.get(Stage.REWARD, rewards.digest).outputs
    ctx.progress.say(
        f"{run}: sampled {k + 1} of {ctx.config.num_rollout}, "
        f"mean reward {outputs.get('mean', 0.0):.3f}"
    )
    return {"rollout": samples, "reward": rewards}


async def load(run: str, k: int) -> NodeRef | None:
    """Return the handle of the stored rollout that iteration k trains on; None if it samples."""
    ctx = await context(run)
    source = ctx.config.debug.load_debug_rollout_data
    return None if source is None else handle(stored_rollout(ctx.files, source, k), reused=True)


def stored_rollout(files: Files, run: str, k: int) -> Node:
    """Return the rollout node of iteration k of a run. Raises: ConfigError if it does not exist."""
    if (stored := find(files, run, k)) is not None:
        return stored.rollout
    raise ConfigError(
        "the run has no stored rollout of this iteration",
        where="debug.load_debug_rollout_data",
        found=f"no iteration {k} of {run!r}",
        expected="a run of this store with at least num_rollout iterations",
    )
