"""`EngineActor` and `RouterActor`: Ray actors that start and watch SGLang servers and the router.

An engine reports the weights that its server names, not those of the last push. An engine that
spans nodes has an actor with a server on each node; the server on node 0 answers for the engine,
and `supervised` starts and ends them together. Generation requests go to the router over HTTP, not
through these actors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.actors.ray.placement import LOOPBACK, own_address
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.model import EngineConfig, ModelSource, ResourcesConfig
from rlpipe.config.train import LoraConfig
from rlpipe.config.weight_file_hooks import pre_read
from rlpipe.engines.sglang.admin import (
    MEMORY_TAGS,
    Engine,
    EngineLoad,
    MemoryTag,
    server_facts,
)
from rlpipe.engines.sglang.external import ExternalRouter, ExternalServer, ServerRequirements
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Part, Server
from rlpipe.errors import DeadlineExceeded, EngineError, EngineUnavailable
from rlpipe.model_dir import directory_here
from rlpipe.system.compile_caches import keep_compiled
from rlpipe.system.gpus import GpuReader, visible_gpus
from rlpipe.system.ports import free_port
from rlpipe.types import WeightVersion

FILES = "files"
"""Concurrency group of `fetch_weights`, so that other calls are answered during a copy."""

# With data parallel attention SGLang also listens on some of the ports after the rendezvous.
RENDEZVOUS_MORE_PORTS = 15
"""Free ports that must follow the rendezvous port of servers on several nodes."""

LOAD_TIMEOUT_S = 1.0
"""Deadline of a server's answer about its load, which only metrics need."""
MEMORY_TIMEOUT_S = 50.0
"""Deadline of each call about GPU memory; shorter than the fleet's deadline for all of them."""


@dataclass(frozen=True)
class EngineSpec:
    """Settings of a server. Another spec needs another server."""

    model_dir: str
    engine: EngineConfig
    resources: ResourcesConfig
    dtype: str
    seed: int
    trust_remote_code: bool
    logs: str
    deterministic: bool = False
    reads_text: bool = False
    names_experts: bool = False
    lora: LoraConfig | None = None
    """Adapters that pushes replace; None: pushes replace weights."""
    source: ModelSource | None = None
    """Source of the model, for nodes that do not have `model_dir`."""
    devices: tuple[tuple[str, ...], ...] | None = None
    """CUDA_VISIBLE_DEVICES of each server, in the order of `layout.engine_names`; None: the GPUs of
    its actor."""

    @classmethod
    def of(
        cls, spec: ClusterSpec, cluster: str, devices: tuple[tuple[str, ...], ...] | None
    ) -> EngineSpec:
        """Return the settings of a run's engines, and create the folder of their logs."""
        config = spec.config
        logs = Path(spec.home) / cluster / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # The name as resolved: a warm start names the cluster of its run, which has no key.
        resources = config.resources.model_copy(update={"cluster": cluster})
        if resources.resizable:
            # Engines that join or leave change nothing for the others.
            one = {"rollout_num_gpus": resources.rollout_num_gpus_per_engine}
            resources = resources.model_copy(update=one)
        return cls(
            model_dir=spec.model_dir,
            engine=config.engine,
            resources=resources,
            dtype=config.model.dtype,
            seed=config.train.seed,
            trust_remote_code=getattr(config.model.source, "trust_remote_code", False),
            logs=str(logs),
            deterministic=config.deterministic,
            reads_text=config.reads_text,
            names_experts=config.train.use_rollout_routing_replay,
            lora=config.train.lora if config.sync.transport == "adapter" else None,
            source=config.model.source,
            devices=devices,
        )

    def served_dir(self) -> str:
        """Return the directory that the server loads: the model's, or its quantized copy.

        Raises: ConfigError, ResourceError.
        """
        model_dir = directory_here(self.model_dir, self.source)
        if self.engine.quantization == "fp8":
            # Imports torch. Processes that only hold the settings do without it.
            from rlpipe.sync.fp8 import fp8_directory

            return fp8_directory(model_dir, Path(self.logs).parents[1] / "models")
        return model_dir

    def requirements(self) -> ServerRequirements:
        """Return the settings that an external server must have."""
        return ServerRequirements(
            model_dir=self.served_dir(),
            dtype=self.dtype,
            tensor_parallel_size=self.resources.rollout_num_gpus_per_engine,
            quantization=self.engine.quantization,
            reads_text=self.reads_text,
            names_experts=self.names_experts,
            deterministic=self.deterministic,
        )


class EngineActor:
    """One SGLang server: started here, or an external one that is used but never ended.

    For an engine that spans nodes, this is the server on one of them. Only node 0 answers calls
    about weights, memory and tokens.
    """

    def __init__(self, number: int, cwd: str, node: int = 0) -> None:
        os.chdir(cwd)  # model directories are given relative to the driver's directory
        self.number = number
        self.node = node
        self._spec: EngineSpec | None = None
        self._met_at: str | None = None
        self._server: Server | ExternalServer | None = None
        self._unknown = True
        self._facts: dict[str, Any] = {}
        self._gpus = GpuReader([])
        self._in_memory: set[MemoryTag] = set(MEMORY_TAGS)

    def rendezvous(self, spec: EngineSpec) -> str | None:
        """Return the rendezvous of this engine's servers, if this server is up for this spec."""
        return self._met_at if self._is_up(spec) else None

    def new_rendezvous(self) -> str:
        """Return this machine's address and a free port as a rendezvous for the servers."""
        return f"{own_address()}:{free_port(own_address(), following=RENDEZVOUS_MORE_PORTS)}"

    def start(self, spec: EngineSpec, rendezvous: str | None = None) -> str:
        """Start the server of a spec, unless it is up and answers. Return its URL.

        `rendezvous`: for an engine that spans nodes; each server waits there for all others.
        Raises: as `Server` and its `wait_ready`, or as `ExternalServer.start`.
        """
        if self._server is not None and self._met_at == rendezvous and self._is_up(spec):
            return self._server.url
        self.stop()  # also a server of another spec, which would keep the GPU
        self._spec = spec
        self._met_at = rendezvous
        self._unknown = True
        self._in_memory = set(MEMORY_TAGS)  # a new server has allocated everything
        self._server = self._create_server(spec)
        self._server.start()
        self._server.wait_ready(spec.resources.start_timeout_s)
        self._facts = {} if self.node else asyncio.run(_facts(self._server.url))
        self._gpus = GpuReader(self._gpus_of(spec))
        return self._server.url

    def _is_up(self, spec: EngineSpec) -> bool:
        if self._spec != spec or self._server is None or not self._server.alive:
            return False
        return self.node > 0 or asyncio.run(_weight_version(self._server.url)) is not None

    def _create_server(self, spec: EngineSpec) -> Server | ExternalServer:
        if external := spec.resources.external_engines:
            return ExternalServer(external[self.number], spec.requirements())
        nodes = spec.resources.engine_nodes
        part = None
        if nodes > 1:
            assert self._met_at is not None, "servers of several nodes need a rendezvous"
            part = Part(self.node, nodes, self._met_at)
        # Only the server on node 0 gets requests from other machines.
        if self.node == 0:
            engine = _with_host(spec.engine)
        else:
            engine = spec.engine.model_copy(update={"host": LOOPBACK})
        suffix = f"-{self.node}" if self.node else ""
        keep_compiled(Path(spec.logs).absolute().parents[1])
        return Server(
            spec.served_dir(),
            engine,
            spec.resources,
            dtype=spec.dtype,
            port=None,
            log_path=Path(spec.logs) / f"engine-{self.number}{suffix}.log",
            # otherwise two engines would sample the same tokens for the same prompt
            seed=spec.seed + self.number,
            trust_remote_code=spec.trust_remote_code,
            deterministic=spec.deterministic,
            reads_text=spec.reads_text,
            devices=self._devices(spec),
            names_experts=spec.names_experts,
            lora=spec.lora,
            part=part,
        )

    def _devices(self, spec: EngineSpec) -> tuple[str, ...] | None:
        """Return the server's GPUs as in CUDA_VISIBLE_DEVICES; None: those of this actor."""
        if spec.devices is None:
            return None
        return spec.devices[self.number * spec.resources.engine_nodes + self.node]

    def _gpus_of(self, spec: EngineSpec) -> Sequence[str]:
        """Return the GPUs of the server; none for an external one, which may be elsewhere."""
        if spec.resources.external_engines:
            return ()
        return self._devices(spec) or visible_gpus()

    def status(self) -> dict[str, Any]:
        """Return `{"number", "url", "alive", "stamp", "pid", "facts", "load", "gpus"}`.

        `stamp` is the weight version that the server names. It is None if the server does not
        answer, if a push began and its end was not confirmed, and on nodes other than 0. `load` is
        an `EngineLoad`, None where the stamp is None; `gpus` are readings of the server's GPUs.
        """
        server = self._server
        if server is None or not server.alive:
            return {
                "number": self.number,
                "url": None,
                "alive": False,
                "stamp": None,
                "pid": None,
                "facts": {},
                "load": None,
                "gpus": [],
            }
        stamp = None
        load = None
        if not self._unknown and self.node == 0:
            stamp, load = asyncio.run(_version_and_load(server.url))
        return {
            "number": self.number,
            "url": server.url,
            "alive": True,
            "stamp": stamp,
            "pid": server.pid,
            "facts": self._facts,
            "load": load,
            "gpus": self._gpus.read(),
        }

    def generates(self, timeout_s: float) -> bool:
        """True if the server generates a token within this time. It must not be paused."""
        return (
            self._server is not None
            and self._server.alive
            and asyncio.run(_generates(self._server.url, timeout_s))
        )

    def require_spans(self) -> None:
        """Check the server as `Engine.require_spans`. Raises: EngineError, EngineUnavailable."""
        if self._server is None:
            raise EngineUnavailable(
                "the server has not been started", where=f"engine/{self.number}"
            )
        asyncio.run(_require_spans(self._server.url))

    def mark(self, *, unknown: bool) -> None:
        """Set whether the held weights are unknown.

        True before the first byte of a push. False after the echo: then the server's answer counts.
        """
        self._unknown = unknown

    def release_memory(self, keep: Collection[MemoryTag]) -> None:
        """Release all GPU memory except `keep` (`MEMORY_TAGS`).

        The server samples nothing until it has all memory again. Requests in flight end with their
        tokens so far. Without its weights, the held version is unknown. Raises: EngineError,
        DeadlineExceeded; then the server's memory is undefined, and the server should be stopped.
        """
        released = self._in_memory - set(keep)
        if released and self._server is not None and self._server.alive:
            self._unknown = self._unknown or "weights" in released
            asyncio.run(_release_memory(self._server.url, sorted(released)))
            # after the call: if it fails, the next one releases the same parts again
            self._in_memory -= released

    def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate this GPU memory again.

        The server samples again once it has all memory and its weights are known. Raises: as
        `release_memory`.
        """
        missing = set(tags) - self._in_memory
        if missing and self._server is not None and self._server.alive:
            # With unknown weights the push that follows resumes the server.
            samples = not self._unknown and self._in_memory | missing == set(MEMORY_TAGS)
            asyncio.run(_resume_memory(self._server.url, sorted(missing), samples=samples))
            self._in_memory |= missing

    def fetch_weights(
        self, root: str, stamp: str, folder: str, timeout_s: float, *, before: str | None = None
    ) -> str:
        """Copy a weight version into this machine's mirror `folder`; return a loadable directory.

        `before`: path of a user function that is called first
        (`sync.custom_pull_weights_pre_read_path`). Runs in the concurrency group `files`.
        Raises: as `Mirror.fetch`; SyncError if the function fails.
        """
        # They import torch, which an engine without weight files does not need.
        from rlpipe.sync.transports.mirror import Mirror
        from rlpipe.sync.transports.versions import WeightStore

        store = WeightStore(root)
        folder_of_versions = store.location(stamp).rpartition("/")[0]
        pre_read(before, folder_of_versions, WeightVersion.version_of(stamp))
        return str(Mirror(folder).fetch(store, stamp, timeout_s=timeout_s))

    def hand_back(self) -> None:
        """End all requests with their tokens so far, for a server that leaves the run.

        Requests that arrive later wait until their connection ends. Raises: EngineError,
        DeadlineExceeded.
        """
        if self._server is not None and self._server.alive:
            asyncio.run(_hand_back(self._server.url))

    def stop(self) -> None:
        """Stop the server. An external server keeps running, and is checked before its next use."""
        self._unknown = True
        if isinstance(self._server, ExternalServer):
            self._server.require_check()
        elif self._server is not None:
            self._server.stop()


class RouterActor:
    """The sglang-router in front of the engines: started here, or an external one."""

    def __init__(self, cwd: str) -> None:
        os.chdir(cwd)
        self._router: Router | ExternalRouter | None = None
        self._config: EngineConfig | None = None

    def start(
        self, engine: EngineConfig, resources: ResourcesConfig, logs: str, engines: list[str]
    ) -> str:
        """Start the router unless it runs with this configuration; return its URL.

        Engines other than `engines` are removed. A new engine gets requests once it is admitted. A
        router that died is started at the same address, where clients retry. Raises: ResourceError
        if an external router has engines of others; EngineUnavailable, DeadlineExceeded.
        """
        if self._router is None or not self._router.alive or self._config != engine:
            self.stop()
            checked_config = self._config
            self._config = None  # stays None if the start fails
            self._router = self._create_router(engine, logs)
            self._router.start()
            self._router.wait_ready(resources.start_timeout_s)
            if isinstance(self._router, ExternalRouter) and checked_config != engine:
                self._router.require_alone([*engines, *resources.external_engines])
            self._config = engine
        known = {worker["url"] for worker in self._router.workers()}
        self._router.remove(*(known - set(engines)))
        return self._router.url

    def _create_router(self, engine: EngineConfig, logs: str) -> Router | ExternalRouter:
        if engine.router_url is not None:
            return ExternalRouter(engine.router_url)
        # the same port as before a death: clients know this address
        port = self._router.port if self._router is not None else None
        return Router(_with_host(engine), port=port, log_path=Path(logs) / "router.log")

    def admit(self, workers: list[str]) -> None:
        """Send requests to these engines, which hold the published weights and are not paused."""
        if self._router is None:
            raise EngineUnavailable("the router has not been started", where="router")
        self._router.add(*workers)

    def workers(self) -> list[str] | None:
        """Return the URLs of the admitted engines; None if the router does not run."""
        if self._router is None or not self._router.alive:
            return None
        return [worker["url"] for worker in self._router.workers()]

    def remove(self, workers: list[str]) -> None:
        """Send no more requests to these engines, because their weights are unknown."""
        if self._router is not None:
            self._router.remove(*workers)

    def stop(self) -> None:
        """Stop the router. An external router keeps running."""
        if self._router is not None and not isinstance(self._router, ExternalRouter):
            self._router.stop()


def _with_host(engine: EngineConfig) -> EngineConfig:
    """Return the configuration with this machine's address as host, if none is configured."""
    return engine if engine.host is not None else engine.model_copy(update={"host": own_address()})


async def _hand_back(url: str) -> None:
    async with Engine(url, deadline_s=MEMORY_TIMEOUT_S) as engine:
        await engine.pause("abort")
        # It waits until no request is left.
        await engine.flush()


async def _release_memory(url: str, tags: Collection[MemoryTag]) -> None:
    async with Engine(url, deadline_s=MEMORY_TIMEOUT_S) as engine:
        # SGLang releases its KV cache only while no request uses it.
        await engine.pause("abort")
        await engine.flush()
        await engine.release_memory(tuple(tags))


async def _resume_memory(url: str, tags: Collection[MemoryTag], *, samples: bool) -> None:
    async with Engine(url, deadline_s=MEMORY_TIMEOUT_S) as engine:
        await engine.resume_memory(tuple(tags))
        if samples:
            await engine.continue_()


async def _generates(url: str, timeout_s: float) -> bool:
    try:
        async with Engine(url, deadline_s=timeout_s) as engine:
            await engine.health()
    except (EngineError, DeadlineExceeded):
        return False
    return True


async def _require_spans(url: str) -> None:
    async with Engine(url, deadline_s=60.0) as engine:
        await engine.require_spans()


async def _facts(url: str) -> dict[str, Any]:
    """Return facts for the run's records; {} if the server does not answer."""
    try:
        async with Engine(url, deadline_s=10.0) as engine:
            return server_facts(await engine.server_info())
    except (EngineError, DeadlineExceeded):
        return {}


async def _version_and_load(url: str) -> tuple[str | None, EngineLoad | None]:
    """Return weight version and load of a server; None for an answer that does not come."""
    version = None
    load = None
    async with Engine(url, deadline_s=10.0) as engine:
        with suppress(EngineError, DeadlineExceeded):
            version = await engine.weight_version()
            engine.deadline_s = LOAD_TIMEOUT_S
            load = await engine.load()
    return version, load


async def _weight_version(url: str) -> str | None:
    try:
        async with Engine(url, deadline_s=10.0) as engine:
            return await engine.weight_version()
    except (EngineError, DeadlineExceeded):
        return None
