"""Which trainer ranks lie on the GPUs of which engine (rlpipe.actors.trainer.sending)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.trainer.pushing import choose_transports
from rlpipe.actors.trainer.sending import places
from rlpipe.config.model import ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import ConfigError

ENGINES: Any = [SimpleNamespace(number=number, url=f"u{number}") for number in range(3)]


def resources(**keywords: Any) -> ResourcesConfig:
    return ResourcesConfig(
        **{
            "actor_num_gpus_per_node": 4,
            "rollout_num_gpus": 6,
            "rollout_num_gpus_per_engine": 2,
            **keywords,
        }
    )


def test_engine_j_lies_on_the_ranks_from_j_times_its_width_on_and_the_last_one_on_none():
    assert places(ENGINES, ["u1", "u0", "u2"], resources(colocate=True)) == {
        "u0": [0, 1],
        "u1": [2, 3],
    }


def test_only_engines_that_are_pushed_to_have_places():
    assert places(ENGINES, ["u1"], resources(colocate=True)) == {"u1": [2, 3]}
    assert places(ENGINES, ["u1"], resources()) == {}


def test_shared_memory_serves_the_engines_on_our_gpus_and_another_transport_the_rest():
    tensor = SyncConfig()
    distributed = SyncConfig(transport="distributed")
    assert list(choose_transports(["a", "b"], tensor, {})) == [("tensor", ["a", "b"])]
    assert list(choose_transports(["a", "b"], distributed, {})) == [("distributed", ["a", "b"])]
    other = "distributed" if platform.CUDA_FOUND else "tensor"
    assert list(choose_transports(["a", "b"], tensor, {"b": [0]})) == [
        ("ipc", ["b"]),
        (other, ["a"]),
    ]
    with pytest.raises(ConfigError, match="on the trainer's"):
        list(choose_transports(["a", "b"], distributed, {"b": [0]}))
