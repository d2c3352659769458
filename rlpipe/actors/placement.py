"""Where actors run: one placement group for all trainer ranks and engines of a cluster.

A bundle is one GPU, or one CPU where the cluster has no GPU. Trainer rank i gets bundle i; engine j the bundles after the
ranks, `rollout_num_gpus_per_engine` each.

Not here: sharing one GPU between trainer and engine (colocation).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError


class Placement:
    """The bundles of one cluster."""

    def __init__(self, resources: ResourcesConfig, *, with_engines: bool) -> None:
        self.resources = resources
        self.on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.num_bundles = resources.trainer_ranks + (resources.rollout_num_gpus if with_engines else 0)
        self._group: PlacementGroup | None = None

    def trainer(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank."""
        return self._options(rank, 1)

    def engine(self, number: int) -> dict[str, Any]:
        """Ray options of an engine. On GPUs its server process sees the devices of its own bundles."""
        width = self.resources.rollout_num_gpus_per_engine
        return self._options(self.resources.trainer_ranks + number * width, 1)

    def _options(self, bundle: int, amount: float) -> dict[str, Any]:
        kind = {"num_gpus": amount, "num_cpus": 0} if self.on_gpus else {"num_cpus": amount}
        strategy = PlacementGroupSchedulingStrategy(self._ready_group(), placement_group_bundle_index=bundle)
        return {**kind, "scheduling_strategy": strategy}

    def _ready_group(self) -> PlacementGroup:
        if self._group is None:
            bundle = {"GPU": 1.0} if self.on_gpus else {"CPU": 1.0}
            self._group = placement_group([bundle] * self.num_bundles, strategy="PACK", lifetime="detached")
            if not self._group.wait(self.resources.start_timeout_s):
                raise ResourceError(
                    "the cluster has not enough room",
                    where="resources",
                    found=f"{ray.cluster_resources()}",
                    expected=f"{self.num_bundles} × {bundle} for {self.resources.trainer_ranks} trainer ranks and the engines",
                    do="ask for fewer ranks or engines, or join a larger cluster with resources.ray_address",
                )
        return self._group
