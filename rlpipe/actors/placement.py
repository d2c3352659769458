"""Where actors run: two named placement groups of a cluster, one for its trainer ranks and one for its engines.

A bundle is one GPU, or one CPU where the cluster has no GPU. Trainer rank i gets bundle i of the first; engine j
bundle j of the second, which is `rollout_num_gpus_per_engine` wide. They are named and outlive the process that made them, so
that the next run of the cluster, or a retry, takes no second set.

Not here: sharing one GPU between trainer and engine (colocation).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util import get_placement_group
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError


class Placement:
    """The bundles of one cluster; a group is made when its first actor is."""

    def __init__(self, cluster: str, resources: ResourcesConfig) -> None:
        self.cluster, self.resources = cluster, resources
        self.on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self._groups: dict[str, PlacementGroup] = {}

    def trainer(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank."""
        return self._options("trainer", self.resources.trainer_ranks, rank, width=1)

    def engine(self, number: int) -> dict[str, Any]:
        """Ray options of an engine: its server process sees all GPUs of its bundle."""
        return self._options("engines", self.resources.num_engines, number, width=self.resources.rollout_num_gpus_per_engine)

    def remove(self) -> None:
        """Give the places back, once the actors are gone."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    def _options(self, what: str, size: int, bundle: int, *, width: int) -> dict[str, Any]:
        if what not in self._groups:
            self._groups[what] = self._found_or_made(f"rlpipe-{self.cluster}-{what}", [self._bundle(width)] * size)
        strategy = PlacementGroupSchedulingStrategy(self._groups[what], placement_group_bundle_index=bundle)
        kind = {"num_gpus": width, "num_cpus": 0} if self.on_gpus else {"num_cpus": width}
        return {**kind, "scheduling_strategy": strategy}

    def _bundle(self, width: int) -> dict[str, float]:
        return {"GPU" if self.on_gpus else "CPU": float(width)}

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
                found=f"{ray.cluster_resources()}, of which free {ray.available_resources()}",
                expected=f"{bundles} for the placement group {name}",
                do="ask for fewer ranks or engines, wait for other runs, or join a larger cluster with resources.ray_address",
            )
        return group
