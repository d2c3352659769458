"""Adapters alone are pushed into a real engine (rlpipe.sync.transports.adapter)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rlpipe.config.train import LoraConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import SyncError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.sync.transports.adapter import AdapterTransport
from rlpipe.sync.transports.base import Push
from tests.engine_template import forked_engines
from tests.engines.megatron.lora_jobs import plain_adapters, with_plain_adapters
from tests.live_engine import START_S, VOCAB_SIZE, log_probs, make_model, make_server
from tests.sync.setups import transport_setup

LORA = LoraConfig(rank=4, alpha=8)
PROMPT = [5, 9, 20, 31]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the model in `tmp_path / "model"`, with room for adapters."""
    make_model(tmp_path / "model", seed=0)
    made = make_server(tmp_path / "model", tmp_path / "server.log", lora=LORA)
    with forked_engines():
        made.start()
    yield made
    made.stop()


def pushed(model: torch.nn.Module, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Set random adapters; return them by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    adapters = plain_adapters(model)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return [(f"base_model.model.model.layers.{name}.weight", p) for name, p in adapters.items()]


async def answers(url: str) -> tuple[list[list[float]], list[list[float]], list]:
    """Return the scores of one sequence, of two in a request, and sampled responses."""
    async with Engine(url) as engine:
        single = await engine.score([PROMPT])
        both = await engine.score([PROMPT, [*PROMPT, 7]])
    async with GenerateClient(url, vocab_size=VOCAB_SIZE, deadline_s=30) as client:
        return single, both, await client.generate([5, 6], {"max_new_tokens": 4}, n=2)


@pytest.mark.integration
def test_engines_compute_with_the_pushed_adapters_alone(server: Server, tmp_path: Path):
    plain: Any = with_plain_adapters(make_model(tmp_path / "again", seed=0), LORA)
    server.wait_ready(START_S)
    base = log_probs(plain, PROMPT[:1], PROMPT[1:])
    ((before,), _, _) = asyncio.run(answers(server.url))
    np.testing.assert_allclose(before, base, atol=1e-4)
    transport = AdapterTransport(transport_setup(tmp_path / "model", lora=LORA))
    for version in (1, 2):
        stamp = f"b@{version}@digest"
        adapters = pushed(plain, version)
        report = transport.send(adapters, Push(stamp, [server.url]))
        assert (report.tensors, report.engines) == (len(adapters), (server.url,))
        assert report.size_bytes == sum(tensor.nbytes for _, tensor in adapters)
        expected = log_probs(plain, PROMPT[:1], PROMPT[1:])
        assert np.abs(np.subtract(expected, base)).max() > 0.1
        # The prompts are in the prefix cache of the version before.
        single, both, sampled = asyncio.run(answers(server.url))
        for scores in (*single, both[0], both[1][:-1]):
            np.testing.assert_allclose(scores, expected, atol=1e-4)
        for generation in sampled:
            assert [name for _, name in generation.weight_versions] == [stamp]
            np.testing.assert_allclose(
                generation.log_probs, log_probs(plain, [5, 6], generation.response_ids), atol=1e-4
            )
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [each["id"] for each in models if each.get("parent")] == [stamp]


@pytest.mark.integration
def test_an_engine_without_adapters_is_named(live):
    transport = AdapterTransport(transport_setup(live.model_dir, lora=LORA))
    model = with_plain_adapters(make_model(live.model_dir.parent / "other", seed=3), LORA)
    with pytest.raises(SyncError, match="LoRA is not enabled"):
        transport.send(pushed(model, 1), Push("b@1@digest", [live.server.url]))
