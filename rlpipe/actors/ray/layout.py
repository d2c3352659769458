"""Actors and placement groups that follow from the `resources` configuration.

Pure functions. An actor's name contains the layout that it was started for. Actors of another
layout are therefore never reused: a rank knows the world size from its start, and an engine keeps
its GPUs for life. The number of engines is not part of an engine's layout: engines join and leave
a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from rlpipe.config.model import ResourcesConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import ResourceError

ENGINES = "engines"
"""Use of the bundles of all engines with GPUs of their own."""
GroupShape = tuple[int, int]
"""Number of bundles of a placement group, and GPUs per bundle."""


class Placed(NamedTuple):
    """A run's configuration with separate or shared GPUs."""

    config: RunConfig
    line: str | None
    """Text of the decision; None if nothing was decided."""


def placed(config: RunConfig, node_gpus: Sequence[int]) -> Placed:
    """Decide `resources.colocate: auto`. `node_gpus`: GPUs of each node of the Ray cluster.

    Trainer and engines get separate GPUs if the cluster has enough. Otherwise they share GPUs, if
    the configuration allows that and those suffice. GPUs in use by others count, so that a run and
    its resume decide the same; so do all processes of one epoch (`cluster_gpus`).
    """
    resources = config.resources
    if resources.colocate != "auto":
        return Placed(config, None)
    # Without the keys that need shared GPUs.
    alone = {"colocate": False, "offload_train": None, "offload_rollout": None}
    separate = _with_resources(config, {**resources.model_dump(), **alone})
    total = sum(node_gpus)
    if not total or not config.needs_engines or resources.external_engines:
        return Placed(separate, None)
    needed = _num_gpus(separate.resources)
    if _fits(separate.resources, node_gpus):
        line = f"trainer and engines have separate GPUs, {needed} of {total}"
        return Placed(separate, f"{line} (resources.colocate: auto)")
    shared = _sharing(config)
    if shared is None or not _fits(shared.resources, node_gpus):
        return Placed(separate, None)  # the reservation of GPUs fails with both numbers
    line = (
        f"trainer and engines share GPUs, {_num_gpus(shared.resources)} of {total}, because "
        f"separate ones would be {needed}"
    )
    return Placed(shared, f"{line} (resources.colocate: auto)")


def _sharing(config: RunConfig) -> RunConfig | None:
    """Return the configuration with shared GPUs; None if another key excludes that."""
    resources = config.resources
    values = {**resources.model_dump(), "colocate": True}
    if resources.rollout_num_gpus == 1:
        # The key's default, which with `colocate: true` is the number of ranks.
        del values["rollout_num_gpus"]
    try:
        shared = _with_resources(config, values)
        # Also the rules about other sections, such as asynchronous training.
        RunConfig.model_validate(shared.model_dump(mode="json"))
    except ValidationError:
        return None
    return shared


def _with_resources(config: RunConfig, values: dict[str, object]) -> RunConfig:
    resources = ResourcesConfig.model_validate(values)
    return config.model_copy(update={"resources": resources})


def _fits(resources: ResourcesConfig, node_gpus: Sequence[int]) -> bool:
    """True if the nodes have room for all bundles; the widest ones are placed first."""
    free = sorted(node_gpus, reverse=True)
    shapes = group_shapes(resources)
    if "shared" in shapes:
        # The GPUs of one server are on one node (`server_devices`).
        width = resources.engine_gpus_per_node
        shapes["shared"] = (shapes["shared"][0] // width, width)
    widest_first = sorted(shapes.values(), key=lambda shape: -shape[1])
    for bundles, width in widest_first:
        for _ in range(bundles):
            node = next((node for node, gpus in enumerate(free) if gpus >= width), None)
            if node is None:
                return False
            free[node] -= width
    return True


def _num_gpus(resources: ResourcesConfig) -> int:
    return sum(bundles * width for bundles, width in group_shapes(resources).values())


def group_shapes(resources: ResourcesConfig) -> dict[str, GroupShape]:
    """Return the bundles of a layout, by their use.

    Those of ENGINES are in a placement group for each engine (`engine_group`).
    """
    shapes: dict[str, GroupShape] = {}
    if resources.shares_gpus:
        shapes["shared"] = (_num_shared_gpus(resources), 1)
    else:
        shapes["trainer"] = (resources.trainer_ranks, 1)
        if not resources.external_engines:
            servers, width = engine_shape(resources)
            shapes[ENGINES] = (resources.num_engines * servers, width)
    if resources.critic_ranks:
        shapes["critic"] = (resources.critic_ranks, 1)
    return shapes


def engine_shape(resources: ResourcesConfig) -> GroupShape:
    """Return the placement group of one engine: a bundle for each of its servers."""
    # Ray places a bundle on one node only.
    return resources.engine_nodes, resources.engine_gpus_per_node


def engine_group(number: int) -> str:
    """Return the use of the placement group of one engine."""
    return f"engine-{number}"


def labels_of(resources: ResourcesConfig, use: str) -> dict[str, str]:
    """Return the labels of the nodes for a placement group."""
    is_of_engine = use.startswith("engine-") and not resources.shares_gpus
    return resources.engine_labels if is_of_engine else resources.trainer_labels


def labels_suffix(labels: Mapping[str, str]) -> str:
    """Return a part of names that differs for other labels; "" without labels."""
    text = json.dumps(labels, sort_keys=True)
    return f"~{hashlib.sha256(text.encode()).hexdigest()[:6]}" if labels else ""


def rank_names(resources: ResourcesConfig) -> list[str]:
    """Return actor names of the policy's ranks, then of the critic's own ranks."""
    policy = resources.trainer_ranks
    critic = resources.critic_ranks
    layout = f"{policy}" + (f"+{critic}" if critic else "") + _shared_suffix(resources)
    layout += labels_suffix(resources.trainer_labels)
    return [f"trainer-{rank}.{layout}" for rank in range(policy)] + [
        f"critic-{rank}.{layout}" for rank in range(critic)
    ]


def engine_names(resources: ResourcesConfig, engines: int | None = None) -> list[str]:
    """Return actor names of all engine servers, engine by engine and node by node.

    The server on node 0 has the name of the engine. `engines`: their number; None: as configured.
    """
    nodes = range(resources.engine_nodes)
    numbers = range(resources.num_engines if engines is None else engines)
    return [engine_name(resources, number, node) for number in numbers for node in nodes]


def engine_name(resources: ResourcesConfig, number: int, node: int) -> str:
    """Return the actor name of an engine's server on one of its nodes."""
    kind = "external" if resources.external_engines else "engine"
    nodes = f"{resources.engine_nodes}x" if resources.engine_nodes > 1 else ""
    layout = f"{nodes}{resources.engine_gpus_per_node}{_shared_suffix(resources)}"
    layout += labels_suffix(labels_of(resources, engine_group(number)))
    return f"{kind}-{number}{f'-{node}' if node else ''}.{layout}"


def server_devices(
    gpus: Sequence[tuple[str, str]], resources: ResourcesConfig
) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of each engine server, in the order of `engine_names`.

    `gpus`: (machine, GPU) of all shared bundles, in order. Raises: ResourceError if the GPUs of one
    server are on two machines.
    """
    width = resources.engine_gpus_per_node
    devices = []
    for server in range(resources.num_engines * resources.engine_nodes):
        of_server = gpus[server * width : (server + 1) * width]
        if len({machine for machine, _ in of_server}) > 1:
            engine = server // resources.engine_nodes
            raise ResourceError(
                f"engine {engine} would have a server with GPUs of two machines",
                where="resources.num_gpus_per_node",
                found=", ".join(f"GPU {device} of {machine}" for machine, device in of_server),
                expected=f"{width} of one machine",
                do="choose a rollout_num_gpus_per_engine, or num_gpus_per_node, that divides the "
                "number of GPUs on each machine of the run",
            )
        devices.append(tuple(device for _, device in of_server))
    return tuple(devices)


def shared_trainer_ranks(engine: int, resources: ResourcesConfig) -> list[int] | None:
    """Return the trainer ranks on an engine's GPUs, in the order of the engine's own ranks.

    None if the engine shares no GPU with the trainer, or not all of its GPUs.
    """
    width = resources.rollout_num_gpus_per_engine
    ranks = range(engine * width, (engine + 1) * width)
    if resources.shares_gpus and ranks.stop <= resources.trainer_ranks:
        return list(ranks)
    return None


def _num_shared_gpus(resources: ResourcesConfig) -> int:
    return max(resources.trainer_ranks, resources.rollout_num_gpus)


def _shared_suffix(resources: ResourcesConfig) -> str:
    return f"@{_num_shared_gpus(resources)}" if resources.shares_gpus else ""
