"""Trainer ranks on the GPUs of each engine of a push (rlpipe.actors.weight_sender)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlpipe.actors.weight_sender import ClusterState, WeightSender
from rlpipe.config.model import ResourcesConfig

ENGINES: Any = [SimpleNamespace(number=number, url=f"u{number}") for number in range(3)]


def shared_ranks(urls: list[str], **settings: Any) -> dict[str, list[int]]:
    resources = ResourcesConfig(
        **{
            "actor_num_gpus_per_node": 4,
            "rollout_num_gpus": 6,
            "rollout_num_gpus_per_engine": 2,
            **settings,
        }
    )
    spec: Any = SimpleNamespace(config=SimpleNamespace(resources=resources))
    fleet: Any = SimpleNamespace(engines=ENGINES)
    return WeightSender("cluster", ClusterState(spec=spec, fleet=fleet))._shared_ranks(urls)


def test_engine_j_shares_the_ranks_from_j_times_its_width_on_and_the_last_engine_shares_none():
    assert shared_ranks(["u1", "u0", "u2"], colocate=True) == {"u0": [0, 1], "u1": [2, 3]}


def test_only_colocated_engines_of_the_push_share_ranks():
    assert shared_ranks(["u1"], colocate=True) == {"u1": [2, 3]}
    assert shared_ranks(["u1"]) == {}
