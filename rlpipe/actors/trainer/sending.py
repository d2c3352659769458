"""What a push needs besides engines: a trainer that holds the weights, and who of both shares a
GPU.

Not here: who may send when (`conductor`), how weights move (`pushing`, `files_sync`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlpipe.actors.engines.fleet import Weights
from rlpipe.actors.engines.kept_engine import KeptEngine
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.config.model import ResourcesConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import Mismatch


async def restore(trainer: TrainerGroup, weights: Weights, config: RunConfig) -> None:
    """Have the trainer hold these weights. Raises: Mismatch if they do not come out as they were;
    as `TrainerGroup.ensure`."""
    deadline_s = config.checkpoint.timeout_s + len(weights.lineage.replay) * config.train.timeout_s
    restored = await trainer.ensure(weights.lineage, deadline_s=deadline_s)
    if restored and restored["mismatch"]:
        raise Mismatch(
            "the published weights cannot be rebuilt as they were",
            where=f"nodes/train/{restored['mismatch']}.json",
            expected="the recorded state_digest",
            do="the next stage that needs them says how the run goes on",
        )


def places(
    engines: Iterable[KeptEngine], urls: Sequence[str], resources: ResourcesConfig
) -> dict[str, list[int]]:
    """Of the engines with these URLs, those on the trainer's GPUs: the trainer ranks there, in the
    order of the engine's own."""
    found = {}
    width = resources.rollout_num_gpus_per_engine
    for engine in engines if resources.colocate else ():
        ranks = range(engine.number * width, (engine.number + 1) * width)
        if engine.url in urls and ranks.stop <= resources.trainer_ranks:
            found[engine.url] = list(ranks)
    return found
