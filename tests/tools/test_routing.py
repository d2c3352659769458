"""Measure the part of routing in differences of engine and trainer (tools.routing)."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.config.model import EngineConfig
from tools.routing import Comparison, compare, make_model


def test_the_table_has_both_routings_and_the_share_of_other_experts():
    found = Comparison(4, np.array([0.0, 1.0, 2.0, 3.0]), np.zeros(4), 0.25, (100.0, 90.0))
    free, replayed, other, speed = (line.split() for line in found.table().splitlines()[1:])
    assert (
        free[-3] == "1.500000"
        and replayed[-1] == "0.000000"
        and other[-2] == "25.000"
        and speed[-1] == "0.900"
    )


@pytest.mark.long
@pytest.mark.integration
def test_in_float32_engine_and_trainer_agree_in_routing_and_in_log_probs(tmp_path):
    make_model(tmp_path, "cpu")
    found = compare(tmp_path, device="cpu", samples=4, tokens=24, engine=EngineConfig())
    assert (
        found.tokens == 96
        and found.other_experts == 0
        and found.free.max() < 1e-4
        and found.replayed.max() < 1e-4
    )


@pytest.mark.gpu
def test_on_a_gpu_replay_removes_differences_from_routing(tmp_path):
    make_model(tmp_path, "cuda")
    settings = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.3,
    }
    found = compare(
        tmp_path, device="cuda", samples=32, tokens=128, engine=EngineConfig(sglang=settings)
    )
    print(found.table())
    assert found.tokens == 32 * 128 and 0 < found.other_experts < 0.5
    assert found.replayed.mean() < found.free.mean()
