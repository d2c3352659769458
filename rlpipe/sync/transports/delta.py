"""Write only the values that changed since the last push.

`DeltaTransport` remembers the bytes of its share and writes what changed. `encode` makes a change,
`apply_change` applies it. A change is zstd (level 1) over

    number of changed elements, 8 bytes little-endian
    distance of each from the previous one, 4 bytes little-endian
    its bytes: `xor` with the old bytes, or the new bytes (`overwrite`)

with the first bytes of all distances together, then the second bytes, and so on; the same for the
elements. After a step of reinforcement learning few elements change, and only in their last bits.
So `xor` halves the size. `overwrite` can be applied twice.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard
from torch import Tensor

from rlpipe.errors import SyncError
from rlpipe.sync.tensors import Bucket
from rlpipe.sync.transports.base import Push, TransportSetup
from rlpipe.sync.transports.disk import WORKERS, DiskTransport
from rlpipe.sync.transports.versions import Share

Bytes = np.ndarray
"""uint8 [n]."""
ENCODINGS = ("xor", "overwrite")
CHECKSUMS: dict[str, Callable[[Bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data.data),
    "adler32": lambda data: f"{zlib.adler32(data.data):08x}",
}
COMPRESSION_LEVEL = 1
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ELEMENT_SIZES = tuple(_WORDS)
SLOT_BYTES = 128 * 1024**2
"""Largest tensor that waits in reused memory."""
_COUNT_BYTES = 8
_DISTANCE_BYTES = 4


class _TensorChange(NamedTuple):
    name: str
    full_bytes: int
    change: Bytes | None
    checksum: str


class _Staging:
    """Memory on the CPU for the bytes of tensors that wait for a thread, used again and again.

    A copy into new memory costs more than the comparison: 1.5 GB/s, because of page faults. Memory
    for copies from a GPU is pinned.
    """

    def __init__(self, slots: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(slots):
            self._free.put(torch.empty(0, dtype=torch.uint8))

    def copy(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a tensor's bytes into a free slot. Return the slot and the bytes in it."""
        slot = self._free.get()
        try:
            return self._filled(slot, tensor)
        except BaseException:
            # Without its slots, a later push would wait for ever.
            self._free.put(slot)
            raise

    def _filled(self, slot: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot, enlarged if necessary, and the tensor's bytes in it."""
        size_bytes = tensor.nbytes
        if size_bytes > SLOT_BYTES:  # such as embeddings: all slots would grow to their size
            staged = torch.empty(size_bytes, dtype=torch.uint8)
        else:
            if len(slot) < size_bytes:
                slot = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            staged = slot[:size_bytes]
        staged.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        return slot, staged

    def give_back(self, slot: Tensor) -> None:
        self._free.put(slot)


class DeltaTransport(DiskTransport):
    """See `base.Transport`. `Push.base` is the stamp of the remembered weights."""

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self.remembered: str | None = None
        """Stamp of the weights that this rank remembers; None for no weights."""
        self._bytes: dict[str, Bytes] = {}
        self._staging = _Staging(2 * WORKERS, pinned=setup.device.type == "cuda")

    def write(self, tensors: Iterator[tuple[str, Tensor]], push: Push) -> Share:
        """Write this rank's share: all tensors, or the changes since `push.base`.

        Raises: SyncError if this rank does not remember `push.base`; as `DiskTransport.send`.
        """
        # Until the write succeeds the bytes belong to no version.
        remembered = self.remembered
        self.remembered = None
        try:
            if push.base is None:
                self._bytes.clear()
                share = super().write(tensors, push)
            elif push.base != remembered:
                raise SyncError(
                    "changes of weights that are not remembered",
                    where=f"trainer/{self.setup.rank}",
                    found=remembered,
                    expected=push.base,
                )
            else:
                share = self._write_changes(tensors, push.stamp)
        except BaseException:
            self._bytes.clear()
            raise
        self.remembered = push.stamp
        return share

    def write_part(self, share: Share, stamp: str, name: str, part: Bucket) -> None:
        super().write_part(share, stamp, name, part)
        for tensor_name, tensor in part:
            data = _bytes_of(tensor)
            self._bytes[tensor_name] = data
            share.checksums[tensor_name] = self._checksum(data)

    def _write_changes(self, tensors: Iterator[tuple[str, Tensor]], stamp: str) -> Share:
        share = Share()
        changes = dict[str, Bytes]()
        pending = deque[Future[_TensorChange]]()

        def collect() -> None:
            done = pending.popleft().result()
            share.full_bytes += done.full_bytes
            if done.change is not None:
                changes[done.name] = done.change
                share.checksums[done.name] = done.checksum

        with ThreadPoolExecutor(WORKERS) as pool:
            for part in self.own_buckets(tensors, stamp):
                for name, tensor in part:
                    while len(pending) >= 2 * WORKERS:
                        collect()
                    slot, staged = self._staging.copy(tensor)
                    size = tensor.element_size()
                    pending.append(pool.submit(self._change_of, name, slot, staged, size))
            while pending:
                collect()
        if changes:
            file_name = f"changes-{self.setup.rank:05d}.safetensors"
            share.files.append(
                self.store.write(
                    stamp,
                    file_name,
                    lambda path: safetensors.numpy.save_file(changes, path),
                    changes,
                )
            )
        return share

    def _change_of(
        self, name: str, slot: Tensor, staged: Tensor, element_size: int
    ) -> _TensorChange:
        """Return the change of a tensor, remember its new bytes, and give back the staging slot."""
        try:
            new = staged.numpy()
            old = self._bytes.get(name)
            if old is None:
                raise SyncError(
                    "a tensor that is not remembered",
                    where=name,
                    expected="the tensors of the previous push",
                )
            encoding = self.setup.sync.update_weight_delta_encoding
            change = encode(new, old, element_size, encoding)
            if change is None:
                return _TensorChange(name, len(new), None, "")
            # In place: if the write fails later, all remembered bytes are dropped.
            np.copyto(old, new)
            return _TensorChange(name, len(new), change, self._checksum(new))
        finally:
            self._staging.give_back(slot)

    def _checksum(self, data: Bytes) -> str:
        return CHECKSUMS[self.setup.sync.update_weight_delta_checksum](data)


def encode(new: Bytes, old: Bytes, element_size: int, encoding: str) -> Bytes | None:
    """Return the change from `old` to `new`; None if they are equal.

    `element_size` is 1, 2, 4 or 8 bytes. Tensors have at most 2^32 - 1 elements.
    Raises: SyncError if the two differ in size.
    """
    if len(new) != len(old):
        raise SyncError(
            "a tensor has changed its size", found=f"{len(new)} bytes", expected=f"{len(old)} bytes"
        )
    word = _WORDS[element_size]
    new_words = new.view(word)
    old_words = old.view(word)
    assert len(new_words) <= np.iinfo(np.uint32).max
    indices = np.flatnonzero(new_words != old_words)
    if not len(indices):
        return None
    values = new_words[indices]
    if encoding == "xor":
        values = values ^ old_words[indices]
    distances = np.diff(indices, prepend=0).astype("<u4")
    count = np.frombuffer(len(indices).to_bytes(_COUNT_BYTES, "little"), np.uint8)
    plain = np.concatenate(
        [
            count,
            _to_planes(distances.view(np.uint8), _DISTANCE_BYTES),
            _to_planes(values.view(np.uint8), element_size),
        ]
    )
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    return np.frombuffer(compressor.compress(plain.data), np.uint8)


def apply_change(change: Bytes, memory: Bytes, element_size: int, encoding: str) -> int:
    """Apply a change to `memory` in place, and return the number of changed elements.

    Raises: SyncError if the change is damaged or does not fit.
    """
    try:
        plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(change.data), np.uint8)
    except (zstandard.ZstdError, MemoryError) as error:  # a damaged header can claim any size
        raise SyncError("a change of a tensor cannot be read", found=error) from error
    count = int.from_bytes(plain[:_COUNT_BYTES].tobytes(), "little")
    distances, values = np.split(plain[_COUNT_BYTES:], [min(count * _DISTANCE_BYTES, len(plain))])
    if len(values) != count * element_size:
        raise SyncError(
            "a change of a tensor is incomplete",
            found=f"{len(plain)} bytes",
            expected=f"{count} elements",
        )
    indices = np.cumsum(_from_planes(distances, _DISTANCE_BYTES).view("<u4"), dtype=np.int64)
    words = memory.view(_WORDS[element_size])
    if count and indices[-1] >= len(words):
        raise SyncError(
            "a change belongs to a larger tensor",
            found=f"element {indices[-1]}",
            expected=f"{len(words)} elements",
        )
    new = _from_planes(values, element_size).view(words.dtype)
    words[indices] = words[indices] ^ new if encoding == "xor" else new
    return count


def _to_planes(data: Bytes, size: int) -> Bytes:
    """Reorder elements of `size` bytes: all first bytes, then all second bytes, and so on."""
    return data.reshape(-1, size).T.reshape(-1)


def _from_planes(planes: Bytes, size: int) -> Bytes:
    """Invert `_to_planes`."""
    return np.ascontiguousarray(planes.reshape(size, -1).T).reshape(-1)


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()
