"""`Pusher`: a trainer rank's part in sending weights. It keeps transports between pushes.

sync.transport   engines on the trainer's GPUs   other engines
tensor           ipc                             tensor; on CUDA distributed if some use ipc
distributed      (refused)                       distributed; staged with several stages
disk, delta      files (`Pusher.write`)          files (`Pusher.write`)
adapter          adapter                         adapter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlpipe.actors.ray.placement import own_address
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.config.train import SyncConfig
from rlpipe.config.weight_file_hooks import post_write
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.bridges.stages import pipeline_position, stage_weights
from rlpipe.engines.megatron.checkpoint.adapter_file import peft_weights
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.errors import ConfigError, SyncError
from rlpipe.sync.fp8 import fp8_directory, quantize
from rlpipe.sync.session import PushReport
from rlpipe.sync.transports.base import Push, Transport, TransportSetup
from rlpipe.sync.transports.delta import DeltaTransport
from rlpipe.sync.transports.registry import TRANSPORTS
from rlpipe.sync.transports.versions import Share, WeightStore

EngineRanks = Mapping[str, Sequence[int]]
"""Engine URL → trainer ranks on that engine's GPUs, in the order of the engine's ranks."""


class Pusher:
    """Sends the held weights of one rank.

    Every rank constructs one for the life of its Megatron engine, and calls it with the same
    arguments. All calls are collective.
    """

    def __init__(
        self, engine: MegatronEngine, spec: TrainerSpec, *, rank: int, world_size: int
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        self._sync: SyncConfig | None = None
        self._transports: dict[str, Transport[Any]] = {}

    def push(
        self, engines: Sequence[str], stamp: str, sync: SyncConfig, engine_ranks: EngineRanks
    ) -> dict[str, Any]:
        """Send the weights to engines: `{"bytes", "paused_s", "steps", "unknown": {url: reason}}`.

        `steps` is in seconds. Only rank 0 calls engines.
        Raises: SyncError (on rank 0) if no engine got the weights.
        """
        sent_bytes = 0
        paused_s = 0.0
        unknown: dict[str, str] = {}
        arrived = False
        steps = Counter[str]()
        chosen = choose_transports(engines, sync, engine_ranks, by_stage=self._has_stages)
        for name, urls in chosen:
            push = Push(
                stamp,
                urls,
                engine_ranks=engine_ranks,
                pause="retract" if sync.in_flight == "in_place" else "abort",
                resume=not self.spec.engines_sleep,
                check=sync.check_weight_update_equal,
            )
            report = self._send(name, push, sync)
            sent_bytes += report.size_bytes
            unknown |= report.unknown
            arrived |= len(report.unknown) < len(urls)
            paused_s = max(paused_s, report.paused_s)
            steps.update(report.steps)
        if self.rank == 0 and not arrived:
            raise SyncError("the weights arrived nowhere", where=f"push of {stamp}", found=unknown)
        return {"bytes": sent_bytes, "paused_s": paused_s, "steps": dict(steps), "unknown": unknown}

    def write(
        self, stamp: str, base: str | None, sync: SyncConfig, engines: Sequence[str] = ()
    ) -> Share:
        """Write this rank's share of the weights as files: all of it, or changes since `base`.

        `engines`: URLs, for the user function that is called afterwards
        (`sync.custom_update_weight_post_write_path`). Raises: SyncError, also if it fails.
        """
        transport = self._transport(sync.transport, sync)
        share = transport.send(self._tensors(), Push(stamp, base=base))
        store = WeightStore(transport.setup.files_root)
        post_write(sync, self.spec.hook_args, store.location(stamp), engines)
        return share

    @property
    def remembered(self) -> str | None:
        """Stamp of the weights that `write` can write changes of; None for no weights."""
        delta = self._transports.get("delta")
        return delta.remembered if isinstance(delta, DeltaTransport) else None

    def close(self) -> None:
        """Close all transports."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def _send(self, name: str, push: Push, sync: SyncConfig) -> PushReport:
        """Send through one transport. A push that reached no engine is reported, not raised."""
        transport = self._transport(name, sync)
        if name == "adapter":
            tensors = peft_weights(self.engine.trained)
        else:
            tensors = self._stage_tensors() if transport.per_stage else self._tensors()
        try:
            return transport.send(tensors, push)
        except SyncError as error:
            # Another transport of this push may have reached its engines.
            if self.rank > 0 or not isinstance(error.found, dict):
                raise
            return PushReport(push.stamp, unknown=error.found)

    def _transport(self, name: str, sync: SyncConfig) -> Transport[Any]:
        if self._sync != sync:
            self.close()
            self._sync = sync
        if name not in self._transports:
            self._transports[name] = TRANSPORTS[name](self._setup(sync))
        return self._transports[name]

    def _setup(self, sync: SyncConfig) -> TransportSetup:
        scratch = Path(self.spec.work_dir)
        scratch.mkdir(parents=True, exist_ok=True)
        return TransportSetup(
            model_dir=served_dir(self.spec),
            sync=sync,
            rank=self.rank,
            world_size=self.world_size,
            lora=self.spec.train.lora,
            device=platform.device(),
            engine_tensor_parallel_size=self.spec.engine_tensor_parallel_size,
            **self._stage_fields(),
            files_root=sync.disk_dir(self.spec.store_root, self.spec.engine_quantization),
            scratch=scratch,
        )

    def _stage_fields(self) -> dict[str, Any]:
        if not self._has_stages:
            return {}
        position = pipeline_position()
        return {
            "stage": position.stage,
            "num_stages": position.stages,
            "sends_stage": position.is_sender,
            "address": own_address(),
        }

    @property
    def _has_stages(self) -> bool:
        return self.spec.train.parallel.pipeline_model_parallel_size > 1

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return as_served(self.engine.named_hf_tensors(), self.spec)

    def _stage_tensors(self) -> Iterator[tuple[str, Tensor]]:
        trained = self.engine.trained
        return as_served(stage_weights(trained.bridge, trained.chunks), self.spec)


def served_dir(spec: TrainerSpec) -> str:
    """Return the directory that engines are started with."""
    if spec.engine_quantization == "fp8":
        return fp8_directory(spec.model_dir, Path(spec.work_dir).parent / "models")
    return spec.model_dir


def as_served(
    tensors: Iterator[tuple[str, Tensor]], spec: TrainerSpec
) -> Iterator[tuple[str, Tensor]]:
    """Convert trained tensors to those that engines hold."""
    return quantize(tensors) if spec.engine_quantization == "fp8" else tensors


def choose_transports(
    engines: Sequence[str], sync: SyncConfig, engine_ranks: EngineRanks, *, by_stage: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yield name of transport and the engines that it serves.

    `by_stage`: the trainer has several pipeline stages. Raises: ConfigError if no transport can
    serve an engine.
    """
    if sync.transport == "adapter":
        yield "adapter", [*engines]
        return
    shared = [url for url in engines if url in engine_ranks]
    others = [url for url in engines if url not in engine_ranks]
    if shared and sync.transport == "distributed":
        raise ConfigError(
            "NCCL cannot join two processes on one GPU, and engines share the trainer's GPUs",
            where="sync.transport",
            found="distributed",
            expected="tensor, disk or delta with resources.colocate",
        )
    if shared:
        yield "ipc", shared
    if not others:
        return
    assert sync.transport in ("tensor", "distributed"), f"no rule for {sync.transport}"
    if sync.transport != "distributed" and not (engine_ranks and platform.CUDA_FOUND):
        yield "tensor", others
    # A checked push is sent twice, by one rank that keeps all tensors.
    elif by_stage and not sync.check_weight_update_equal:
        yield "staged", others
    else:
        yield "distributed", others
