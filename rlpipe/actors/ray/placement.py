"""Named placement groups of a cluster.

    separate     one group for the trainer with a bundle of one GPU per rank, and one group for each
                 engine with a bundle per server (an engine that spans nodes has a server on each),
                 so that engines join and leave while the run continues
    colocated    one group with a bundle per GPU: rank i uses GPU i, engine j the GPUs from
                 j × its number of GPUs on; the GPUs of a server are on one machine
    critic       one more group with a bundle of one GPU per rank, if the critic has its own ranks

Without GPUs a CPU replaces each GPU. On GPUs, bundles are sorted by machine and GPU, so that
neighbouring ranks are neighbours; Ray guarantees no order. Groups outlive the process that made
them: a retry, or the next run of the cluster, uses the same groups. Groups of another layout are
removed when this layout needs their resources.

Entry point: `Placement`.
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

from rlpipe.actors.ray.layout import (
    ENGINES,
    GroupShape,
    engine_group,
    engine_shape,
    group_shapes,
    labels_of,
    labels_suffix,
    server_devices,
)
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

LOOPBACK = "127.0.0.1"
# Fractions of a bundle's GPU. Their sum is below 1, so that rank, engine and probe fit together;
# Ray does not enforce them.
RANK_SHARE = 0.5
ENGINE_SHARE = 0.3
PROBE_SHARE = 0.1

NEXT_TO_OTHERS_S = 2.0
"""Time for Ray to place groups if the cluster has room next to those that exist."""


def own_address() -> str:
    """Return the address of this machine for other nodes; the loopback address on one machine."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return get_node_ip_address() if len(machines) > 1 else LOOPBACK


class Bundle(NamedTuple):
    """A bundle of one GPU. Machine and device are empty on CPUs."""

    number: int
    machine: str
    """Address of the node."""
    device: str
    """Name of the GPU in CUDA_VISIBLE_DEVICES of that node."""


class Placement:
    """The bundles of one cluster. Call `reserve` first."""

    def __init__(self, cluster: str | None, resources: ResourcesConfig) -> None:
        """`cluster` None: unnamed groups that end with this process."""
        self.cluster = cluster
        self.resources = resources
        # The cluster decides, not this machine: a driver may run on a node without GPUs.
        self.on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._shapes = group_shapes(resources)
        self._groups: dict[str, PlacementGroup] = {}
        self._sorted_bundles: dict[str, list[Bundle]] = {}

    def reserve(
        self,
        *,
        engines: int,
        kept_engines: int = 0,
        kill_others: Callable[[], None] = lambda: None,
    ) -> None:
        """Find or create the groups of this layout.

        `engines`: number of engines that need groups now. `kept_engines`: number of engines that
        may have groups already. Groups of another layout are removed, and `kill_others` is called
        to end their actors, but only once this layout is known to fit next to them or in their
        place. Raises: ResourceError if it does not fit; then the others stay.
        """
        existing = self._existing_groups()
        own = {self._name(use): use for use in self._uses(max(engines, kept_engines))}
        others = [group for name, group in existing.items() if name not in own]
        wanted = self._uses(engines)
        created = {
            use: self._create_group(use) for use in wanted if self._name(use) not in existing
        }
        self._groups |= {own[name]: group for name, group in existing.items() if name in own}
        self._groups |= created
        # Ray may place a new group on other machines.
        for use in created:
            self._sorted_bundles.pop(use, None)
        # A pending group of a killed process counts as new: it may never have had room.
        unplaced = [use for use in wanted if use in created or self._is_pending(use)]
        if others and not self._placed(unplaced, NEXT_TO_OTHERS_S) and self._fit(unplaced, others):
            kill_others()
            _remove(others)
            others = []
        if not self._placed(wanted, self.resources.start_timeout_s):
            error = self._no_room()
            # placed groups of this layout stay: their actors may be alive
            _remove(self._groups.pop(use) for use in unplaced)
            raise error
        kill_others()
        _remove(others)

    def reserve_engine(self, number: int) -> bool:
        """Create the group of an engine that joins. True once Ray has placed it."""
        use = engine_group(number)
        is_new = use not in self._groups
        if is_new:
            existing = self._existing_groups().get(self._name(use))
            self._groups[use] = existing or self._create_group(use)
        return self._placed([use], NEXT_TO_OTHERS_S if is_new else 0.0)

    def release_engine(self, number: int) -> None:
        """Remove the group of an engine that has left."""
        if group := self._groups.pop(engine_group(number), None):
            _remove([group])

    def _no_room(self) -> ResourceError:
        total = ray.cluster_resources().get(self._kind, 0.0)
        free = ray.available_resources().get(self._kind, 0.0)
        return ResourceError(
            "the Ray cluster has not enough room for this run",
            where="resources",
            found=f"{total:g} {self._kind}s, of which {free:g} are free; "
            f"placement groups that hold some: {placed_groups() or 'none'}",
            expected="; ".join(
                f"{bundles} × {width} {self._kind}s for the {use}{self._on_nodes(use)}"
                for use, (bundles, width) in self._shapes.items()
            ),
            do="ask for fewer ranks or engines; put both onto the same GPUs with "
            "resources.colocate=true; wait for other runs; join a larger cluster with "
            "resources.ray_address; let an engine with more GPUs than a node span nodes with "
            "resources.num_gpus_per_node; a failed run keeps its bundles for "
            "resources.keep_idle_s: start it again and let it end, or cancel it",
        )

    def _on_nodes(self, use: str) -> str:
        labels = labels_of(self.resources, engine_group(0) if use == ENGINES else use)
        pairs = ", ".join(f"{key}: {value}" for key, value in labels.items())
        return f" on nodes with the labels {pairs}" if pairs else ""

    def trainer(self, rank: int) -> dict[str, Any]:
        """Return Ray options of a rank. Numbers of the critic's own ranks follow the policy's."""
        critic_rank = rank - self.resources.trainer_ranks
        if critic_rank >= 0:
            bundle = self._bundles("critic")[critic_rank]
            return self._options("critic", bundle.number, share=RANK_SHARE)
        use = "shared" if self.resources.shares_gpus else "trainer"
        return self._options(use, self._bundles(use)[rank].number, share=RANK_SHARE)

    def engine(self, number: int, node: int = 0) -> dict[str, Any]:
        """Return Ray options of an engine's server on one of its nodes.

        A separate server sees all GPUs of its bundle; for a colocated one see `engine_devices`. An
        external engine uses no bundle.
        """
        width = self.resources.engine_gpus_per_node
        server = number * self.resources.engine_nodes + node
        # the actor of an external server only sends HTTP requests
        if self.resources.external_engines:
            return {"num_cpus": 0}
        if self.resources.shares_gpus:
            bundle = self._bundles("shared")[server * width]
            return self._options("shared", bundle.number, share=ENGINE_SHARE)
        return self._options(engine_group(number), node, share=width)

    def engine_devices(self) -> tuple[tuple[str, ...], ...] | None:
        """Return CUDA_VISIBLE_DEVICES of each server, in the order of tensor parallel ranks.

        None: a server sees the GPUs of its actor. Raises: as `server_devices`.
        """
        # A colocated actor has a share of one GPU, but its server uses the GPUs of several bundles.
        if not (self.on_gpus and self.resources.shares_gpus):
            return None
        gpus = [(bundle.machine, bundle.device) for bundle in self._bundles("shared")]
        return server_devices(gpus, self.resources)

    def remove(self) -> None:
        """Remove all groups of the cluster. Its actors must have ended."""
        groups = self._groups if self.cluster is None else self._existing_groups()
        _remove(groups.values())
        self._groups.clear()
        self._sorted_bundles.clear()

    @property
    def _kind(self) -> str:
        return "GPU" if self.on_gpus else "CPU"

    def _name(self, use: str) -> str:
        bundles, width = self._shape(use)
        suffix = labels_suffix(labels_of(self.resources, use))
        return f"rlpipe-{self.cluster}-{use}-{bundles}x{width}{suffix}"

    def _uses(self, engines: int) -> list[str]:
        """Return the uses of this layout's groups, with this number of engines."""
        separate = ENGINES in self._shapes
        uses = [use for use in self._shapes if use != ENGINES]
        return uses + [engine_group(number) for number in range(engines if separate else 0)]

    def _shape(self, use: str) -> GroupShape:
        return self._shapes.get(use) or engine_shape(self.resources)

    def _existing_groups(self) -> dict[str, PlacementGroup]:
        """Return the groups of the cluster, of any layout, by name."""
        if self.cluster is None:
            return {}
        pattern = re.compile(
            rf"rlpipe-{re.escape(self.cluster)}-(trainer|engine-\d+|shared|critic)-\d+x\d+(~\w+)?"
        )
        rows = [
            row
            for row in placement_group_table().values()
            if row["state"] != "REMOVED" and pattern.fullmatch(row["name"])
        ]
        return {
            row["name"]: PlacementGroup(ray.PlacementGroupID.from_hex(row["placement_group_id"]))
            for row in rows
        }

    def _create_group(self, use: str) -> PlacementGroup:
        num_bundles, width = self._shape(use)
        options: dict[str, Any] = {}
        if self.cluster is not None:
            options = {"name": self._name(use), "lifetime": "detached"}
        bundles = [{self._kind: float(width)}] * num_bundles
        if labels := labels_of(self.resources, use):
            options["bundle_label_selector"] = [labels] * num_bundles
        # PACK places as many bundles as possible on one node
        return placement_group(bundles, strategy="PACK", **options)

    def _placed(self, uses: Iterable[str], timeout_s: float) -> bool:
        """True if Ray places these groups within this time."""
        end_s = time.monotonic() + timeout_s
        return all(self._groups[use].wait(max(end_s - time.monotonic(), 0.0)) for use in uses)

    def _is_pending(self, use: str) -> bool:
        """True if this group was never placed, for example because its creator was killed."""
        return placement_group_table(self._groups[use])["state"] in ("PENDING", "PREPARED")

    def _fit(self, unplaced: Iterable[str], others: Iterable[PlacementGroup]) -> bool:
        """True if the cluster has enough GPUs for these groups once `others` are removed."""
        free = ray.available_resources().get(self._kind, 0.0)
        free += sum(
            bundle.get(self._kind, 0.0) for group in others for bundle in group.bundle_specs
        )
        pending = (self._shape(use) for use in unplaced if self._is_pending(use))
        return sum(bundles * width for bundles, width in pending) <= free

    def _options(self, use: str, bundle: int, *, share: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(
            self._groups[use], placement_group_bundle_index=bundle
        )
        resource = {"num_gpus": share, "num_cpus": 0} if self.on_gpus else {"num_cpus": share}
        return {**resource, "scheduling_strategy": strategy}

    def _bundles(self, use: str) -> list[Bundle]:
        """Return the bundles of a group, sorted by machine and GPU."""
        if use not in self._sorted_bundles:
            num_bundles, _ = self._shapes[use]
            if self.on_gpus:
                bundles = sort_bundles(self._locate_bundles(use, num_bundles))
            else:
                bundles = [Bundle(number, "", "") for number in range(num_bundles)]
            self._sorted_bundles[use] = bundles
        return self._sorted_bundles[use]

    def _locate_bundles(self, use: str, num_bundles: int) -> list[tuple[str, str]]:
        """Return (machine, GPU) of each bundle, from a task that runs in it."""
        remote: Any = ray.remote(_machine_and_gpu)
        probes = [
            remote.options(**self._options(use, bundle, share=PROBE_SHARE)).remote()
            for bundle in range(num_bundles)
        ]
        return ray.get(probes, timeout=self.resources.start_timeout_s)


def placed_groups() -> str:
    """Return the names of all placed groups of this Ray cluster, `rlpipe-<cluster>-…` for runs."""
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


def sort_bundles(gpus: Sequence[tuple[str, str]]) -> list[Bundle]:
    """Return bundles sorted by machine address and GPU.

    `gpus`: (address, name in CUDA_VISIBLE_DEVICES) of each bundle. Addresses and GPU numbers are
    compared as numbers; GPUs with other names (UUIDs) follow by name.
    """

    def key(bundle: int) -> tuple[int, int, str]:
        address, device = gpus[bundle]
        number = int(device) if device.isdecimal() else 1 << 30
        return int(ipaddress.ip_address(address)), number, device

    return [Bundle(bundle, *gpus[bundle]) for bundle in sorted(range(len(gpus)), key=key)]


def _machine_and_gpu() -> tuple[str, str]:
    return get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]
