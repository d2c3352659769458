"""Send weights through the memory of GPUs that trainer and engines share. No byte leaves a GPU.

After gathering, every trainer rank has all tensors, and the engine rank on its GPU needs them
there. So each rank packs a bucket into its own memory and makes a handle to it (CUDA IPC). Rank 0
collects the handles and sends each engine the handles of the ranks on its GPUs, in the order of the
engine's tensor parallel ranks. The engine maps the memory and copies its slice.

Without CUDA the same runs through memory that is shared by name.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import ResourceError, SyncError
from rlpipe.sync.session import PushReport, Session
from rlpipe.sync.tensors import Bucket, exhaust
from rlpipe.sync.transports.base import Push, TransportSetup
from rlpipe.sync.transports.bucket_memory import (
    FlatBucket,
    flatten,
    shared_block,
    shared_by_name,
)
from rlpipe.sync.transports.bucketed import BUCKET, BucketTransport

MAX_UNREAD = 2
"""Packed buckets that engines have not answered yet."""
_DEVICE_ARGUMENT = 6
"""Index of the device in the arguments of torch's `rebuild_cuda_tensor`. SGLang patches it too."""


@dataclass(frozen=True, slots=True)
class Handles:
    """Handles to one bucket, collected from all ranks."""

    tensors: int
    size_bytes: int
    by_rank: tuple[bytes, ...]
    """Handle of each rank; empty bytes for a rank that shares no engine's GPU. An empty tuple on
    ranks other than 0, and after the push has ended."""


class IpcTransport(BucketTransport[Handles]):
    """See `base.Transport`. `Push.engine_ranks` names the trainer ranks on each engine's GPUs."""

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self.engine_ranks: Mapping[str, Sequence[int]] = {}
        self._gloo: Any = dist.new_group(backend="gloo") if setup.world_size > 1 else None
        self._slots: list[Tensor] = []
        self._num_packed = 0
        self._num_loaded = 0
        self._finished = False
        self._changed = threading.Condition()

    def assist(self, tensors: Iterator[tuple[str, Tensor]], push: Push) -> PushReport:
        """Pack this rank's memory for each bucket."""
        packed = self.packed(tensors, push)
        try:
            size_bytes = sum(handles.size_bytes for handles, _ in packed)
        finally:
            exhaust(tensors)
        return PushReport(push.stamp, size_bytes=size_bytes)

    def packed(
        self, tensors: Iterator[tuple[str, Tensor]], push: Push
    ) -> Iterator[tuple[Handles, bool]]:
        """See `BucketTransport.packed`. Releases the memory once engines have read all of it."""
        self.engine_ranks = push.engine_ranks
        self._num_packed = 0
        self._num_loaded = 0
        self._finished = False
        return self._packed_then_released(super().packed(tensors, push))

    def _packed_then_released(
        self, packed: Iterator[tuple[Handles, bool]]
    ) -> Iterator[tuple[Handles, bool]]:
        yield from packed
        # After a failed push an engine may still read the memory, so it stays until the next push.
        if self._wait_loaded(self._num_packed):
            self._slots.clear()
            if self.setup.device.type == "cuda":
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()

    def pack(self, bucket: Bucket) -> Handles:
        size_bytes = sum(tensor.nbytes for _, tensor in bucket)
        if not self._wait_loaded(self._num_packed + 1 - MAX_UNREAD):
            return Handles(len(bucket), size_bytes, ())
        self._num_packed += 1
        return Handles(len(bucket), size_bytes, self._gather(self._handle(bucket, size_bytes)))

    async def load(self, session: Session, packed: Handles, *, last: bool) -> None:
        async def load_one(engine: Engine) -> None:
            await engine.update_from_tensors(
                [packed.by_rank[rank] for rank in self._ranks_of(engine.url)],
                weight_version=session.stamp if last else None,
                flush_cache=last,
                flattened=True,
            )

        await session.each(f"bucket {session.buckets}", load_one, kind=BUCKET)
        session.count_bucket(packed.tensors, packed.size_bytes)
        with self._changed:
            self._num_loaded += 1
            self._changed.notify_all()

    async def connect(self, session: Session) -> None:
        # Before the first bucket: an engine without a shared GPU would get no handle.
        for engine in session.active:
            self._ranks_of(engine.url)

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    @property
    def _num_slots(self) -> int:
        """Blocks of memory that each rank fills in rotation."""
        # An engine of one rank answers when it has released the memory of a bucket. An engine of
        # several ranks answers through its first rank, when all ranks have begun to copy. The other
        # ranks have released the memory when the engine answers to the next bucket, which all ranks
        # begin together. So it needs a third block.
        return MAX_UNREAD + any(len(ranks) > 1 for ranks in self.engine_ranks.values())

    def _handle(self, bucket: Bucket, size_bytes: int) -> bytes:
        # A handle that no engine opens would keep its memory for ever: torch counts readers.
        if not any(self.setup.rank in ranks for ranks in self.engine_ranks.values()):
            return b""
        memory = self._slot(self._num_packed % self._num_slots, size_bytes)
        return bucket_handle(flatten(bucket, self.setup.device, memory))

    def _ranks_of(self, url: str) -> Sequence[int]:
        if url not in self.engine_ranks:
            raise SyncError(
                "this engine shares no GPU with the trainer",
                where=url,
                expected=f"one of {', '.join(self.engine_ranks) or 'none'}",
                do="use sync.transport: distributed",
            )
        return self.engine_ranks[url]

    def _wait_loaded(self, count: int) -> bool:
        """Wait until `count` buckets are loaded; False if the push ends before. Collective."""
        loaded = torch.zeros(1, dtype=torch.uint8)
        if self.setup.rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._finished or self._num_loaded >= count)
                loaded[0] = self._num_loaded >= count and not self._finished
        # All ranks must take the same branch, or the collectives of gathering would not match.
        if self._gloo is not None:
            dist.broadcast(loaded, src=0, group=self._gloo)
        return bool(loaded[0])

    def _slot(self, number: int, size_bytes: int) -> Tensor:
        """Return a block for a bucket, replaced by a larger one if it is too small."""
        self._slots += [torch.empty(0, dtype=torch.uint8)] * (number + 1 - len(self._slots))
        if len(self._slots[number]) < size_bytes:
            # Release the smaller block first, so that both are never needed at once.
            self._slots[number] = torch.empty(0, dtype=torch.uint8)
            self._slots[number] = self._allocate(size_bytes)
        return self._slots[number]

    def _allocate(self, size_bytes: int) -> Tensor:
        if self.setup.device.type == "cuda":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.setup.device)
        block = shared_block(size_bytes)
        if block is None:
            raise ResourceError(
                "no shared memory for a bucket",
                where="sync.update_weight_buffer_size",
                found=f"{size_bytes} bytes",
            )
        return block

    def _gather(self, handle: bytes) -> tuple[bytes, ...]:
        if self._gloo is None:
            return (handle,)
        is_first = self.setup.rank == 0
        handles: list[bytes] | None = [b""] * self.setup.world_size if is_first else None
        dist.gather_object(handle, handles, dst=0, group=self._gloo)
        return tuple(handles or ())


def bucket_handle(flat: FlatBucket) -> bytes:
    """Pickle a handle to a flat bucket, for one reader and one use: torch counts readers.

    `flat.memory` is on a GPU, or shared under a name. The result is what
    `/update_weights_from_tensor` takes as `flattened_bucket`. SGLang's own sender pickles the same
    with `FlattenedTensorBucket`, `MultiprocessingSerializer` and `monkey_patch_torch_reductions`.
    """
    # Not with SGLang's classes: importing SGLang patches transformers, which the trainer uses. An
    # engine reads attributes only, and its unpickler allows plain namespaces (0.5.15 to 0.5.21).
    metadata = [
        SimpleNamespace(
            name=part.name,
            dtype=part.dtype,
            shape=part.shape,
            start_idx=part.start,
            end_idx=part.end,
            numel=part.end - part.start,
        )
        for part in flat.parts
    ]
    stream = io.BytesIO()
    with shared_by_name():
        _HandlePickler(stream).dump({"flattened_tensor": flat.memory, "metadata": metadata})
    return stream.getvalue()


class _HandlePickler(ForkingPickler):
    """Pickle CUDA tensors as IPC handles with the GPU's UUID.

    `cuda:0` of this process can be `cuda:3` of the engine. CUDA IPC needs memory of cudaMalloc, so
    PyTorch's expandable segments must be off.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or not obj.is_cuda:
            return NotImplemented
        rebuild, arguments = cast("tuple[Any, tuple[Any, ...]]", reductions.reduce_tensor(obj))
        device = arguments[_DEVICE_ARGUMENT]
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        before = arguments[:_DEVICE_ARGUMENT]
        after = arguments[_DEVICE_ARGUMENT + 1 :]
        return rebuild, (*before, uuid, *after)
