"""What changed of a tensor's bytes: found, written small, put on top of the old ones, checked.

A change is zstd (level 1) over

    count of changed elements, 8 bytes little-endian
    distance of each from the one before, 4 bytes little-endian
    its bytes: `xor` with the old ones, or the new ones (`overwrite`)

with the first bytes of all distances together, then the second ones, and so on; likewise the
elements'. After a step of reinforcement learning few elements change, and those by their last bits,
so `xor` is the smaller by half. `overwrite` may be put on twice.

Not here: files (`disk`, `mirror`), tensors (all of this is bytes), or which versions there are
(`versions`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import xxhash
import zstandard

from rlpipe.errors import SyncError

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
_COUNT_BYTES = 8
_STEP_BYTES = 4


def encode(new: Bytes, old: Bytes, element_size: int, encoding: str) -> Bytes | None:
    """The change from `old` to `new`, tensors of elements of 1, 2, 4 or 8 bytes; None if there is
    none.

    Tensors of more than 2^32 elements are not for this. Raises: SyncError if the two differ in
    size.
    """
    if len(new) != len(old):
        raise SyncError(
            "a tensor has changed its size", found=f"{len(new)} bytes", expected=f"{len(old)} bytes"
        )
    word = _WORDS[element_size]
    news = new.view(word)
    olds = old.view(word)
    assert len(news) <= np.iinfo(np.uint32).max
    where = np.flatnonzero(news != olds)
    if not len(where):
        return None
    values = news[where] ^ olds[where] if encoding == "xor" else news[where]
    steps = np.diff(where, prepend=0).astype("<u4")
    count = np.frombuffer(len(where).to_bytes(_COUNT_BYTES, "little"), np.uint8)
    plain = np.concatenate(
        [
            count,
            _planes(steps.view(np.uint8), _STEP_BYTES),
            _planes(values.view(np.uint8), element_size),
        ]
    )
    return np.frombuffer(
        zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(plain.data), np.uint8
    )


def apply(change: Bytes, memory: Bytes, element_size: int, encoding: str) -> int:
    """Put a change on top of `memory`, in place; the number of elements that it changes. Raises:
    SyncError if it does not fit."""
    try:
        plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(change.data), np.uint8)
    except (zstandard.ZstdError, MemoryError) as error:  # it may say that it is of any size
        raise SyncError("a change of a tensor cannot be read", found=error) from error
    count = int.from_bytes(plain[:_COUNT_BYTES].tobytes(), "little")
    steps, values = np.split(plain[_COUNT_BYTES:], [min(count * _STEP_BYTES, len(plain))])
    if len(values) != count * element_size:
        raise SyncError(
            "a change of a tensor is torn",
            found=f"{len(plain)} bytes",
            expected=f"{count} elements",
        )
    where = np.cumsum(_whole(steps, _STEP_BYTES).view("<u4"), dtype=np.int64)
    words = memory.view(_WORDS[element_size])
    if count and where[-1] >= len(words):
        raise SyncError(
            "a change is of a larger tensor",
            found=f"element {where[-1]}",
            expected=f"{len(words)} elements",
        )
    new = _whole(values, element_size).view(words.dtype)
    words[where] = words[where] ^ new if encoding == "xor" else new
    return count


def _planes(data: Bytes, size: int) -> Bytes:
    """The first bytes of all elements of `size` bytes, then the second ones …"""
    return data.reshape(-1, size).T.reshape(-1)


def _whole(planes: Bytes, size: int) -> Bytes:
    """What `_planes` was given."""
    return np.ascontiguousarray(planes.reshape(size, -1).T).reshape(-1)
