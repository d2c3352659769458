"""Half of a run (`rlpipe.config.debug`): rollouts that nothing is trained on, and training on the rollouts of another run.

A rollout without training has no commit that names it, so `rollouts/<run>/<k>.json` does.

Not here: sampling, scoring and training themselves, which are the stages as ever.
"""

from __future__ import annotations

import json
from contextlib import suppress

from rlpipe.errors import ConfigError, ObjectConflict, ObjectMissing
from rlpipe.store.branches import Branches
from rlpipe.store.files import Files
from rlpipe.store.nodes import Nodes
from rlpipe.types import Node, NodeRef, Stage
from tasks.context import context
from tasks.record import handle
from tasks.reward import reward
from tasks.rollout import rollout


async def sample_only(run: str, k: int) -> None:
    """Rollout and reward of iteration k with the first weights, noted under the run's name."""
    it = await context(run)
    samples = await rollout(run, k)
    rewards = await reward(run, k, samples)
    note(it.files, run, k, samples)
    outputs = it.nodes.get(Stage.REWARD, rewards.digest).outputs
    it.progress.say(f"{run}: sampled {k + 1} of {it.config.num_rollout}, mean reward {outputs.get('mean', 0.0):.3f}")


async def load(run: str, k: int) -> NodeRef | None:
    """The stored rollout that iteration k trains on; None if it samples its own."""
    it = await context(run)
    source = it.config.debug.load_debug_rollout_data
    return None if source is None else handle(stored_rollout(it.files, source, k), reused=True)


def note(files: Files, run: str, k: int, samples: NodeRef) -> None:
    """Write down which rollout is iteration k of a run that trains nothing. The first that is noted stays."""
    with suppress(ObjectConflict):
        files.create(_path(run, k), json.dumps({"rollout": samples.digest}).encode())


def stored_rollout(files: Files, run: str, k: int) -> Node:
    """The rollout node of iteration k of a run, trained or only sampled. Raises: ConfigError if there is none."""
    try:
        digest = Branches(files).read(run, k).nodes[Stage.ROLLOUT]
    except ObjectMissing:
        try:
            digest = json.loads(files.read(_path(run, k)))["rollout"]
        except ObjectMissing as error:
            raise ConfigError(
                "that run has no such rollout",
                where="debug.load_debug_rollout_data",
                found=f"no iteration {k} of {run!r}",
                expected="a run of this store with at least num_rollout iterations",
            ) from error
    return Nodes(files).get(Stage.ROLLOUT, digest)


def _path(run: str, k: int) -> str:
    return f"rollouts/{run}/{k:08d}.json"
