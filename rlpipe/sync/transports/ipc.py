"""Weights through the memory of GPUs that trainer and engines share: no byte leaves a GPU.

Every trainer rank has all tensors once they are gathered, and the engine rank on its GPU needs them
there. So every rank packs each bucket into memory of its own and makes a handle to it (CUDA IPC);
rank 0 collects the handles, and sends each engine those of the ranks on its GPUs, in its tensor
parallel order. The engine maps the memory and copies its slice.

A rank has two such memories, and fills one again once all engines have read what was in it; rank 0
says so to the others before each bucket, or that the push is over. Afterwards the memory is given
back. An engine of one rank has read a bucket when it answers: to let go of the memory it waits for
its copies. Of one with several ranks the first answers, when all have begun to copy; that the
others have let go too is sure when it answers to the next bucket, which they begin together. So
there are three memories then.

Without CUDA it is the same with memory shared by name. Not here: which ranks share an engine's GPUs
(the placement).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.handles import flattened_bucket
from rlpipe.errors import ResourceError, SyncError
from rlpipe.sync.session import Session
from rlpipe.sync.tensors import Bucket
from rlpipe.sync.transports.bucketed import BUCKET, BucketTransport
from rlpipe.sync.transports.flat import flatten
from rlpipe.sync.transports.shared import by_name, shared_block

AHEAD = 2
"""So many buckets are packed at most that engines have not answered to."""


@dataclass(frozen=True, slots=True)
class Handles:
    """One bucket, as all ranks have it."""

    tensors: int
    size_bytes: int
    by_rank: tuple[bytes, ...]
    """Empty where the push is over, or on another rank than 0. A handle is empty if its rank shares
    no engine's GPU."""


class IpcTransport(BucketTransport[Handles]):
    """See `base.Transport`. Every rank makes one: rank 0 calls `push`, the others at the same time
    `assist`."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        buffer_size_bytes: int,
        timeout_s: float,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Collective where there are several ranks. `places` is to be set before each push, on
        every rank."""
        super().__init__(model_dir, buffer_size_bytes=buffer_size_bytes, timeout_s=timeout_s)
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.places: Mapping[str, Sequence[int]] = {}
        """Engine of the push by URL → the trainer ranks on its GPUs, in the order of its own
        ranks."""
        self._ranks: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._slots: list[Tensor] = []
        self._packed = self._loaded = 0
        self._over = False
        self._changed = threading.Condition()

    def assist(
        self, named_tensors: Iterable[tuple[str, Tensor]], stamp: str, *, check: bool = False
    ) -> int:
        """The other ranks' part of a push; the bytes that went through this rank."""
        tensors = iter(named_tensors)
        try:
            return sum(handles.size_bytes for handles, _ in self.packed(tensors, (), stamp, check))
        finally:
            for _ in tensors:
                pass

    def packed(
        self, tensors: Iterator[tuple[str, Tensor]], engines: Sequence[str], stamp: str, check: bool
    ) -> Iterator[tuple[Handles, bool]]:
        """See `BucketTransport.packed`. At its end nothing is under way any more, and the memory is
        given back."""
        self._packed = self._loaded = 0
        self._over = False
        return self._to_the_end(super().packed(tensors, engines, stamp, check))

    def _to_the_end(self, packed: Iterator[tuple[Handles, bool]]) -> Iterator[tuple[Handles, bool]]:
        yield from packed
        if self._may_go_on(until=self._packed):  # else an engine may still look at it
            self._slots.clear()
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()

    def pack(self, bucket: Bucket, engines: Sequence[str]) -> Handles:
        size_bytes = sum(tensor.nbytes for _, tensor in bucket)
        if not self._may_go_on(until=self._packed + 1 - AHEAD):
            return Handles(len(bucket), size_bytes, ())
        self._packed += 1
        return Handles(len(bucket), size_bytes, self._gathered(self._handle(bucket, size_bytes)))

    async def load(self, session: Session, packed: Handles, *, last: bool) -> None:
        stamp = session.stamp if last else None

        def told(engine: Engine):
            handles = [packed.by_rank[rank] for rank in self._place(engine.url)]
            return engine.update_from_tensors(
                handles, weight_version=stamp, flush_cache=last, flattened=True
            )

        await session.each(f"bucket {session.buckets}", told, kind=BUCKET)
        session.count(packed.tensors, packed.size_bytes)
        with self._changed:
            self._loaded += 1
            self._changed.notify_all()

    async def connect(self, session: Session) -> None:
        for engine in session.active:
            self._place(engine.url)

    def finish(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def _num_slots(self) -> int:
        return AHEAD + any(len(ranks) > 1 for ranks in self.places.values())

    def _handle(self, bucket: Bucket, size_bytes: int) -> bytes:
        """Empty where no engine would open it: torch keeps memory for whoever was promised it, for
        good."""
        if not any(self.rank in ranks for ranks in self.places.values()):
            return b""
        flat = flatten(bucket, self.device, self._slot(self._packed % self._num_slots, size_bytes))
        parts = [(part.name, part.dtype, part.shape, part.start, part.end) for part in flat.parts]
        with by_name():
            return flattened_bucket(flat.memory, parts)

    def _place(self, url: str) -> Sequence[int]:
        if url not in self.places:
            raise SyncError(
                "this engine shares no GPU with the trainer",
                where=url,
                expected=f"one of {', '.join(self.places) or 'none'}",
                do="use sync.transport: distributed",
            )
        return self.places[url]

    def _may_go_on(self, *, until: int) -> bool:
        """Wait until so many buckets have been loaded. False if the push is over before that.
        Collective."""
        go = torch.zeros(1, dtype=torch.uint8)
        if self.rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._loaded >= until)
                go[0] = self._loaded >= until and not self._over
        if self._ranks is not None:
            dist.broadcast(go, src=0, group=self._ranks)
        return bool(go[0])

    def _slot(self, number: int, size_bytes: int) -> Tensor:
        """Memory for a bucket. One that is too small is given up for a larger one."""
        self._slots += [torch.empty(0, dtype=torch.uint8)] * (number + 1 - len(self._slots))
        if len(self._slots[number]) < size_bytes:
            self._slots[number] = torch.empty(0, dtype=torch.uint8)
            self._slots[number] = self._memory(size_bytes)
        return self._slots[number]

    def _memory(self, size_bytes: int) -> Tensor:
        if self.device.type == "cuda":
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        block = shared_block(size_bytes)
        if block is None:
            raise ResourceError(
                "no shared memory for a bucket",
                where="sync.update_weight_buffer_size",
                found=f"{size_bytes} bytes",
            )
        return block

    def _gathered(self, handle: bytes) -> tuple[bytes, ...]:
        if self._ranks is None:
            return (handle,)
        found: list[bytes] | None = [b""] * self.world_size if self.rank == 0 else None
        dist.gather_object(handle, found, dst=0, group=self._ranks)
        return tuple(found or ())
