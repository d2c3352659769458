"""Where actors run: named placement groups of a cluster, whose names say how large they are.

    separate     one group for the trainer, a bundle of one GPU for each rank; one for the engines, a bundle for each server:
                 of an engine, or of its part on each of its nodes (Ray never cuts a bundle in two)
    critic       of its own ranks, if it has any: one group more, a bundle of one GPU for each, also beside colocated ones
    colocated    one group with a bundle for each GPU: rank i has GPU i, engine j the GPUs from j × its number of GPUs on,
                 of each server on one machine

Where the cluster has no GPU, a CPU stands for one. On GPUs bundles are taken in the order of
machines, and on each of its GPUs, so that neighbouring ranks are neighbours; Ray itself promises no
order. Groups outlive the process that made them, so that the next run of the cluster, or a retry,
takes no second set; what another layout left is given up for this one.

Not here: who uses a shared GPU when (`sharing`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.actors.ray.layout import server_devices, shapes
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

LOOPBACK = "127.0.0.1"
RANK, ENGINE, LOOK = 0.5, 0.3, 0.1
"""What an actor or a look asks of a bundle of one GPU; together less than all of it. It only says
that they fit."""

BESIDE_S = 2.0
"""So long groups may take to be placed beside those of another layout, before it is asked whether
they fit in their place."""


def own_address() -> str:
    """Where others of the Ray cluster reach this machine; the loopback interface if there are no
    others."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return get_node_ip_address() if len(machines) > 1 else LOOPBACK


class Bundle(NamedTuple):
    """A bundle of one GPU, where that matters."""

    number: int
    machine: str
    """Its address."""
    device: str
    """The GPU, as CUDA_VISIBLE_DEVICES names it there."""


class Placement:
    """The bundles of one cluster. `claim` them first."""

    def __init__(self, cluster: str | None, resources: ResourcesConfig) -> None:
        """`cluster` None: they are this process's alone, and go with it."""
        self.cluster = cluster
        self.resources = resources
        self.on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._shapes = shapes(resources)
        self._groups: dict[str, PlacementGroup] = {}
        self._orders: dict[str, list[Bundle]] = {}

    def claim(self, *, engines: bool, leave: Callable[[], None] = lambda: None) -> None:
        """Have the groups of this layout, found or made; those of `engines` only if the run has
        any.

        What the cluster has of another layout is given up, and `leave` ends who is in there: not
        before it is known that this layout fits beside it, or by number in its place. Raises:
        ResourceError if it does not fit; the other one stays.
        """
        there = self._there()
        others = [
            group for name, group in there.items() if name not in map(self._name, self._shapes)
        ]
        wanted = [what for what in self._shapes if engines or what != "engines"]
        made = {what: self._made(what) for what in wanted if self._name(what) not in there}
        self._groups |= {what: made.get(what) or there[self._name(what)] for what in wanted}
        for what in made:
            self._orders.pop(what, None)
        blank = [what for what in wanted if what in made or self._is_waiting(what)]
        if others and not self._placed(blank, BESIDE_S) and self._fit_instead(blank, others):
            leave()
            _remove(others)
            others = []
        if not self._placed(wanted, self.resources.start_timeout_s):
            found = f"{ray.cluster_resources()}, of which free {ray.available_resources()}; held: {held() or 'nothing'}"
            _remove(self._groups.pop(what) for what in blank)
            raise ResourceError(
                "the cluster has not enough room",
                where="resources",
                found=found,
                expected="; ".join(
                    f"{size} × {width} {self._kind} for the {what}"
                    for what, (size, width) in self._shapes.items()
                ),
                do="ask for fewer ranks or engines; put both onto the same GPUs with resources.colocate=true; wait for other "
                "runs; join a larger cluster with resources.ray_address; an engine of more GPUs than a node has spans nodes with "
                "resources.num_gpus_per_node; a run that failed keeps its places for resources.keep_idle_s: start it again, and "
                "let it end or cancel it",
            )
        leave()
        _remove(others)

    def trainer(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank; those after the policy's are the critic's own."""
        within_critic = rank - self.resources.trainer_ranks
        if within_critic >= 0:
            return self._options(
                "critic", self._bundles("critic")[within_critic].number, share=RANK
            )
        what = "shared" if self.resources.colocate else "trainer"
        return self._options(what, self._bundles(what)[rank].number, share=RANK)

    def engine(self, number: int, node: int = 0) -> dict[str, Any]:
        """Ray options of an engine's server on one of its nodes. Separate, it sees all GPUs of its
        bundle; colocated, see `engine_devices`; one that others started takes no place."""
        width = self.resources.engine_gpus_per_node
        server = number * self.resources.engine_nodes + node
        if self.resources.external_engines:
            return {"num_cpus": 0}
        if self.resources.colocate:
            return self._options(
                "shared", self._bundles("shared")[server * width].number, share=ENGINE
            )
        return self._options("engines", server, share=width)

    def engine_devices(self) -> tuple[tuple[str, ...], ...] | None:
        """CUDA_VISIBLE_DEVICES of each server, in the order of its tensor parallel ranks; None:
        what its actor sees.

        Raises: as `server_devices`.
        """
        if not (self.on_gpus and self.resources.colocate):
            return None
        return server_devices(
            [(bundle.machine, bundle.device) for bundle in self._bundles("shared")], self.resources
        )

    def remove(self) -> None:
        """Give all places of the cluster back, once the actors are gone."""
        _remove(self._groups.values() if self.cluster is None else self._there().values())
        self._groups.clear()
        self._orders.clear()

    @property
    def _kind(self) -> str:
        return "GPU" if self.on_gpus else "CPU"

    def _name(self, what: str) -> str:
        size, width = self._shapes[what]
        return f"rlpipe-{self.cluster}-{what}-{size}x{width}"

    def _there(self) -> dict[str, PlacementGroup]:
        """The groups that the cluster has, of whatever layout, by name."""
        if self.cluster is None:
            return {}
        ours = re.compile(
            rf"rlpipe-{re.escape(self.cluster)}-(trainer|engines|shared|critic)-\d+x\d+"
        )
        known = [
            row
            for row in placement_group_table().values()
            if row["state"] != "REMOVED" and ours.fullmatch(row["name"])
        ]
        return {
            row["name"]: PlacementGroup(ray.PlacementGroupID.from_hex(row["placement_group_id"]))
            for row in known
        }

    def _made(self, what: str) -> PlacementGroup:
        size, width = self._shapes[what]
        named: dict[str, Any] = (
            {} if self.cluster is None else {"name": self._name(what), "lifetime": "detached"}
        )
        return placement_group([{self._kind: float(width)}] * size, strategy="PACK", **named)

    def _placed(self, which: Iterable[str], timeout_s: float) -> bool:
        """Are these groups placed, within that time?"""
        end_s = time.monotonic() + timeout_s
        return all(self._groups[what].wait(max(end_s - time.monotonic(), 0.0)) for what in which)

    def _is_waiting(self, what: str) -> bool:
        """Has this group never been placed? Also one that was made by who was killed since then."""
        return placement_group_table(self._groups[what])["state"] in ("PENDING", "PREPARED")

    def _fit_instead(self, blank: Iterable[str], others: Iterable[PlacementGroup]) -> bool:
        """Are there as many GPUs as these groups ask for, once others are gone?"""
        free = ray.available_resources().get(self._kind, 0.0)
        free += sum(
            bundle.get(self._kind, 0.0) for group in others for bundle in group.bundle_specs
        )
        asked = (self._shapes[what] for what in blank if self._is_waiting(what))
        return sum(size * width for size, width in asked) <= free

    def _options(self, name: str, bundle: int, *, share: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(
            self._groups[name], placement_group_bundle_index=bundle
        )
        kind = {"num_gpus": share, "num_cpus": 0} if self.on_gpus else {"num_cpus": share}
        return {**kind, "scheduling_strategy": strategy}

    def _bundles(self, name: str) -> list[Bundle]:
        """The bundles of a group in the order of its machines and their GPUs."""
        if name not in self._orders:
            size, _ = self._shapes[name]
            unknown = [Bundle(number, "", "") for number in range(size)]
            self._orders[name] = in_order(self._looked_at(name, size)) if self.on_gpus else unknown
        return self._orders[name]

    def _looked_at(self, name: str, size: int) -> list[tuple[str, str]]:
        remote: Any = ray.remote(_where_am_i)
        looks = [
            remote.options(**self._options(name, bundle, share=LOOK)).remote()
            for bundle in range(size)
        ]
        return ray.get(looks, timeout=self.resources.start_timeout_s)


def held() -> str:
    """The places that are taken in this Ray cluster, by name: those of a run are `rlpipe-<its
    cluster>-…`."""
    return ", ".join(
        sorted(
            group["name"]
            for group in placement_group_table().values()
            if group["state"] == "CREATED"
        )
    )


def _remove(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def in_order(places: Sequence[tuple[str, str]]) -> list[Bundle]:
    """Bundles by (machine's address, GPU as CUDA_VISIBLE_DEVICES names it), sorted.

    Addresses and numbers of GPUs count as numbers; GPUs with other names (UUIDs) follow by name.
    """

    def key(bundle: int) -> tuple[int, int, str]:
        address, device = places[bundle]
        return (
            int(ipaddress.ip_address(address)),
            int(device) if device.isdecimal() else 1 << 30,
            device,
        )

    return [Bundle(bundle, *places[bundle]) for bundle in sorted(range(len(places)), key=key)]


def _where_am_i() -> tuple[str, str]:
    return get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]
