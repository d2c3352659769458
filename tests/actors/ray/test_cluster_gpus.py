"""The GPUs of a Ray cluster (rlpipe.actors.ray.cluster_gpus)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.gpu_memory import GIB
from rlpipe.actors.ray import cluster_gpus
from rlpipe.actors.ray.cluster_gpus import smallest_gpu_bytes
from rlpipe.errors import DeadlineExceeded


async def test_memory_is_that_of_the_smallest_gpu_of_live_nodes(monkeypatch: pytest.MonkeyPatch):
    nodes: list[dict[str, Any]] = []
    monkeypatch.setattr(cluster_gpus.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster_gpus, "smallest_gpu_mib", lambda: 81920)
    assert await smallest_gpu_bytes(5.0) is None
    here = {"NodeManagerAddress": cluster_gpus.get_node_ip_address(), "Resources": {"GPU": 8.0}}
    nodes += [{**here, "Alive": False}, {**here, "Alive": True, "Resources": {"CPU": 8.0}}]
    assert await smallest_gpu_bytes(5.0) is None
    nodes.append({**here, "Alive": True})
    assert await smallest_gpu_bytes(5.0) == 80 * GIB


async def test_a_node_that_does_not_answer_about_its_gpus_is_named(monkeypatch: pytest.MonkeyPatch):
    node = {"NodeID": "ab" * 28, "NodeManagerAddress": "192.0.2.1", "Alive": True}
    monkeypatch.setattr(cluster_gpus.ray, "nodes", lambda: [node | {"Resources": {"GPU": 8.0}}])
    probe = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=asyncio.Future))
    monkeypatch.setattr(cluster_gpus.ray, "remote", lambda _: probe)
    with pytest.raises(DeadlineExceeded, match="GPU memory of Ray's nodes"):
        await smallest_gpu_bytes(0.05)
