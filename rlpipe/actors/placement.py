"""Where actors run: named placement groups of a cluster.

    separate     one group for the trainer, a bundle of one GPU for each rank; one for the engines, a bundle for each engine
    critic       of its own ranks, if it has any: one group more, a bundle of one GPU for each, also beside colocated ones
    colocated    one group with a bundle for each GPU: rank i has GPU i, engine j the GPUs from j × its number of GPUs on

Where the cluster has no GPU, a CPU stands for one. On GPUs bundles are taken in the order of machines, and on each of its
GPUs, so that neighbouring ranks are neighbours; Ray itself promises no order. Groups outlive the process that made them, so
that the next run of the cluster, or a retry, takes no second set.

Not here: who uses a shared GPU when (`sharing`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util import get_node_ip_address, get_placement_group
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

LOOPBACK = "127.0.0.1"
RANK, ENGINE, LOOK = 0.5, 0.3, 0.1
"""What an actor or a look asks of a bundle of one GPU; together less than all of it. It only says that they fit."""


def own_address() -> str:
    """Where others of the Ray cluster reach this machine; the loopback interface if there are no others."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return get_node_ip_address() if len(machines) > 1 else LOOPBACK


class Placement:
    """The bundles of one cluster; a group is made when its first actor is."""

    def __init__(self, cluster: str, resources: ResourcesConfig) -> None:
        self.cluster, self.resources = cluster, resources
        self.on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._groups: dict[str, PlacementGroup] = {}
        self._orders: dict[str, list[tuple[int, str]]] = {}

    def trainer(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank; those after the policy's are the critic's own."""
        within_critic = rank - self.resources.trainer_ranks
        name = self._made_for_ranks() if within_critic < 0 else self._make("critic", self.resources.critic_ranks, 1)
        return self._options(name, self._bundles(name)[rank if within_critic < 0 else within_critic][0], share=RANK)

    def engine(self, number: int) -> dict[str, Any]:
        """Ray options of an engine. Separate, its server sees all GPUs of its bundle; colocated, see `engine_devices`; one that
        others started takes no place."""
        width = self.resources.rollout_num_gpus_per_engine
        if self.resources.external_engines:
            return {"num_cpus": 0}
        if self.resources.colocate:
            name = self._made_for_ranks()
            return self._options(name, self._bundles(name)[number * width][0], share=ENGINE)
        self._make("engines", self.resources.num_engines, width)
        return self._options("engines", number, share=width)

    def engine_devices(self) -> tuple[tuple[str, ...], ...] | None:
        """CUDA_VISIBLE_DEVICES of each engine's server, in the order of its tensor parallel ranks; None: what its actor sees."""
        if not (self.on_gpus and self.resources.colocate):
            return None
        devices = [device for _, device in self._bundles(self._made_for_ranks())]
        width = self.resources.rollout_num_gpus_per_engine
        return tuple(tuple(devices[n * width : (n + 1) * width]) for n in range(self.resources.num_engines))

    def remove(self) -> None:
        """Give the places back, once the actors are gone."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        self._orders.clear()

    def _made_for_ranks(self) -> str:
        resources = self.resources
        if not resources.colocate:
            return self._make("trainer", resources.trainer_ranks, 1)
        return self._make("shared", max(resources.trainer_ranks, resources.rollout_num_gpus), 1)

    def _make(self, what: str, size: int, width: int) -> str:
        if what not in self._groups:
            bundle = {"GPU" if self.on_gpus else "CPU": float(width)}
            self._groups[what] = self._found_or_made(f"rlpipe-{self.cluster}-{what}", [bundle] * size)
        return what

    def _options(self, name: str, bundle: int, *, share: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._groups[name], placement_group_bundle_index=bundle)
        kind = {"num_gpus": share, "num_cpus": 0} if self.on_gpus else {"num_cpus": share}
        return {**kind, "scheduling_strategy": strategy}

    def _bundles(self, name: str) -> list[tuple[int, str]]:
        """The bundles of a group in the order of its machines and their GPUs, each with its GPU's name there."""
        if name not in self._orders:
            size = self._groups[name].bundle_count
            self._orders[name] = in_order(self._looked_at(name, size)) if self.on_gpus else [(n, "") for n in range(size)]
        return self._orders[name]

    def _looked_at(self, name: str, size: int) -> list[tuple[str, str]]:
        remote: Any = ray.remote(_where_am_i)
        looks = [remote.options(**self._options(name, bundle, share=LOOK)).remote() for bundle in range(size)]
        return ray.get(looks, timeout=self.resources.start_timeout_s)

    def _found_or_made(self, name: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        try:
            group = get_placement_group(name)
        except ValueError:
            group = placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
        if group.bundle_specs != bundles:
            raise ResourceError(
                "the cluster's actors are placed for another number of processes",
                where="resources",
                found=f"{group.bundle_specs} in the placement group {name}",
                expected=f"{bundles}",
                do="give this run a cluster of its own: resources.cluster=NAME",
            )
        if not group.wait(self.resources.start_timeout_s):
            remove_placement_group(group)
            raise ResourceError(
                "the cluster has not enough room",
                where="resources",
                found=f"{ray.cluster_resources()}, of which free {ray.available_resources()}; held: {held() or 'nothing'}",
                expected=f"{bundles} for the placement group {name}",
                do="ask for fewer ranks or engines, wait for other runs, or join a larger cluster with resources.ray_address; a "
                "run that failed keeps its places: start it again, and let it end or cancel it",
            )
        return group


def held() -> str:
    """The places that are taken in this Ray cluster, by name: those of a run are `rlpipe-<its cluster>-…`."""
    return ", ".join(sorted(group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"))


def in_order(places: Sequence[tuple[str, str]]) -> list[tuple[int, str]]:
    """Bundles by (machine's address, GPU as CUDA_VISIBLE_DEVICES names it), sorted: (number of the bundle, GPU).

    Addresses and numbers of GPUs count as numbers; GPUs with other names (UUIDs) follow by name.
    """

    def key(bundle: int) -> tuple[int, int, str]:
        address, device = places[bundle]
        return int(ipaddress.ip_address(address)), int(device) if device.isdecimal() else 1 << 30, device

    return [(bundle, places[bundle][1]) for bundle in sorted(range(len(places)), key=key)]


def _where_am_i() -> tuple[str, str]:
    return get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]
