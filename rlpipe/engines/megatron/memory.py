"""What a trainer rank keeps in device memory while others use the device: parts of its state are
put to sleep and woken.

    weights      policy and critic                   moved to pinned CPU memory
    optimizer    main parameters and moments         moved
    gradients    the gradient buffers                dropped: every optimizer step begins with zeros
    teacher      frozen                              moved the first time; after that the copy is there

A part sleeps when the storages of its tensors are empty. The tensors themselves, and every view
that Megatron keeps of them (of a parameter in DDP's buffer, of a bucket), stay as they are and show
what they showed once the storage is filled again; only addresses change, so nothing may keep one.
torch_memory_saver would keep those too, but it has to be loaded into the process before anything
else, copies gradients as well, and its memory cannot be shared by CUDA IPC, which is how weights
reach engines of the same GPU. Freed memory goes back to the device, so any other process can have
it.

Where weights sleep is also where the policy's wait while the rank scores with the reference's
(`showing`), which lie in pinned CPU memory too: a run that scores a reference keeps its weights
twice there, one that also takes turns no more than that.

On a machine without CUDA the same happens between two places of its memory. What is not moved: the
CUDA context, NCCL's buffers (a process group has no way to give them back but to end), constants of
the model such as those of rotary embeddings.

Not here: whose turn it is (`rlpipe.actors.sharing`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import psutil
import torch
from torch import Tensor, UntypedStorage

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.engines.megatron.model.build import Scorer, Trained
from rlpipe.errors import TrainerError

Part = Literal["weights", "optimizer", "gradients", "teacher"]
PARTS: tuple[Part, ...] = get_args(Part)
CHUNK_BYTES = 256 * 1024**2
"""Of pinned memory, which torch hands out in powers of two: a whole one of them wastes nothing."""
SMALLEST_CHUNK_BYTES = 4096


class DeviceMemory:
    """The parts of one rank that can sleep. Not thread safe; not collective, but all ranks should
    do the same."""

    def __init__(self) -> None:
        self._asleep: dict[Part, list[tuple[UntypedStorage, int]]] = {}
        self._copies: dict[Part, HostCopy] = {}
        _reset_peak()

    @property
    def asleep(self) -> frozenset[Part]:
        """The parts that cannot be used now."""
        return frozenset(self._asleep)

    def require(self, *parts: Part) -> None:
        """Raises: TrainerError if one of these sleeps: to read an empty storage would end the
        process."""
        if missing := [part for part in parts if part in self._asleep]:
            raise TrainerError(
                "what is needed is not in device memory",
                where="trainer",
                found=f"{', '.join(missing)} asleep",
                do="wake it first (`MegatronEngine.occupy`)",
            )

    def occupy(
        self, tensors: Mapping[Part, Iterable[Tensor]], keep: Collection[Part]
    ) -> dict[str, float]:
        """Put to sleep what is awake and not to be kept, then wake what is to be kept. Repeated, it
        does nothing.

        `tensors`: those of every part; one of which an earlier part has the storage goes with that
        part. Answers `{"seconds", "peak_bytes", "kept_bytes", "used_bytes"}`: the most that this
        process had of the device since it was last asked (0 without CUDA), what its awake parts
        take, and what all processes together use of the device (without CUDA: what this one uses of
        the machine's memory).
        """
        start = time.perf_counter()
        peak = _peak_bytes()
        storages = _by_part(tensors)
        for part in PARTS:
            if part not in keep and part not in self._asleep:
                self._put_to_sleep(part, storages.get(part, []))
        _give_back()
        for part in PARTS:
            if part in keep and part in self._asleep:
                self._wake(part)
        _synchronize()
        seconds = time.perf_counter() - start
        _reset_peak()
        kept = sum(storage.nbytes() for found in storages.values() for storage in found)
        return {
            "seconds": seconds,
            "peak_bytes": peak,
            "kept_bytes": float(kept),
            "used_bytes": float(_used_bytes()),
        }

    @contextmanager
    def showing(self, kept: HostCopy, tensors: Iterable[Tensor]) -> Iterator[None]:
        """While this lasts, these of the weights have the values that were kept of them."""
        storages = distinct(tensors)
        own = self._copies.setdefault("weights", HostCopy())
        own.take(storages)
        try:
            kept.give(storages)
            yield
        finally:
            own.give(storages)
            _synchronize()

    def _put_to_sleep(self, part: Part, storages: list[UntypedStorage]) -> None:
        sizes = [(storage, storage.nbytes()) for storage in storages]
        if fixed := sum(not storage.resizable() for storage in storages):
            raise TrainerError(
                "memory of the state cannot be given up",
                where="trainer",
                found=f"{fixed} of {len(storages)} storages ({part}) are of a fixed size",
                do="a function of yours may have made NumPy arrays of parameters: copy them instead (`tensor.clone().numpy()`)",
            )
        if part != "gradients" and not (part == "teacher" and part in self._copies):
            copy = self._copies.get(part) or HostCopy()
            copy.take(storages)
            self._copies[part] = copy
        _synchronize()
        self._asleep[part] = sizes
        for storage in storages:
            storage.resize_(0)

    def _wake(self, part: Part) -> None:
        sizes = self._asleep[part]
        try:
            for storage, size_bytes in sizes:
                storage.resize_(size_bytes)
        except (
            RuntimeError
        ):  # there is no room: leave none of it behind, so that others find theirs
            for storage, _ in sizes:
                storage.resize_(0)
            _give_back()
            raise
        if part == "gradients":
            for storage, _ in sizes:
                _bytes_of(storage).zero_()
        else:
            self._copies[part].give([storage for storage, _ in sizes])
        _synchronize()
        del self._asleep[part]


class HostCopy:
    """The contents of some storages, one after another, in pinned memory that is kept for the next
    time."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def take(self, storages: list[UntypedStorage]) -> None:
        """Copy them here. Asynchronous on CUDA: synchronise before they go away."""
        self._grow(sum(storage.nbytes() for storage in storages))
        for ours, theirs in self._pieces(storages):
            ours.copy_(theirs, non_blocking=True)

    def give(self, storages: list[UntypedStorage]) -> None:
        """Copy them back, in the order and sizes they were taken with."""
        for ours, theirs in self._pieces(storages):
            theirs.copy_(ours, non_blocking=True)

    def _grow(self, size_bytes: int) -> None:
        missing = size_bytes - sum(len(chunk) for chunk in self._chunks)
        while missing > 0:
            size = min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, 1 << (missing - 1).bit_length()))
            self._chunks.append(
                torch.empty(size, dtype=torch.uint8, pin_memory=platform.CUDA_FOUND)
            )
            missing -= size

    def _pieces(self, storages: list[UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Where the bytes of each storage lie: (here, there), cut at the ends of chunks."""
        chunks = iter(self._chunks)
        room = next(chunks, torch.empty(0, dtype=torch.uint8))
        for storage in storages:
            rest = _bytes_of(storage)
            while len(rest):
                if not len(room):
                    room = next(chunks)
                size = min(len(room), len(rest))
                yield room[:size], rest[:size]
                room = room[size:]
                rest = rest[size:]


@dataclass(frozen=True, slots=True)
class Resident:
    """The models of a rank."""

    trained: tuple[Trained, ...]
    """The policy, and the critic if there is one."""
    teacher: Scorer | None = None

    def tensors(self) -> dict[Part, list[Tensor]]:
        """The tensors of every part. Gradients that the last step left are forgotten: they alias
        the buffers, or double them."""
        found: dict[Part, list[Tensor]] = {part: [] for part in PARTS}
        for trained in self.trained:
            trained.optimizer.zero_grad()
            found["weights"] += [*trained.model.parameters()]
            found["optimizer"] += [*_of_optimizer(trained.optimizer)]
            found["gradients"] += [buffer.grad_data for buffer in _buffers(trained.ddp)]
        if self.teacher is not None:
            found["teacher"] += [*self.teacher.model.parameters()]
        return found


def _of_optimizer(optimizer: Any) -> Iterator[Tensor]:
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (
                    value
                    for value in part.optimizer.state[parameter].values()
                    if torch.is_tensor(value)
                )


def _buffers(ddp: Any) -> Iterator[Any]:
    """Megatron's gradient buffers, dense and of experts."""
    yield from ddp.buffers
    yield from ddp.expert_parallel_buffers


def distinct(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of these tensors, in their order, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return [*{storage._cdata: storage for storage in storages}.values()]


def _by_part(tensors: Mapping[Part, Iterable[Tensor]]) -> dict[Part, list[UntypedStorage]]:
    """The storages of each part on this rank's device, each once; of several parts, the first in
    the order of PARTS has it."""
    seen: set[int] = set()
    found: dict[Part, list[UntypedStorage]] = {}
    for part in PARTS:
        found[part] = []
        for tensor in tensors.get(part, ()):
            storage = tensor.untyped_storage()
            if tensor.device.type == platform.device().type and storage._cdata not in seen:
                seen.add(storage._cdata)
                found[part].append(storage)
    return found


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if platform.CUDA_FOUND:
        torch.cuda.synchronize()


def _give_back() -> None:
    """Return what is free to the device, also what engines had mapped by CUDA IPC and have let
    go."""
    if platform.CUDA_FOUND:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _peak_bytes() -> float:
    return float(torch.cuda.max_memory_reserved()) if platform.CUDA_FOUND else 0.0


def _reset_peak() -> None:
    if platform.CUDA_FOUND:
        torch.cuda.reset_peak_memory_stats()


def _used_bytes() -> int:
    if platform.CUDA_FOUND:
        free, total = torch.cuda.mem_get_info()
        return total - free
    return psutil.Process().memory_info().rss
