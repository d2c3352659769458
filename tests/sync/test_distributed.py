"""Weights broadcast into real engines over gloo."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import SyncError
from rlpipe.sync.distributed import DistributedTransport
from tests.live_engine import START_S, log_probs, make_model, make_server

CPU = torch.device("cpu")
TOKENS = [5, 9, 20, 31]


@pytest.fixture
def transport(live) -> Iterator[DistributedTransport]:
    made = _transport(live.model_dir)
    yield made
    made.close()


def _transport(model_dir: Path, **keywords) -> DistributedTransport:
    return DistributedTransport(model_dir, **{"buffer_size_bytes": 40_000, "timeout_s": 60.0, "device": CPU, **keywords})


def _require_equal(url: str, model) -> None:
    async def score() -> list[float]:
        async with Engine(url) as engine:
            return (await engine.score([TOKENS]))[0]

    np.testing.assert_allclose(asyncio.run(score()), log_probs(model, TOKENS[:1], TOKENS[1:]), atol=1e-4)


@pytest.mark.integration
def test_after_a_broadcast_the_engine_is_the_new_model_and_the_group_is_kept(live, transport, tmp_path):
    for seed in (21, 22):
        live.model = make_model(tmp_path / str(seed), seed=seed)
        report = transport.push(live.model.state_dict().items(), [live.server.url], f"b@{seed}@x")
        assert report.engines == (live.server.url,) and report.buckets > 1
        assert report.tensors == len(transport.expected)
        _require_equal(live.server.url, live.model)
        assert transport._group is not None
        port = transport._group.port if seed == 21 else port  # noqa: F821 - set in the first round
        assert transport._group.port == port


@pytest.mark.integration
def test_a_broadcast_can_be_checked_against_random_numbers(live, transport, tmp_path):
    live.model = make_model(tmp_path / "other", seed=23)
    report = transport.push(live.model.state_dict().items(), [live.server.url], "b@0@checked", check=True)
    assert report.tensors == 2 * len(transport.expected), "each is sent twice"
    _require_equal(live.server.url, live.model)


@pytest.mark.integration
def test_a_trainer_that_comes_after_one_that_died_ends_the_group_it_left(live, tmp_path):
    first, second = _transport(live.model_dir), _transport(live.model_dir)
    first.push(live.model.state_dict().items(), [live.server.url], "b@0@first")
    live.model = make_model(tmp_path / "other", seed=24)
    second.push(live.model.state_dict().items(), [live.server.url], "b@0@second")
    _require_equal(live.server.url, live.model)
    first.close()
    second.close()
