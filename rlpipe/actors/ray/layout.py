"""What resources make of a cluster: which actors it has, and which placement groups. Plain
functions of the configuration.

An actor's name says which layout it was made for, so that one of another layout is never taken for
it: a rank knows how many there are from its start on, and an engine keeps its place.

Not here: where bundles lie (`placement`), how actors are started (`named`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

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
            found["engines"] = (
                resources.num_engines * resources.engine_nodes,
                resources.engine_gpus_per_node,
            )
    if resources.critic_ranks:
        found["critic"] = (resources.critic_ranks, 1)
    return found


def rank_names(resources: ResourcesConfig) -> list[str]:
    """The policy's ranks, and after them those that the critic has to itself."""
    policy = resources.trainer_ranks
    critic = resources.critic_ranks
    layout = f"{policy}" + (f"+{critic}" if critic else "") + _within(resources)
    return [f"trainer-{rank}.{layout}" for rank in range(policy)] + [
        f"critic-{rank}.{layout}" for rank in range(critic)
    ]


def engine_names(resources: ResourcesConfig) -> list[str]:
    """The inference engines, one after another; of one that spans nodes each of its servers, the
    first of them under its name."""
    kind = "external" if resources.external_engines else "engine"
    nodes = resources.engine_nodes
    engines = f"{resources.num_engines}x" + (f"{nodes}x" if nodes > 1 else "")
    layout = f"{engines}{resources.engine_gpus_per_node}{_within(resources)}"
    numbers = ((number, node) for number in range(resources.num_engines) for node in range(nodes))
    return [f"{kind}-{number}{f'-{node}' if node else ''}.{layout}" for number, node in numbers]


def server_devices(
    places: Sequence[tuple[str, str]], resources: ResourcesConfig
) -> tuple[tuple[str, ...], ...]:
    """GPUs of each server of the engines (as `engine_names`), of the (machine, GPU) of all bundles
    in order.

    Raises: ResourceError if those of one server are not of one machine.
    """
    width = resources.engine_gpus_per_node
    found = []
    for number in range(resources.num_engines * resources.engine_nodes):
        part = places[number * width : (number + 1) * width]
        if len({machine for machine, _ in part}) > 1:
            raise ResourceError(
                f"engine {number // resources.engine_nodes} would have a server with GPUs of two machines",
                where="resources.num_gpus_per_node",
                found=", ".join(f"GPU {device} of {machine}" for machine, device in part),
                expected=f"{width} of one machine",
                do="take a rollout_num_gpus_per_engine, or num_gpus_per_node, that divides what each machine gives to the run",
            )
        found.append(tuple(device for _, device in part))
    return tuple(found)


def _shared(resources: ResourcesConfig) -> int:
    return max(resources.trainer_ranks, resources.rollout_num_gpus)


def _within(resources: ResourcesConfig) -> str:
    return f"@{_shared(resources)}" if resources.colocate else ""
