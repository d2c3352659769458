"""Half of a run (`rlpipe.config.debug`): rollouts that nothing is trained on, and training on the
rollouts of another run.

Not here: sampling, scoring and training themselves, the stages as ever; where a rollout is noted
(`rlpipe.lineage.rollouts`).
"""

from __future__ import annotations

from rlpipe.errors import ConfigError
from rlpipe.lineage.rollouts import find
from rlpipe.store.notes import note
from rlpipe.store.objects.files import Files
from rlpipe.types import Node, NodeRef, Stage
from tasks.context import context
from tasks.record import handle
from tasks.reward import reward
from tasks.rollout import rollout


async def sample_only(run: str, k: int) -> dict[str, NodeRef]:
    """Rollout and reward of iteration k with the first weights, noted under the run's name: their
    handles."""
    it = await context(run)
    samples = await rollout(run, k)
    rewards = await reward(run, k, samples)
    note(it.files, run, k, {Stage.ROLLOUT: samples.digest, Stage.REWARD: rewards.digest})
    outputs = it.nodes.get(Stage.REWARD, rewards.digest).outputs
    it.progress.say(
        f"{run}: sampled {k + 1} of {it.config.num_rollout}, mean reward {outputs.get('mean', 0.0):.3f}"
    )
    return {"rollout": samples, "reward": rewards}


async def load(run: str, k: int) -> NodeRef | None:
    """The stored rollout that iteration k trains on; None if it samples its own."""
    it = await context(run)
    source = it.config.debug.load_debug_rollout_data
    return None if source is None else handle(stored_rollout(it.files, source, k), reused=True)


def stored_rollout(files: Files, run: str, k: int) -> Node:
    """The rollout node of iteration k of a run, trained or only sampled. Raises: ConfigError if
    there is none."""
    if (found := find(files, run, k)) is not None:
        return found.rollout
    raise ConfigError(
        "that run has no such rollout",
        where="debug.load_debug_rollout_data",
        found=f"no iteration {k} of {run!r}",
        expected="a run of this store with at least num_rollout iterations",
    )
