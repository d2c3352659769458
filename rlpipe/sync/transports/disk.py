"""`WeightWriter`: a trainer rank's share of a version of the weights, as files.

All ranks see all tensors in the same order; cut into parts, they are written by the ranks in turn.
With `transport: delta` a rank remembers the bytes of its share, and writes what changed of them
when it is told the version that they were.

Not here: when a version counts, and what it follows (`versions` and whoever has all shares), how a
change is written (`delta`), or sending anything to an engine.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from torch import Tensor

from rlpipe.config.train import SyncConfig
from rlpipe.errors import SyncError
from rlpipe.sync.tensors import Bucket, buckets, checked, expected_shapes
from rlpipe.sync.transports.delta import CHECKSUMS, Bytes, encode
from rlpipe.sync.transports.versions import HF_INDEX, Share, WeightFile, WeightStore

WORKERS = min(8, os.cpu_count() or 1)
"""Threads of a rank that compare and compress."""
WEIGHTS = (".safetensors", HF_INDEX, ".bin", ".pt", ".gguf")


class _Change(NamedTuple):
    name: str
    new: Bytes
    change: Bytes | None
    checksum: str


class WeightWriter:
    """One rank's. Not thread-safe."""

    def __init__(
        self,
        store: WeightStore,
        model_dir: str | Path,
        sync: SyncConfig,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """`model_dir` says which names and shapes the engines hold. Raises: ConfigError if it has
        no weights."""
        self.store = store
        self.sync = sync
        self.rank = rank
        self.world_size = world_size
        self.model_dir, self.expected = Path(model_dir), expected_shapes(model_dir)
        self.remembered: str | None = None
        """Stamp of the weights whose bytes are remembered; None: changes cannot be written."""
        self._bytes: dict[str, Bytes] = {}

    def write(
        self, named_tensors: Iterable[tuple[str, Tensor]], stamp: str, base: str | None
    ) -> Share:
        """Write this rank's share: all of it, or what changed since `base`, which all ranks must
        remember.

        `named_tensors` is read to its end even if that fails, because the other ranks take part in
        producing it. Raises: SyncError for tensors that engines do not hold, or another base;
        StoreError, StoreFull.
        """
        tensors = iter(named_tensors)
        remembered = self.remembered
        self.remembered = None
        try:
            if base is not None and base != remembered:
                raise SyncError(
                    "changes of weights that are not remembered",
                    where=f"trainer/{self.rank}",
                    found=remembered,
                    expected=base,
                )
            share = self._changes(tensors, stamp) if base is not None else self._all(tensors, stamp)
        except BaseException:
            self._bytes.clear()
            raise
        finally:
            for _ in tensors:
                pass
        self.remembered = stamp if self.sync.transport == "delta" else None
        return share

    def _mine(self, tensors: Iterator[tuple[str, Tensor]], stamp: str) -> Iterator[Bucket]:
        """This rank's parts, on the CPU. Raises: SyncError if tensors were missing, once the last
        one is out."""
        missing = set(self.expected)
        whole = checked(tensors, self.expected, missing, own=False)
        for number, part in enumerate(buckets(whole, self.sync.update_weight_buffer_size)):
            if number % self.world_size == self.rank:
                yield [(name, _owned(tensor)) for name, tensor in part]
        if missing:
            raise SyncError(
                "tensors are missing",
                where=f"push of {stamp}",
                found=f"no {', '.join(sorted(missing)[:5])}",
            )

    def _all(self, tensors: Iterator[tuple[str, Tensor]], stamp: str) -> Share:
        """One part is written while the next one is fetched."""
        share = Share()
        pending = deque[Future[None]]()
        self._bytes.clear()
        with ThreadPoolExecutor(1) as pool:
            for number, part in enumerate(self._mine(tensors, stamp)):
                while pending:
                    pending.popleft().result()
                name = f"part-{number * self.world_size + self.rank:05d}.safetensors"
                pending.append(pool.submit(self._write_part, share, stamp, name, part))
            while pending:
                pending.popleft().result()
        if self.rank == 0 and self.sync.update_weight_disk_keep_files:
            share.files += self._rest_of_model(stamp)
        return share

    def _write_part(self, share: Share, stamp: str, name: str, part: Bucket) -> None:
        tensors = dict(part)
        file = self.store.write(
            stamp,
            name,
            lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"}),
            tensors,
        )
        share.files.append(file)
        share.full_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self.sync.transport == "delta":
            self._bytes |= {name: _bytes(tensor) for name, tensor in part}
            share.checksums |= {name: self._checksum(self._bytes[name]) for name in tensors}

    def _changes(self, tensors: Iterator[tuple[str, Tensor]], stamp: str) -> Share:
        share = Share()
        changes = dict[str, Bytes]()
        pending = deque[Future[_Change]]()

        def collect() -> None:
            found = pending.popleft().result()
            self._bytes[found.name] = found.new
            share.full_bytes += len(found.new)
            if found.change is not None:
                changes[found.name], share.checksums[found.name] = found.change, found.checksum

        with ThreadPoolExecutor(WORKERS) as pool:
            for part in self._mine(tensors, stamp):
                for name, tensor in part:
                    while len(pending) >= 2 * WORKERS:
                        collect()
                    pending.append(pool.submit(self._change, name, tensor))
            while pending:
                collect()
        if changes:
            name = f"changes-{self.rank:05d}.safetensors"
            share.files.append(
                self.store.write(
                    stamp, name, lambda path: safetensors.numpy.save_file(changes, path), changes
                )
            )
        return share

    def _change(self, name: str, tensor: Tensor) -> _Change:
        new = _bytes(tensor)
        old = self._bytes.get(name)
        if old is None:
            raise SyncError(
                "a tensor that is not remembered",
                where=name,
                expected="the tensors of the push before",
            )
        change = encode(new, old, tensor.element_size(), self.sync.update_weight_delta_encoding)
        return _Change(name, new, change, self._checksum(new) if change is not None else "")

    def _checksum(self, data: Bytes) -> str:
        return CHECKSUMS[self.sync.update_weight_delta_checksum](data)

    def _rest_of_model(self, stamp: str) -> list[WeightFile]:
        """Configuration and tokenizer, so that what is kept can be opened as a model."""
        rest = sorted(
            path
            for path in self.model_dir.iterdir()
            if path.is_file() and not path.name.endswith(WEIGHTS)
        )
        return [self.store.write(stamp, path.name, _copy(path)) for path in rest]


def _copy(source: Path) -> Callable[[Path], None]:
    def save(target: Path) -> None:
        shutil.copyfile(source, target)

    return save


def _owned(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and not the trainer's own memory."""
    host = tensor.detach().to("cpu").contiguous()
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
