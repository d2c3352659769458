"""Weights through files into an engine on a GPU (`pytest -m gpu -s`, which prints what each push
took)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.actors.engines.through_files import Push
from tests.sync.gpu import Bench, difference, make_model

LAYERS = 4
LARGEST = 0.4
"""Difference of a log-prob of some hundreds, of a model of random weights, in bf16: 0.13 was
seen."""
LEARNING_RATE = 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["disk", "delta"])
@torch.no_grad()
def test_an_engine_on_a_gpu_is_the_model_after_every_step(tmp_path: Path, transport: str):
    bench = Bench(LAYERS, tmp_path)
    shares = []
    with bench.engine("tensor") as server:
        model = make_model(LAYERS, seed=1)
        masters = {name: parameter.float() for name, parameter in model.named_parameters()}
        there = SimpleNamespace(model=model, model_dir=bench.model_dir, server=server)
        settings = {
            "update_weight_buffer_size": 2**28,
            "timeout_s": 300.0,
            "check_weight_update_equal": True,
        }
        push = Push(there, tmp_path, transport=transport, **settings)
        for version in range(1, 5):
            sent = asyncio.run(push(version))
            assert sent is not None and sent["unknown"] == {}
            print(
                f"{transport} {version}: {sent['bytes'] / 1e6:.1f} MB, {sent['share']:.1%} of all, "
                f"{sent['seconds']:.2f} s"
            )
            assert difference(server.url, model) < LARGEST
            shares.append(sent["share"])
            for name, parameter in model.named_parameters():
                masters[name] += LEARNING_RATE * torch.randn_like(masters[name]).sign()
                parameter.copy_(masters[name])
        assert difference(server.url, make_model(LAYERS, seed=2)) > 2 * LARGEST, (
            "another model is another"
        )
    assert all((share < 0.1) is (transport == "delta") for share in shares[1:])
