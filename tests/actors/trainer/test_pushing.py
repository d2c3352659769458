"""The choice of transports for a push (rlpipe.actors.trainer.pushing)."""

from __future__ import annotations

import pytest

from rlpipe.actors.trainer.pushing import choose_transports
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import ConfigError


def test_engines_on_the_trainers_gpus_get_weights_over_ipc_and_the_others_over_another_transport():
    tensor = SyncConfig()
    distributed = SyncConfig(transport="distributed")
    assert list(choose_transports(["a", "b"], tensor, {})) == [("tensor", ["a", "b"])]
    assert list(choose_transports(["a", "b"], distributed, {})) == [("distributed", ["a", "b"])]
    other = "distributed" if platform.CUDA_FOUND else "tensor"
    assert list(choose_transports(["a", "b"], tensor, {"b": [0]})) == [
        ("ipc", ["b"]),
        (other, ["a"]),
    ]
    with pytest.raises(ConfigError, match="share the trainer's GPUs"):
        list(choose_transports(["a", "b"], distributed, {"b": [0]}))
