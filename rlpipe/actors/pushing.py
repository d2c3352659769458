"""`Pusher`: a trainer rank's part in sending weights to engines. It keeps transports, and what they have open, between pushes.

    transport     engines on the trainer's GPUs    other engines
    tensor        ipc                              tensor; distributed, if others are on our GPUs
    distributed   -                                distributed

Not here: which weights are held (`trainer`), weights as files, which engines get them (`fleet`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlpipe.actors.placement import own_address
from rlpipe.actors.trainer_spec import TrainerSpec
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.errors import ConfigError, SyncError
from rlpipe.sync.distributed import DistributedTransport
from rlpipe.sync.fp8 import fp8_directory, quantised
from rlpipe.sync.ipc import IpcTransport
from rlpipe.sync.tensor import TensorTransport

Transport = TensorTransport | DistributedTransport | IpcTransport
Places = Mapping[str, Sequence[int]]
"""Engine by URL → the trainer ranks on its GPUs, in the order of its own ranks."""


class Pusher:
    """One rank's. Every rank makes one for an engine's life, and calls it with the same arguments."""

    def __init__(self, engine: MegatronEngine, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        self.engine, self.spec, self.rank, self.world_size = engine, spec, rank, world_size
        self._sync: SyncConfig | None = None
        self._transports: dict[type[Transport], Transport] = {}

    def push(self, engines: Sequence[str], stamp: str, sync: SyncConfig, places: Places) -> dict[str, Any]:
        """Send the weights: `{"bytes", "paused_s", "unknown": {url: why}}`. Collective; only rank 0 speaks to engines.

        Raises: SyncError (on rank 0) if they arrived nowhere.
        """
        if self._sync != sync:
            self.close()
            self._sync = sync
        sent_bytes, paused_s, unknown, arrived = 0, 0.0, {}, False
        for kind, urls in _kinds(engines, sync, places):
            transport = self._transport(kind, sync)
            if isinstance(transport, IpcTransport):
                transport.places = places
            tensors = served_tensors(self.engine, self.spec)
            if self.rank == 0:
                found = self._send(transport, tensors, urls, stamp, sync)
                unknown |= found["unknown"]
                arrived |= len(found["unknown"]) < len(urls)
                sent_bytes += found["bytes"]
                paused_s = max(paused_s, found["paused_s"])
            elif isinstance(transport, IpcTransport):
                sent_bytes += transport.assist(tensors, stamp, check=sync.check_weight_update_equal)
            else:
                sent_bytes += sum(tensor.nbytes for _, tensor in tensors)
        if self.rank == 0 and not arrived:
            raise SyncError("the weights arrived nowhere", where=f"push of {stamp}", found=unknown)
        return {"bytes": sent_bytes, "paused_s": paused_s, "unknown": unknown}

    def close(self) -> None:
        """Leave what is open to engines."""
        for transport in self._transports.values():
            if isinstance(transport, DistributedTransport):
                transport.close()
        self._transports.clear()

    def _send(
        self, transport: Transport, tensors: Iterable[tuple[str, Tensor]], urls: Sequence[str], stamp: str, sync: SyncConfig
    ) -> dict[str, Any]:
        pause = "retract" if sync.in_flight == "in_place" else "abort"
        try:
            report = transport.push(
                tensors, urls, stamp, pause=pause, check=sync.check_weight_update_equal, goes_on=not self.spec.engines_sleep
            )
        except SyncError as error:
            if not isinstance(error.found, dict):
                raise
            return {"bytes": 0, "paused_s": 0.0, "unknown": error.found}
        return {"bytes": report.size_bytes, "paused_s": report.paused_s, "unknown": report.unknown}

    def _transport(self, kind: type[Transport], sync: SyncConfig) -> Transport:
        if kind not in self._transports:
            common = {"buffer_size_bytes": sync.update_weight_buffer_size, "timeout_s": sync.timeout_s}
            self._transports[kind] = self._made(kind, common)
        return self._transports[kind]

    def _made(self, kind: type[Transport], common: dict[str, Any]) -> Transport:
        folder, parallel, device = served_dir(self.spec), self.spec.engine_tensor_parallel_size, platform.device()
        if kind is IpcTransport:
            return IpcTransport(folder, device=device, rank=self.rank, world_size=self.world_size, **common)
        if kind is TensorTransport:
            return TensorTransport(folder, tensor_parallel_size=parallel, **common)
        return DistributedTransport(folder, tensor_parallel_size=parallel, device=device, address=own_address, **common)


def served_dir(spec: TrainerSpec) -> str:
    """The directory that engines are started with, which says what they hold."""
    if spec.engine_quantization == "fp8":
        return fp8_directory(spec.model_dir, Path(spec.work_dir).parent / "models")
    return spec.model_dir


def served_tensors(engine: MegatronEngine, spec: TrainerSpec) -> Iterator[tuple[str, Tensor]]:
    """The held weights as engines hold them. As `MegatronEngine.named_hf_tensors`."""
    tensors = engine.named_hf_tensors()
    return quantised(tensors) if spec.engine_quantization == "fp8" else tensors


def _kinds(engines: Sequence[str], sync: SyncConfig, places: Places) -> Iterator[tuple[type[Transport], list[str]]]:
    """Which transport serves which of these engines. Raises: ConfigError if none can."""
    shared = [url for url in engines if url in places]
    others = [url for url in engines if url not in places]
    if shared and sync.transport == "distributed":
        raise ConfigError(
            "NCCL joins no two processes on one GPU, and engines lie on the trainer's",
            where="sync.transport",
            found="distributed",
            expected="tensor, disk or delta with resources.colocate",
        )
    if shared:
        yield IpcTransport, shared
    if others:
        by_broadcast = sync.transport == "distributed" or (places and platform.CUDA_FOUND)
        yield (DistributedTransport if by_broadcast else TensorTransport), others
