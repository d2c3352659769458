"""An unrelated process reads tensors in shared memory (rlpipe.sync.transports.bucket_memory)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile

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
while size := int.from_bytes(sys.stdin.buffer.read(8), "big"):
    for name, tensor in pickle.loads(sys.stdin.buffer.read(size)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item())
    print(flush=True)
"""


class Reader:
    """A process that reads tensors by their references."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", READ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self, pickled: bytes) -> list[str]:
        """Return one line for each tensor."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(len(pickled).to_bytes(8, "big") + pickled)
        self._process.stdin.flush()
        lines = iter(self._process.stdout.readline, b"")
        return [line.decode().rstrip() for line in takewhile(bytes.strip, lines)]

    def end(self) -> None:
        _, errors = self._process.communicate(timeout=30)
        assert (self._process.returncode, errors) == (0, None)


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Reader]]:
    made = [Reader(), Reader()]
    yield made
    for reader in made:
        reader.end()


def test_another_process_reads_each_placed_bucket(readers: list[Reader]):
    buffer = SharedBuffer()
    for scale in (1.0, 2.0):
        bucket = [
            ("a", torch.full((3, 5), scale)),
            ("b", torch.full((7,), scale, dtype=torch.bfloat16)),
            ("c", torch.tensor(scale)),
        ]
        placed = buffer.place(bucket)
        assert placed is not None
        assert readers[0].read(references(placed)) == [
            f"a torch.float32 (3, 5) {15 * scale}",
            f"b torch.bfloat16 (7,) {7 * scale}",
            f"c torch.float32 () {scale}",
        ]


def test_each_reader_gets_its_own_reference_and_the_block_stays(readers: list[Reader]):
    buffer = SharedBuffer()
    for scale in (1.0, 2.0, 3.0):
        placed = buffer.place([("a", torch.full((4,), scale))])
        assert placed is not None
        for reader in (*readers, readers[0]):
            assert reader.read(references(placed)) == [f"a torch.float32 (4,) {4 * scale}"]


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
