"""Write all weights as safetensors files, each version once.

`DiskTransport` writes one rank's share. All ranks see the same tensors in the same order; the parts
go to the ranks in rotation. `FilesSync` (`rlpipe.actors.engines.files_sync`) joins the shares to a
`Version`, publishes it and has engines load it.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
from torch import Tensor

from rlpipe.sync.tensors import (
    Bucket,
    NamedTensors,
    check_tensors,
    exhaust,
    into_buckets,
    require_none_missing,
)
from rlpipe.sync.transports.base import Push, Transport, TransportSetup
from rlpipe.sync.transports.versions import HF_INDEX, Share, WeightFile, WeightStore

WORKERS = min(8, os.cpu_count() or 1)
"""Threads that compare, compress and copy."""
WEIGHT_SUFFIXES = (".safetensors", HF_INDEX, ".bin", ".pt", ".gguf")


class DiskTransport(Transport[Share]):
    """See `base.Transport`. `send` writes this rank's share and returns it. Not thread-safe."""

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self.store = WeightStore(setup.files_root, scratch=setup.scratch)

    def send(self, tensors: NamedTensors, push: Push) -> Share:
        """Write this rank's share.

        Raises: SyncError for tensors that engines do not hold; StoreError, StoreFull.
        """
        stream = iter(tensors)
        try:
            return self.write(stream, push)
        finally:
            exhaust(stream)

    def write(self, tensors: Iterator[tuple[str, Tensor]], push: Push) -> Share:
        """Write this rank's parts. One part is written while the next is gathered."""
        share = Share()
        pending = deque[Future[None]]()
        with ThreadPoolExecutor(1) as pool:
            for number, part in enumerate(self.own_parts(tensors, push.stamp)):
                # At most one part waits: parts are as large as buckets.
                while pending:
                    pending.popleft().result()
                file_number = number * self.setup.world_size + self.setup.rank
                name = f"part-{file_number:05d}.safetensors"
                pending.append(pool.submit(self.write_part, share, push.stamp, name, part))
            while pending:
                pending.popleft().result()
        if self.setup.rank == 0 and self.setup.sync.update_weight_disk_keep_files:
            share.files += self._write_model_files(push.stamp)
        return share

    def own_parts(self, tensors: Iterator[tuple[str, Tensor]], stamp: str) -> Iterator[Bucket]:
        """Yield this rank's parts, copied to the CPU. Raises: as `own_buckets`."""
        for part in self.own_buckets(tensors, stamp):
            yield [(name, _own_copy(tensor)) for name, tensor in part]

    def own_buckets(self, tensors: Iterator[tuple[str, Tensor]], stamp: str) -> Iterator[Bucket]:
        """Yield this rank's parts as gathered, which the trainer may change later.

        Raises: SyncError after the last part if tensors were missing.
        """
        missing = set(self.expected)
        checked = check_tensors(tensors, self.expected, missing)
        parts = into_buckets(checked, self.setup.sync.update_weight_buffer_size)
        for number, part in enumerate(parts):
            if number % self.setup.world_size == self.setup.rank:
                yield part
        require_none_missing(missing, stamp)

    def write_part(self, share: Share, stamp: str, name: str, part: Bucket) -> None:
        """Write one part and add it to the share."""
        tensors = dict(part)

        def save(path: Path) -> None:
            safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})

        share.files.append(self.store.write(stamp, name, save, tensors))
        share.full_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _write_model_files(self, stamp: str) -> list[WeightFile]:
        """Write configuration and tokenizer, so that a kept version opens as a model."""
        files = sorted(
            path
            for path in Path(self.setup.model_dir).iterdir()
            if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES)
        )
        return [self.store.write(stamp, path.name, _copy_from(path)) for path in files]


def _copy_from(source: Path) -> Callable[[Path], None]:
    def save(target: Path) -> None:
        shutil.copyfile(source, target)

    return save


def _own_copy(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous, in memory that the trainer does not change."""
    on_cpu = tensor.detach().to("cpu").contiguous()
    return on_cpu.clone() if on_cpu.data_ptr() == tensor.data_ptr() else on_cpu
