"""Device memory of a trainer rank: parts of the state are offloaded and restored.

| part | content | while offloaded |
|---|---|---|
| weights | policy and critic | in pinned CPU memory |
| optimizer | main parameters and moments | in pinned CPU memory |
| gradients | gradient buffers | dropped: every optimizer step starts from zeros |
| teacher | frozen weights | in pinned CPU memory; copied only the first time |

`DeviceMemory.occupy` selects the parts in device memory. `DeviceMemory.swapped_weights` computes
with the reference's weights, which a `HostCopy` keeps in pinned CPU memory.

A part is offloaded by resizing the storages of its tensors to 0. The tensors, and every view that
Megatron keeps of them (parameters in DDP's buffer, buckets), stay valid objects and show the same
values when the storage is filled again. Only addresses change, so no code may keep an address.
torch_memory_saver would keep addresses too. But it must be loaded into the process before anything
else, copies gradients as well, and its memory cannot be shared by CUDA IPC, which moves weights to
engines on the same GPU. Freed memory goes back to the device for other processes.

A run with a reference keeps its weights twice in pinned memory. Offloading needs no more than that.
The following stays on the device: the CUDA context, NCCL's buffers (a process group cannot release
them) and constants of the model such as those of rotary embeddings. Without CUDA, parts move
between two regions of CPU memory. `rlpipe.actors.sharing` decides when a part is offloaded.
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
from rlpipe.engines.megatron.model.build import ScoringModel, TrainedModel
from rlpipe.errors import TrainerError

Part = Literal["weights", "optimizer", "gradients", "teacher"]
PARTS: tuple[Part, ...] = get_args(Part)
# torch allocates pinned memory in powers of two, so a chunk of this size wastes nothing.
CHUNK_BYTES = 256 * 1024**2
SMALLEST_CHUNK_BYTES = 4096


class DeviceMemory:
    """The parts of one rank that can be offloaded.

    Not thread safe. Not collective, but all ranks should make the same calls.
    """

    def __init__(self) -> None:
        self._offloaded: dict[Part, list[tuple[UntypedStorage, int]]] = {}
        """The storages of each offloaded part, with their sizes in bytes."""
        self._copies: dict[Part, HostCopy] = {}
        _reset_peak()

    @property
    def offloaded(self) -> frozenset[Part]:
        """The parts that are not in device memory."""
        return frozenset(self._offloaded)

    def require(self, *parts: Part) -> None:
        """Raises: TrainerError if one of these parts is offloaded."""
        # Reading an empty storage would crash the process.
        if missing := [part for part in parts if part in self._offloaded]:
            raise TrainerError(
                "parts of the state are not in device memory",
                where="trainer",
                found=f"{', '.join(missing)} offloaded",
                do="restore them first (`MegatronEngine.occupy`)",
            )

    def occupy(
        self, tensors: Mapping[Part, Iterable[Tensor]], keep: Collection[Part]
    ) -> dict[str, float]:
        """Offload the parts that are not in `keep`, then restore those that are. Idempotent.

        `tensors`: the tensors of every part. A storage that several parts share belongs to the
        first of them in the order of PARTS.

        Returns `seconds`; `peak_bytes`: this process's peak on the device since the previous call
        (0 without CUDA); `kept_bytes`: the size of the parts in device memory; `used_bytes`: the
        device memory of all processes (without CUDA: this process's CPU memory).
        """
        start = time.perf_counter()
        peak = _peak_bytes()
        storages = _storages_by_part(tensors)
        for part in PARTS:
            if part not in keep and part not in self._offloaded:
                self._offload(part, storages.get(part, []))
        _release_cached()
        for part in PARTS:
            if part in keep and part in self._offloaded:
                self._restore(part)
        _synchronize()
        seconds = time.perf_counter() - start
        _reset_peak()
        kept = sum(storage.nbytes() for of_part in storages.values() for storage in of_part)
        return {
            "seconds": seconds,
            "peak_bytes": peak,
            "kept_bytes": float(kept),
            "used_bytes": float(_used_bytes()),
        }

    @contextmanager
    def swapped_weights(self, copy: HostCopy, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Give these weights the values of `copy` within the context."""
        storages = distinct_storages(tensors)
        # The offloading buffer of the weights is free here: they are in device memory.
        own = self._copies.setdefault("weights", HostCopy())
        own.copy_from(storages)
        try:
            copy.copy_to(storages)
            yield
        finally:
            own.copy_to(storages)
            _synchronize()

    def _offload(self, part: Part, storages: list[UntypedStorage]) -> None:
        sizes = [(storage, storage.nbytes()) for storage in storages]
        if fixed := sum(not storage.resizable() for storage in storages):
            # torch marks a storage as fixed when `tensor.numpy()` exposes it.
            raise TrainerError(
                "memory of the state cannot be released",
                where="trainer",
                found=f"{fixed} of {len(storages)} storages ({part}) have a fixed size",
                do="do not make NumPy arrays of parameters in user functions: copy them "
                "(`tensor.clone().numpy()`)",
            )
        if part != "gradients" and not (part == "teacher" and part in self._copies):
            copy = self._copies.get(part) or HostCopy()
            copy.copy_from(storages)
            self._copies[part] = copy
        _synchronize()
        self._offloaded[part] = sizes
        for storage in storages:
            storage.resize_(0)

    def _restore(self, part: Part) -> None:
        sizes = self._offloaded[part]
        try:
            for storage, size_bytes in sizes:
                storage.resize_(size_bytes)
        except RuntimeError:
            # Out of memory: release all of this part, so that other processes can continue.
            for storage, _ in sizes:
                storage.resize_(0)
            _release_cached()
            raise
        if part == "gradients":
            for storage, _ in sizes:
                _bytes_of(storage).zero_()
        else:
            self._copies[part].copy_to([storage for storage, _ in sizes])
        _synchronize()
        del self._offloaded[part]


class HostCopy:
    """A copy of several storages in pinned CPU memory, which is reused by later copies."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []

    def copy_from(self, storages: list[UntypedStorage]) -> None:
        """Copy the storages' contents here.

        Asynchronous on CUDA: synchronise before the storages are released.
        """
        self._grow(sum(storage.nbytes() for storage in storages))
        for host, device in self._pieces(storages):
            host.copy_(device, non_blocking=True)

    def copy_to(self, storages: list[UntypedStorage]) -> None:
        """Copy the contents back, in the order and sizes of `copy_from`."""
        for host, device in self._pieces(storages):
            device.copy_(host, non_blocking=True)

    def _grow(self, size_bytes: int) -> None:
        missing = size_bytes - sum(len(chunk) for chunk in self._chunks)
        while missing > 0:
            size = min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, 1 << (missing - 1).bit_length()))
            self._chunks.append(
                torch.empty(size, dtype=torch.uint8, pin_memory=platform.CUDA_FOUND)
            )
            missing -= size

    def _pieces(self, storages: list[UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the (host, device) bytes of each storage, split at the ends of chunks."""
        chunks = iter(self._chunks)
        free = next(chunks, torch.empty(0, dtype=torch.uint8))
        for storage in storages:
            rest = _bytes_of(storage)
            while len(rest):
                if not len(free):
                    free = next(chunks)
                size = min(len(free), len(rest))
                yield free[:size], rest[:size]
                free = free[size:]
                rest = rest[size:]


@dataclass(frozen=True, slots=True)
class RankModels:
    """The models of a rank."""

    trained: tuple[TrainedModel, ...]
    """The policy, and the critic if it shares the ranks."""
    teacher: ScoringModel | None = None

    def tensors(self) -> dict[Part, list[Tensor]]:
        """Return the tensors of every part."""
        tensors: dict[Part, list[Tensor]] = {part: [] for part in PARTS}
        for trained in self.trained:
            # Gradients of the last step alias the buffers or duplicate them.
            trained.optimizer.zero_grad()
            tensors["weights"] += _parameters(trained)
            tensors["optimizer"] += [*_optimizer_tensors(trained.optimizer)]
            tensors["gradients"] += [
                buffer.grad_data
                for chunk in trained.chunks
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ]
        if self.teacher is not None:
            tensors["teacher"] += _parameters(self.teacher)
        return tensors


def _parameters(scorer: ScoringModel) -> list[Tensor]:
    return [parameter for model in scorer.models for parameter in model.parameters()]


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (
                    value
                    for value in part.optimizer.state[parameter].values()
                    if torch.is_tensor(value)
                )


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages of these tensors in order, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return [*{storage._cdata: storage for storage in storages}.values()]


def _storages_by_part(
    tensors: Mapping[Part, Iterable[Tensor]],
) -> dict[Part, list[UntypedStorage]]:
    """Return the storages of each part on this rank's device, each in the first part that has
    it."""
    seen: set[int] = set()
    storages: dict[Part, list[UntypedStorage]] = {}
    for part in PARTS:
        storages[part] = []
        for tensor in tensors.get(part, ()):
            storage = tensor.untyped_storage()
            if tensor.device.type == platform.device().type and storage._cdata not in seen:
                seen.add(storage._cdata)
                storages[part].append(storage)
    return storages


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if platform.CUDA_FOUND:
        torch.cuda.synchronize()


def _release_cached() -> None:
    """Return free memory to the device, also memory that engines had mapped by CUDA IPC."""
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
