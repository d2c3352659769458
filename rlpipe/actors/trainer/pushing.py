"""`Pusher`: a trainer rank's part in sending weights to engines. It keeps transports, and what they
have open, between pushes.

    transport     engines on the trainer's GPUs    other engines
    tensor        ipc                              tensor; distributed, if others are on our GPUs
    distributed   -                                distributed; by each pipeline stage, if there are several

Not here: which weights are held (`trainer`), weights as files, which engines get them (`fleet`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlpipe.actors.ray.placement import own_address
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.actors.trainer.staged_push import StagedPush
from rlpipe.config.train import SyncConfig
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.errors import ConfigError, SyncError
from rlpipe.sync.fp8 import fp8_directory, quantised
from rlpipe.sync.transports.distributed import DistributedTransport
from rlpipe.sync.transports.ipc import IpcTransport
from rlpipe.sync.transports.tensor import TensorTransport

Transport = TensorTransport | DistributedTransport | IpcTransport
Places = Mapping[str, Sequence[int]]
"""Engine by URL → the trainer ranks on its GPUs, in the order of its own ranks."""


class Pusher:
    """One rank's. Every rank makes one for an engine's life, and calls it with the same
    arguments."""

    def __init__(
        self, engine: MegatronEngine, spec: TrainerSpec, *, rank: int, world_size: int
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        self._sync: SyncConfig | None = None
        self._transports: dict[type[Transport], Transport] = {}
        self._staged: StagedPush | None = None

    def push(
        self, engines: Sequence[str], stamp: str, sync: SyncConfig, places: Places
    ) -> dict[str, Any]:
        """Send the weights: `{"bytes", "paused_s", "steps", "unknown": {url: why}}`, `steps` in
        seconds. Collective; only rank 0 speaks to engines.

        Raises: SyncError (on rank 0) if they arrived nowhere.
        """
        if self._sync != sync:
            self.close()
            self._sync = sync
        sent_bytes = 0
        paused_s = 0.0
        unknown = {}
        arrived = False
        steps = Counter[str]()
        for kind, urls in _kinds(engines, sync, places):
            found = self._push_to(kind, urls, stamp, sync, places)
            sent_bytes += found["bytes"]
            if self.rank == 0:
                unknown |= found["unknown"]
                arrived |= len(found["unknown"]) < len(urls)
                paused_s = max(paused_s, found["paused_s"])
                steps.update(found["steps"])
        if self.rank == 0 and not arrived:
            raise SyncError("the weights arrived nowhere", where=f"push of {stamp}", found=unknown)
        return {"bytes": sent_bytes, "paused_s": paused_s, "steps": dict(steps), "unknown": unknown}

    def close(self) -> None:
        """Leave what is open to engines."""
        for transport in self._transports.values():
            if isinstance(transport, DistributedTransport):
                transport.close()
        self._transports.clear()
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def _by_stages(self, sync: SyncConfig) -> bool:
        """Does each pipeline stage send its own? A push that is checked is sent twice, by one rank
        that has kept it all."""
        return (
            self.spec.train.parallel.pipeline_model_parallel_size > 1
            and not sync.check_weight_update_equal
        )

    def _push_by_stages(self, urls: Sequence[str], stamp: str, sync: SyncConfig) -> dict[str, Any]:
        if self._staged is None:
            self._staged = StagedPush(
                self.engine,
                served_dir(self.spec),
                rank=self.rank,
                address=own_address(),
                tensor_parallel_size=self.spec.engine_tensor_parallel_size,
                buffer_size_bytes=sync.update_weight_buffer_size,
                timeout_s=sync.timeout_s,
            )
        return self._staged.push(
            lambda transport, tensors: self._send(transport, tensors, urls, stamp, sync),
            lambda tensors: as_served(tensors, self.spec),
        )

    def _push_to(
        self,
        kind: type[Transport],
        urls: Sequence[str],
        stamp: str,
        sync: SyncConfig,
        places: Places,
    ) -> dict[str, Any]:
        if kind is DistributedTransport and self._by_stages(sync):
            return self._push_by_stages(urls, stamp, sync)
        transport = self._transport(kind, sync)
        if isinstance(transport, IpcTransport):
            transport.places = places
        tensors = served_tensors(self.engine, self.spec)
        if self.rank == 0:
            return self._send(transport, tensors, urls, stamp, sync)
        if isinstance(transport, IpcTransport):
            return {"bytes": transport.assist(tensors, stamp, check=sync.check_weight_update_equal)}
        return {"bytes": sum(tensor.nbytes for _, tensor in tensors)}

    def _send(
        self,
        transport: Transport,
        tensors: Iterable[tuple[str, Tensor]],
        urls: Sequence[str],
        stamp: str,
        sync: SyncConfig,
    ) -> dict[str, Any]:
        pause = "retract" if sync.in_flight == "in_place" else "abort"
        try:
            report = transport.push(
                tensors,
                urls,
                stamp,
                pause=pause,
                check=sync.check_weight_update_equal,
                goes_on=not self.spec.engines_sleep,
            )
        except SyncError as error:
            if not isinstance(error.found, dict):
                raise
            return {"bytes": 0, "paused_s": 0.0, "steps": {}, "unknown": error.found}
        return {
            "bytes": report.size_bytes,
            "paused_s": report.paused_s,
            "steps": report.steps,
            "unknown": report.unknown,
        }

    def _transport(self, kind: type[Transport], sync: SyncConfig) -> Transport:
        if kind not in self._transports:
            common = {
                "buffer_size_bytes": sync.update_weight_buffer_size,
                "timeout_s": sync.timeout_s,
            }
            self._transports[kind] = self._made(kind, common)
        return self._transports[kind]

    def _made(self, kind: type[Transport], common: dict[str, Any]) -> Transport:
        folder = served_dir(self.spec)
        parallel = self.spec.engine_tensor_parallel_size
        device = platform.device()
        if kind is IpcTransport:
            return IpcTransport(
                folder, device=device, rank=self.rank, world_size=self.world_size, **common
            )
        if kind is TensorTransport:
            return TensorTransport(folder, tensor_parallel_size=parallel, **common)
        return DistributedTransport(folder, tensor_parallel_size=parallel, device=device, **common)


def served_dir(spec: TrainerSpec) -> str:
    """The directory that engines are started with, which says what they hold."""
    if spec.engine_quantization == "fp8":
        return fp8_directory(spec.model_dir, Path(spec.work_dir).parent / "models")
    return spec.model_dir


def served_tensors(engine: MegatronEngine, spec: TrainerSpec) -> Iterator[tuple[str, Tensor]]:
    """The held weights as engines hold them. As `MegatronEngine.named_hf_tensors`."""
    return as_served(engine.named_hf_tensors(), spec)


def as_served(
    tensors: Iterator[tuple[str, Tensor]], spec: TrainerSpec
) -> Iterator[tuple[str, Tensor]]:
    """Trained tensors as engines hold them."""
    return quantised(tensors) if spec.engine_quantization == "fp8" else tensors


def _kinds(
    engines: Sequence[str], sync: SyncConfig, places: Places
) -> Iterator[tuple[type[Transport], list[str]]]:
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
