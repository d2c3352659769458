"""A bucket of tensors in shared memory: engines on the same machine map it instead of receiving it.

Over HTTP goes a pickle of a few kilobytes that says where in the memory each tensor lies, in the
form torch itself uses between processes (`file_system` sharing). Half a gigabyte takes a tenth of
the time that its bytes take through JSON.

Not here: GPU memory (CUDA IPC), or which engines share the machine (`tensor`).
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor

MEMORY = Path("/dev/shm")
ALIGNMENT = 64
SPARE = 1.1


class SharedBuffer:
    """One block of shared memory, reused for every bucket. A bucket is valid until the next one is
    put there."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def place(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]] | None:
        """The same tensors in shared memory; None if there is no room for them, or no way to share
        it."""
        needed = sum(_aligned(tensor.nbytes) for _, tensor in bucket)
        if needed > len(self._block) and not self._grow(needed):
            return None
        placed = []
        start = 0
        for name, tensor in bucket:
            view = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            placed.append((name, view.copy_(tensor)))
            start += _aligned(tensor.nbytes)
        return placed

    def _grow(self, size_bytes: int) -> bool:
        self._block = torch.empty(0, dtype=torch.uint8)
        block = shared_block(size_bytes)
        if block is not None:
            self._block = block
        return block is not None


def shared_block(size_bytes: int) -> Tensor | None:
    """Shared memory, uint8 [size_bytes]; None if there is no room for it, or no way to share it.

    Memory that is promised but not there ends the process when it is touched, so ask first.
    """
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < size_bytes * SPARE:
        return None
    try:
        with by_name():
            return torch.empty(size_bytes, dtype=torch.uint8).share_memory_()
    except (
        RuntimeError
    ):  # torch's manager of shared memory did not start: no socket can be made in TMPDIR
        return None


def references(placed: Sequence[tuple[str, Tensor]]) -> bytes:
    """The pickle that leads another process of this machine to these tensors. For one reader, once:
    torch counts them."""
    stream = io.BytesIO()
    with by_name():
        ForkingPickler(stream).dump(list(placed))
    return stream.getvalue()


@contextmanager
def by_name() -> Iterator[None]:
    """Share memory under a name: an unrelated process cannot be handed file descriptors."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
