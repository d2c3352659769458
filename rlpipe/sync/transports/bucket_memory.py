"""Buckets in one block of memory: flat bytes, and memory shared with engines of this machine.

`flatten` copies a bucket into one tensor of bytes, the form of `distributed`, `ipc` and `staged`.
`SharedBuffer` and `references` give engines on this machine tensors in shared memory, for `tensor`.
A reference is a pickle of a few kilobytes in the form that torch uses between processes
(`file_system` sharing). Half a gigabyte takes a tenth of the time that its bytes take in JSON.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor

from rlpipe.sync.tensors import Bucket
from rlpipe.system import leftovers

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
FREE_SPACE_FACTOR = 1.1


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Position of one tensor in a flat bucket, in bytes: `start` inclusive, `end` exclusive."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in torch, for example `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """A bucket as bytes. `memory`: uint8 [bytes]."""

    parts: tuple[FlatPart, ...]
    memory: Tensor

    def tensors(self) -> Bucket:
        """Return the tensors of the bucket as views."""
        return [
            (part.name, self.memory[part.start : part.end].view(part.dtype).reshape(part.shape))
            for part in self.parts
        ]


@torch.no_grad()
def flatten(bucket: Bucket, device: torch.device, into: Tensor | None = None) -> FlatBucket:
    """Copy a bucket into one block on `device`, as SGLang's `FlattenedTensorBucket` expects it.

    `into`: uint8, large enough; the bucket takes its beginning. None allocates a block.
    """
    # SGLang views each part in its own dtype. torch allows that where the part begins at a multiple
    # of the dtype's size. Wide dtypes come first: each size divides those before it.
    ordered = sorted(bucket, key=lambda item: -item[1].element_size())
    parts = []
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        parts.append(FlatPart(name, tensor.dtype, tuple(tensor.shape), start, end))
        start = end
    pieces = [
        tensor.detach().to(device, non_blocking=True).flatten().view(torch.uint8)
        for _, tensor in ordered
    ]
    memory = torch.empty(start, dtype=torch.uint8, device=device) if into is None else into[:start]
    torch.cat(pieces, out=memory)
    return FlatBucket(tuple(parts), memory)


class SharedBuffer:
    """One block of shared memory for all buckets of a transport.

    A bucket is valid until the next one is placed.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def place(self, bucket: Bucket) -> Bucket | None:
        """Copy a bucket into the block and return its tensors there; None without shared memory."""
        size_bytes = sum(_aligned(tensor.nbytes) for _, tensor in bucket)
        if size_bytes > len(self._block) and not self._grow(size_bytes):
            return None
        placed = []
        start = 0
        for name, tensor in bucket:
            view = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            placed.append((name, view.copy_(tensor)))
            start += _aligned(tensor.nbytes)
        return placed

    def _grow(self, size_bytes: int) -> bool:
        # Release the smaller block first, so that both are never needed at once.
        self._block = torch.empty(0, dtype=torch.uint8)
        block = shared_block(size_bytes)
        if block is not None:
            self._block = block
        return block is not None


def shared_block(size_bytes: int) -> Tensor | None:
    """Allocate shared memory, uint8 [size_bytes]; None without space, or without shared memory."""
    # The kernel promises more than it has: a process that touches missing memory is killed.
    if (
        not SHARED_MEMORY.is_dir()
        or shutil.disk_usage(SHARED_MEMORY).free < size_bytes * FREE_SPACE_FACTOR
    ):
        return None
    try:
        with shared_by_name():
            block = torch.empty(size_bytes, dtype=torch.uint8).share_memory_()
            manager, name, _ = block.untyped_storage()._share_filename_cpu_()
    except RuntimeError:  # torch's shared memory manager cannot make its socket in TMPDIR
        return None
    # Ray kills a rank together with torch's manager, which would have removed the memory.
    memory = SHARED_MEMORY / name.decode().lstrip("/")
    leftovers.record(os.getpid(), memory, Path(manager.decode()).parent)
    return block


def references(placed: Sequence[tuple[str, Tensor]]) -> bytes:
    """Pickle references to tensors in shared memory, for one reader and one use: torch counts."""
    stream = io.BytesIO()
    with shared_by_name():
        ForkingPickler(stream).dump(list(placed))
    return stream.getvalue()


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Share memory under a name: an unrelated process cannot receive file descriptors."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
