"""An unrelated process reads tensors in shared memory (rlpipe.sync.transports.bucket_memory)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlpipe.sync.transports import bucket_memory
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.bucket_memory import SharedBuffer, references
from rlpipe.sync.transports.tensor import TensorTransport
from rlpipe.system.ports import is_loopback
from tests.live_engine import make_model
from tests.sync.setups import transport_setup

READ = """
import pickle, sys, torch
for name, tensor in pickle.loads(sys.stdin.buffer.read()):
    print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item())
"""


def read_in_another_process(pickled: bytes) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-c", READ], input=pickled, capture_output=True, check=True, timeout=120
    )
    return answer.stdout.decode().splitlines()


def test_another_process_reads_each_placed_bucket():
    buffer = SharedBuffer()
    for scale in (1.0, 2.0):
        bucket = [
            ("a", torch.full((3, 5), scale)),
            ("b", torch.full((7,), scale, dtype=torch.bfloat16)),
            ("c", torch.tensor(scale)),
        ]
        placed = buffer.place(bucket)
        assert placed is not None
        assert read_in_another_process(references(placed)) == [
            f"a torch.float32 (3, 5) {15 * scale}",
            f"b torch.bfloat16 (7,) {7 * scale}",
            f"c torch.float32 () {scale}",
        ]


def test_each_reader_gets_its_own_reference_and_the_block_stays():
    buffer = SharedBuffer()
    for scale in (1.0, 2.0, 3.0):
        placed = buffer.place([("a", torch.full((4,), scale))])
        assert placed is not None
        for _ in range(3):
            assert read_in_another_process(references(placed)) == [
                f"a torch.float32 (4,) {4 * scale}"
            ]


def test_without_shared_memory_no_bucket_is_placed(monkeypatch, tmp_path):
    monkeypatch.setattr(bucket_memory, "SHARED_MEMORY", tmp_path / "none")
    assert SharedBuffer().place([("a", torch.ones(4))]) is None


def test_the_sharing_strategy_of_the_process_is_restored():
    before = torch.multiprocessing.get_sharing_strategy()
    placed = SharedBuffer().place([("a", torch.ones(4))])
    assert placed is not None
    references(placed)
    assert torch.multiprocessing.get_sharing_strategy() == before


@pytest.mark.parametrize(
    ("url", "is_local"),
    [("http://127.0.0.1:80", True), ("http://[::1]:80", True), ("http://10.0.0.7:80", False)],
)
def test_only_loopback_addresses_count_as_this_machine(url, is_local):
    assert is_loopback(url) is is_local


@pytest.mark.integration
def test_bytes_go_over_http_without_shared_memory(live, monkeypatch, tmp_path):
    monkeypatch.setattr(bucket_memory, "SHARED_MEMORY", tmp_path / "none")
    live.model = make_model(tmp_path / "other", seed=99)
    transport = TensorTransport(transport_setup(live.model_dir))
    report = transport.send(live.model.state_dict().items(), Push("b@0@bytes", [live.server.url]))
    assert report.buckets > 1
