"""Real engines and other ranks read handles to packed memory (rlpipe.sync.transports.ipc).

Without CUDA the memory is shared by name."""

from __future__ import annotations

import asyncio
import os
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import SyncError
from rlpipe.sync.session import Session
from rlpipe.sync.tensors import expected_shapes
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.bucket_memory import SHARED_MEMORY, flatten, shared_block
from rlpipe.sync.transports.ipc import IpcTransport, bucket_handle
from tests.live_engine import log_probs, make_model
from tests.sync.setups import transport_setup

TOKENS = [5, 9, 20, 31]
NOWHERE = "http://127.0.0.1:9"
RANKS = {"a": [0], "b": [1]}


def both_ranks(rank: int, world_size: int, port: int, model_dir: str) -> list:
    """Pack two passes, read every handle on rank 0, then end a second push after one bucket."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    transport = _transport(model_dir, rank=rank, world_size=world_size)
    model = Qwen3ForCausalLM.from_pretrained(model_dir)
    tensors = {name: tensor + rank for name, tensor in model.state_dict().items()}
    if rank:
        found = [
            transport.send(
                tensors.items(), Push("b@0@x", engine_ranks=RANKS, check=True)
            ).size_bytes,
            transport.send(tensors.items(), Push("b@0@y", engine_ranks=RANKS)).size_bytes,
        ]
    else:
        found = [_read(transport, tensors, 2), _end_early(transport, tensors)]
    dist.destroy_process_group()
    return found


def _read(transport: IpcTransport, tensors: dict, passes: int) -> list[bool]:
    right = []
    seen = 0
    for handles, _ in transport.packed(
        iter(tensors.items()), Push("b@0@x", engine_ranks=RANKS, check=True)
    ):
        for number, handle in enumerate(handles.by_rank):
            sent = pickle.loads(handle)
            for meta in sent["metadata"]:
                got = (
                    sent["flattened_tensor"][meta.start_idx : meta.end_idx]
                    .view(meta.dtype)
                    .reshape(meta.shape)
                )
                right.append(torch.equal(got, tensors[meta.name] + number))
        seen += handles.tensors
        transport._num_loaded += 1
    assert seen == passes * len(transport.expected)
    return right


def with_an_engine_on_one_rank(
    rank: int, world_size: int, port: int, model_dir: str
) -> list[tuple[int, int]]:
    """Push three times to an engine on the GPU of rank 1.

    Returns for each push the bytes of handles that no engine opens, and the number of shared memory
    files that this process has more than before."""

    def memory_files() -> int:
        return len(list(SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")))

    before = memory_files()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    transport = _transport(model_dir, rank=rank, world_size=world_size)
    push = Push("b@0@x", engine_ranks={"b": [1]})
    tensors = Qwen3ForCausalLM.from_pretrained(model_dir).state_dict()
    found = []
    for _ in range(3):
        if rank:
            transport.send(tensors.items(), push)
        unread = 0
        for handles, _ in () if rank else transport.packed(iter(tensors.items()), push):
            unread += len(handles.by_rank[0])
            pickle.loads(handles.by_rank[1])
            transport._num_loaded += 1
        dist.barrier()
        found.append((unread, memory_files() - before))
    dist.destroy_process_group()
    return found


def _end_early(transport: IpcTransport, tensors: dict) -> list[int]:
    lengths = []
    for handles, _ in transport.packed(iter(tensors.items()), Push("b@0@y", engine_ranks=RANKS)):
        lengths.append(len(handles.by_rank))
        transport.finish()
    return lengths


def _transport(model_dir, **keywords) -> IpcTransport:
    return IpcTransport(transport_setup(model_dir, **keywords))


def _scores(url: str) -> list[float]:
    async def score() -> list[float]:
        async with Engine(url) as engine:
            return (await engine.score([TOKENS]))[0]

    return asyncio.run(score())


@pytest.mark.integration
@pytest.mark.parametrize("check", [False, True])
def test_after_a_push_of_handles_the_engine_computes_as_the_new_model(live, tmp_path, check):
    model = make_model(tmp_path / "other", seed=31 + check)
    transport = _transport(live.model_dir)
    report = transport.send(
        model.state_dict().items(),
        Push(
            f"b@{check}@handles",
            [live.server.url],
            engine_ranks={live.server.url: [0]},
            check=check,
        ),
    )
    live.model = model
    assert report.tensors == len(transport.expected) * (1 + check) and report.buckets > 2
    np.testing.assert_allclose(
        _scores(live.server.url), log_probs(model, TOKENS[:1], TOKENS[1:]), atol=1e-4
    )
    assert not transport._slots, "the memory is released"


@pytest.mark.integration
def test_a_failed_push_of_handles_reads_all_tensors_and_the_next_push_succeeds(live):
    transport = _transport(live.model_dir)
    read = []
    engine_ranks = {live.server.url: [0], NOWHERE: [0]}

    def tensors():
        for name, tensor in live.model.state_dict().items():
            read.append(name)
            yield name, tensor

    with pytest.raises(SyncError, match="arrived nowhere"):
        transport.send(tensors(), Push("b@0@nowhere", [NOWHERE], engine_ranks=engine_ranks))
    assert read == list(live.model.state_dict())
    report = transport.send(
        tensors(), Push("b@0@again", [live.server.url], engine_ranks=engine_ranks)
    )
    assert report.engines == (live.server.url,)


def test_an_engine_on_other_gpus_is_refused_before_the_push(tmp_path):
    make_model(tmp_path, seed=0)

    async def connect() -> None:
        async with Engine(NOWHERE) as engine:
            await _transport(tmp_path).connect(Session([engine], "b@0@x"))

    with pytest.raises(SyncError, match="shares no GPU with the trainer"):
        asyncio.run(connect())


def test_a_flat_bucket_of_mixed_dtypes_is_unpacked_as_in_sglang():
    bucket = [
        ("a.weight", torch.arange(5).to(torch.float8_e4m3fn)),
        ("a.weight_scale_inv", torch.tensor([[0.5]])),
        ("b", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
        ("c", torch.tensor(2.0)),
    ]
    block = shared_block(1000)
    assert block is not None
    flat = flatten(bucket, torch.device("cpu"), block)
    found = pickle.loads(bucket_handle(flat))
    for meta in found["metadata"]:
        tensor = (
            found["flattened_tensor"][meta.start_idx : meta.end_idx]
            .view(meta.dtype)
            .reshape(meta.shape)
        )
        expected = dict(bucket)[meta.name]
        assert tensor.dtype == expected.dtype and torch.equal(tensor.float(), expected.float())
    assert [(name, tensor.dtype) for name, tensor in flat.tensors()] == [
        (part.name, part.dtype) for part in flat.parts
    ]


@pytest.mark.parametrize(("ranks", "slots"), [([0], 2), ([0, 1], 3)])
def test_an_engine_of_several_ranks_can_read_a_bucket_until_it_answers_to_the_next(
    tmp_path, ranks: list[int], slots: int
):
    model = make_model(tmp_path, seed=0)
    transport = _transport(tmp_path)
    opened: list[tuple[torch.Tensor, torch.Tensor]] = []
    for handles, last in transport.packed(
        iter(model.state_dict().items()), Push("b@0@x", engine_ranks={"a": ranks})
    ):
        read = pickle.loads(handles.by_rank[0])["flattened_tensor"]
        opened.append((read, read.clone()))
        for then, now in opened[-slots:]:
            assert torch.equal(then, now)
        transport._num_loaded = len(opened) - 1
        if last:
            transport.finish()
    assert len(opened) > 3 and len(transport._slots) == slots


@pytest.mark.integration
def test_each_of_two_ranks_packs_its_own_memory_and_stops_when_the_push_ends(tmp_path, two_ranks):
    make_model(tmp_path, seed=0)
    (read, lengths), assisted = two_ranks.run(both_ranks, str(tmp_path))
    assert all(read) and len(read) == 2 * 2 * len(expected_shapes(tmp_path))
    assert lengths[0] == 2 and set(lengths[1:]) == {0}, "no rank packs after the end of a push"
    assert assisted[0] == 2 * assisted[1]


@pytest.mark.integration
def test_a_rank_without_engine_makes_no_handles_and_a_push_leaves_no_memory(tmp_path, two_ranks):
    make_model(tmp_path, seed=0)
    found = two_ranks.run(with_an_engine_on_one_rank, str(tmp_path))
    assert found == [[(0, 0)] * 3] * 2
