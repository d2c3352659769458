"""Handles to packed memory, read by real engines and across ranks. Without CUDA the memory is shared by name."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
import torch

from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.handles import flattened_bucket
from rlpipe.errors import SyncError
from rlpipe.sync.flat import flatten
from rlpipe.sync.ipc import IpcTransport
from rlpipe.sync.shared import by_name, shared_block
from tests.live_engine import log_probs, make_model

CPU = torch.device("cpu")
TOKENS = [5, 9, 20, 31]
NOWHERE = "http://127.0.0.1:9"


def _transport(model_dir, **keywords) -> IpcTransport:
    return IpcTransport(model_dir, **{"buffer_size_bytes": 40_000, "timeout_s": 60.0, "device": CPU, **keywords})


def _scores(url: str) -> list[float]:
    async def score() -> list[float]:
        async with Engine(url) as engine:
            return (await engine.score([TOKENS]))[0]

    return asyncio.run(score())


@pytest.mark.integration
@pytest.mark.parametrize("check", [False, True])
def test_after_a_push_of_handles_the_engine_is_the_new_model(live, tmp_path, check):
    model = make_model(tmp_path / "other", seed=31 + check)
    transport = _transport(live.model_dir)
    transport.places = {live.server.url: [0]}
    report = transport.push(model.state_dict().items(), [live.server.url], f"b@{check}@handles", check=check)
    live.model = model
    assert report.tensors == len(transport.expected) * (1 + check) and report.buckets > 2
    np.testing.assert_allclose(_scores(live.server.url), log_probs(model, TOKENS[:1], TOKENS[1:]), atol=1e-4)
    assert not transport._slots, "the memory is given back"


@pytest.mark.integration
def test_a_push_of_handles_that_fails_reads_all_tensors_and_the_next_one_succeeds(live):
    transport, read = _transport(live.model_dir), []
    transport.places = {live.server.url: [0], NOWHERE: [0]}

    def tensors():
        for name, tensor in live.model.state_dict().items():
            read.append(name)
            yield name, tensor

    with pytest.raises(SyncError, match="arrived nowhere"):
        transport.push(tensors(), [NOWHERE], "b@0@nowhere")
    assert read == list(live.model.state_dict())
    report = transport.push(tensors(), [live.server.url], "b@0@again")
    assert report.engines == (live.server.url,)


def test_an_engine_without_a_place_is_refused_before_anything_is_sent(tmp_path):
    make_model(tmp_path, seed=0)
    with pytest.raises(SyncError, match="arrived nowhere"):
        _transport(tmp_path).push([], [NOWHERE], "b@0@x")


def test_a_flat_bucket_of_mixed_dtypes_is_cut_up_again_as_sglang_does():
    bucket = [
        ("a.weight", torch.arange(5).to(torch.float8_e4m3fn)),
        ("a.weight_scale_inv", torch.tensor([[0.5]])),
        ("b", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
        ("c", torch.tensor(2.0)),
    ]
    block = shared_block(1000)
    assert block is not None
    flat = flatten(bucket, CPU, block)
    parts = [(part.name, part.dtype, part.shape, part.start, part.end) for part in flat.parts]
    with by_name():
        found = pickle.loads(flattened_bucket(flat.memory, parts))
    for meta in found["metadata"]:
        tensor = found["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        expected = dict(bucket)[meta.name]
        assert tensor.dtype == expected.dtype and torch.equal(tensor.float(), expected.float())
    assert [(name, tensor.dtype) for name, tensor in flat.tensors()] == [(part.name, part.dtype) for part in flat.parts]
