"""The GPUs of a Ray cluster, equal for all processes of one epoch of a run."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import ray
from ray.experimental import internal_kv
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlpipe.actors.ray.calls import gather
from rlpipe.engines.sglang.server import smallest_gpu_mib

RECORDS = "rlpipe-gpus"
"""Namespace of the records of `cluster_gpus` in Ray's own store, which ends with that Ray."""


class ClusterGpus(NamedTuple):
    """The GPUs of a Ray cluster from which a run's layout and memory follow."""

    of_nodes: tuple[int, ...]
    """GPUs of each node that has any."""
    smallest_bytes: int | None
    """Memory of the smallest GPU; None: no GPU."""


async def cluster_gpus(epoch: str, deadline_s: float) -> ClusterGpus:
    """Return the GPUs of the Ray cluster as the first process of an epoch found them.

    All processes of a run decide from them, so that they start the same actors. Nodes that come or
    go count for the next epoch, or the next Ray. `epoch`: `Epoch.identity`. Raises: as
    `smallest_gpu_bytes`.
    """
    if (recorded := await asyncio.to_thread(_recorded, epoch)) is not None:
        return recorded
    nodes = await asyncio.to_thread(gpus_of_nodes)
    found = ClusterGpus(tuple(nodes), await smallest_gpu_bytes(deadline_s))
    return await asyncio.to_thread(_first_recorded, epoch, found)


def _first_recorded(epoch: str, found: ClusterGpus) -> ClusterGpus:
    # Without `overwrite` the first of two concurrent processes wins.
    value = json.dumps(found)
    internal_kv._internal_kv_put(epoch, value, overwrite=False, namespace=RECORDS)
    return _recorded(epoch) or found


def _recorded(epoch: str) -> ClusterGpus | None:
    value = internal_kv._internal_kv_get(epoch, namespace=RECORDS)
    if value is None:
        return None
    nodes, smallest_bytes = json.loads(value)
    return ClusterGpus(tuple(nodes), smallest_bytes)


def gpus_of_nodes() -> list[int]:
    """Return the number of GPUs of each live node of the Ray cluster that has any."""
    return [int(node["Resources"]["GPU"]) for node in _gpu_nodes()]


def _gpu_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]


async def smallest_gpu_bytes(deadline_s: float) -> int | None:
    """Return the memory of the smallest GPU of the Ray cluster; None without GPUs.

    Raises: as `gather`, if a node does not answer.
    """
    nodes = await asyncio.to_thread(_gpu_nodes)
    if not nodes:
        return None
    # A task starts a process on its node, which takes seconds.
    if {node["NodeManagerAddress"] for node in nodes} == {get_node_ip_address()}:
        sizes = [await asyncio.to_thread(smallest_gpu_mib)]
    else:
        probe: Any = ray.remote(smallest_gpu_mib)
        strategies = (NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes)
        probes = [
            probe.options(num_cpus=0, scheduling_strategy=strategy).remote()
            for strategy in strategies
        ]
        sizes = await gather(probes, where="GPU memory of Ray's nodes", deadline_s=deadline_s)
    return min((size * 1024**2 for size in sizes if size is not None), default=None)
