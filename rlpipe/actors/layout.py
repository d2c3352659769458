"""What resources make of a cluster: which actors it has, and which placement groups. Plain functions of the configuration.

An actor's name says which layout it was made for, so that one of another layout is never taken for it: a rank knows how many
there are from its start on, and an engine keeps its place.

Not here: where bundles lie (`placement`), how actors are started (`named`).
"""

from __future__ import annotations

from rlpipe.config.model import ResourcesConfig

Shape = tuple[int, int]
"""Bundles of a placement group, and GPUs of each."""


def shapes(resources: ResourcesConfig) -> dict[str, Shape]:
    """The placement groups of a layout."""
    found: dict[str, Shape] = {}
    if resources.colocate:
        found["shared"] = (_shared(resources), 1)
    else:
        found["trainer"] = (resources.trainer_ranks, 1)
        if not resources.external_engines:
            found["engines"] = (resources.num_engines, resources.rollout_num_gpus_per_engine)
    if resources.critic_ranks:
        found["critic"] = (resources.critic_ranks, 1)
    return found


def rank_names(resources: ResourcesConfig) -> list[str]:
    """The policy's ranks, and after them those that the critic has to itself."""
    policy, critic = resources.trainer_ranks, resources.critic_ranks
    layout = f"{policy}" + (f"+{critic}" if critic else "") + _within(resources)
    return [f"trainer-{rank}.{layout}" for rank in range(policy)] + [f"critic-{rank}.{layout}" for rank in range(critic)]


def engine_names(resources: ResourcesConfig) -> list[str]:
    """The inference engines."""
    layout = f"{resources.num_engines}x{resources.rollout_num_gpus_per_engine}{_within(resources)}"
    kind = "external" if resources.external_engines else "engine"
    return [f"{kind}-{number}.{layout}" for number in range(resources.num_engines)]


def _shared(resources: ResourcesConfig) -> int:
    return max(resources.trainer_ranks, resources.rollout_num_gpus)


def _within(resources: ResourcesConfig) -> str:
    return f"@{_shared(resources)}" if resources.colocate else ""
