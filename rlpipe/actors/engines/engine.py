"""`EngineActor` and `RouterActor`: the processes of inference, supervised by Ray.

An engine knows which weights it holds by what its server answers, never by what it was told. One
that spans nodes has an actor with a server on each; the first one's answers for the engine
(`kept_engine` has them start, live and end together).

Not here: the servers themselves (`engines.sglang`), generation requests (they go through the router
over HTTP).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.actors.ray.placement import LOOPBACK, own_address
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.admin import MEMORY_TAGS, Engine, MemoryTag
from rlpipe.engines.sglang.external import ExternalRouter, ExternalServer, Wanted
from rlpipe.engines.sglang.facts import facts
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Part, Server
from rlpipe.errors import DeadlineExceeded, EngineError, EngineUnavailable
from rlpipe.sync.fp8 import fp8_directory
from rlpipe.sync.transports.mirror import Mirror
from rlpipe.sync.transports.versions import WeightStore
from rlpipe.system.ports import free_port

FILES = "files"
"""Concurrency group of `bring`: the other calls are answered meanwhile."""

MORE_PORTS = 15
"""After the one at which servers of several nodes meet; with data parallel attention SGLang listens
on some of them."""

MEMORY_TIMEOUT_S = 50.0
"""For each call about GPU memory; less than what the fleet waits for all of them."""


@dataclass(frozen=True)
class EngineSpec:
    """What a server is started with. Another spec starts another server in its place."""

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
    devices: tuple[tuple[str, ...], ...] | None = None
    """Of each server (`layout.engine_names`), its GPUs as CUDA_VISIBLE_DEVICES names them; None:
    those that its actor sees."""

    @classmethod
    def of(
        cls, spec: ClusterSpec, cluster: str, devices: tuple[tuple[str, ...], ...] | None
    ) -> EngineSpec:
        """What the engines of a run are started with; the folder of their logs is made."""
        config = spec.config
        logs = Path(spec.home) / cluster / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return cls(
            model_dir=spec.model_dir,
            engine=config.engine,
            resources=config.resources,
            dtype=config.model.dtype,
            seed=config.train.seed,
            trust_remote_code=getattr(config.model.source, "trust_remote_code", False),
            logs=str(logs),
            deterministic=config.deterministic,
            reads_text=config.reads_text,
            names_experts=config.train.use_rollout_routing_replay,
            devices=devices,
        )

    def served_dir(self) -> str:
        """The directory that the server is started with: the model's, or what is made of it.
        Raises: ConfigError."""
        if self.engine.quantization == "fp8":
            return fp8_directory(self.model_dir, Path(self.logs).parents[1] / "models")
        return self.model_dir

    def wanted(self) -> Wanted:
        """What a server has to serve that others have started."""
        return Wanted(
            model_dir=self.served_dir(),
            dtype=self.dtype,
            tensor_parallel_size=self.resources.rollout_num_gpus_per_engine,
            quantization=self.engine.quantization,
            reads_text=self.reads_text,
            names_experts=self.names_experts,
            deterministic=self.deterministic,
        )


class EngineActor:
    """One SGLang server: its own, or one that others start and end, which it asks and never ends.

    Of an engine that spans nodes it is the server on one of them; only node 0 is asked about
    weights, memory and tokens.
    """

    def __init__(self, number: int, cwd: str, node: int = 0) -> None:
        os.chdir(cwd)
        self.number = number
        self.node = node
        self._spec: EngineSpec | None = None
        self._meeting: str | None = None
        self._server: Server | ExternalServer | None = None
        self._unknown = True
        self._facts: dict[str, Any] = {}
        self._awake: set[MemoryTag] = set(MEMORY_TAGS)

    def meeting(self, spec: EngineSpec) -> str | None:
        """Where the servers of this engine have met, if ours is up for this spec and answers."""
        return self._meeting if self._is_up(spec) else None

    def meeting_point(self) -> str:
        """Where they can meet: here, at a free port."""
        return f"{own_address()}:{free_port(own_address(), following=MORE_PORTS)}"

    def start(self, spec: EngineSpec, meeting: str | None = None) -> str:
        """Bring the server of a spec up, unless it is up and answers; its URL. `meeting`: of an
        engine that spans nodes, where its servers meet; each waits for all of them.

        Raises: as `Server` and its `wait_ready`, or as `ExternalServer.start`.
        """
        if self._server is not None and self._meeting == meeting and self._is_up(spec):
            return self._server.url
        self.stop()
        self._spec, self._meeting, self._unknown, self._awake = (
            spec,
            meeting,
            True,
            set(MEMORY_TAGS),
        )
        self._server = self._made(spec)
        self._server.start()
        self._server.wait_ready(spec.resources.start_timeout_s)
        self._facts = {} if self.node else asyncio.run(_facts(self._server.url))
        return self._server.url

    def _is_up(self, spec: EngineSpec) -> bool:
        if self._spec != spec or self._server is None or not self._server.alive:
            return False
        return self.node > 0 or asyncio.run(_stamp(self._server.url)) is not None

    def _made(self, spec: EngineSpec) -> Server | ExternalServer:
        if external := spec.resources.external_engines:
            return ExternalServer(external[self.number], spec.wanted())
        nodes = spec.resources.engine_nodes
        part = None
        if nodes > 1:
            assert self._meeting is not None, "servers of several nodes have to meet"
            part = Part(self.node, nodes, self._meeting)
        return Server(
            spec.served_dir(),
            _at_home(spec.engine)
            if self.node == 0
            else spec.engine.model_copy(update={"host": LOOPBACK}),
            spec.resources,
            dtype=spec.dtype,
            port=None,
            log_path=Path(spec.logs)
            / f"engine-{self.number}{f'-{self.node}' if self.node else ''}.log",
            seed=spec.seed + self.number,
            trust_remote_code=spec.trust_remote_code,
            deterministic=spec.deterministic,
            reads_text=spec.reads_text,
            devices=None if spec.devices is None else spec.devices[self.number * nodes + self.node],
            names_experts=spec.names_experts,
            part=part,
        )

    def status(self) -> dict[str, Any]:
        """`{"number", "url", "alive", "stamp", "pid", "facts"}`; `stamp` is the weight version the
        server itself names.

        None if it does not answer, or if a push to it began and was not seen to end; always of
        other nodes than the first.
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
            }
        stamp = None if self._unknown or self.node else asyncio.run(_stamp(server.url))
        state = {"url": server.url, "alive": True, "stamp": stamp, "pid": server.pid}
        return {"number": self.number, **state, "facts": self._facts}

    def generates(self, timeout_s: float) -> bool:
        """Does it generate a token within that time? (It must not be paused.)"""
        return (
            self._server is not None
            and self._server.alive
            and asyncio.run(_generates(self._server.url, timeout_s))
        )

    def require_spans(self) -> None:
        """As `Engine.require_spans`. Raises: EngineError, EngineUnavailable."""
        if self._server is None:
            raise EngineUnavailable(
                "the server has not been started", where=f"engine/{self.number}"
            )
        asyncio.run(_require_spans(self._server.url))

    def mark(self, *, unknown: bool) -> None:
        """Before the first byte of a push: what it holds is unknown. After the echo: it is what the
        server says."""
        self._unknown = unknown

    def keep(self, tags: Collection[MemoryTag]) -> None:
        """Give up all GPU memory but this (`MEMORY_TAGS`). It samples nothing from then on, until
        it takes all of it back.

        What it was sampling ends with what it has. Without its weights, what it holds is unknown.
        Raises: EngineError, DeadlineExceeded: then what it has is not known, and it should be
        stopped.
        """
        if (gone := self._awake - set(tags)) and self._server is not None and self._server.alive:
            self._unknown = self._unknown or "weights" in gone
            asyncio.run(_give_up(self._server.url, sorted(gone)))
            self._awake -= gone

    def take(self, tags: Collection[MemoryTag]) -> None:
        """Take this GPU memory back; with all of it, and weights that are known, it samples again.
        Raises: as `keep`."""
        missing = set(tags) - self._awake
        if missing and self._server is not None and self._server.alive:
            goes_on = not self._unknown and self._awake | missing == set(MEMORY_TAGS)
            asyncio.run(_take_back(self._server.url, sorted(missing), goes_on=goes_on))
            self._awake |= missing

    def bring(self, root: str, stamp: str, folder: str, timeout_s: float) -> str:
        """Have a version of the weights on this machine, in the mirror at `folder`: the directory
        that the server can load.

        It runs beside the other calls (concurrency group `files`). Raises: as `Mirror.bring`.
        """
        return str(Mirror(folder).bring(WeightStore(root), stamp, timeout_s=timeout_s))

    def stop(self) -> None:
        """End the server. One that is not ours goes on, and what it holds is unknown."""
        self._unknown = True
        if self._server is not None:
            self._server.stop()


class RouterActor:
    """The sglang-router in front of the engines: its own, or one that others start and end."""

    def __init__(self, cwd: str) -> None:
        os.chdir(cwd)
        self._router: Router | ExternalRouter | None = None
        self._config: EngineConfig | None = None

    def start(
        self, engine: EngineConfig, resources: ResourcesConfig, logs: str, engines: list[str]
    ) -> str:
        """Bring the router up unless it runs with this configuration, without engines other than
        these; its URL.

        After a death it comes back at the same address, where requests wait for it. Engines get
        requests once they are admitted. Raises: ResourceError if a router that others started has
        engines of others; EngineUnavailable, DeadlineExceeded.
        """
        if self._router is None or not self._router.alive or self._config != engine:
            self.stop()
            known = self._config
            self._config = None
            self._router = self._made(engine, logs)
            self._router.start()
            self._router.wait_ready(resources.start_timeout_s)
            if isinstance(self._router, ExternalRouter) and known != engine:
                self._router.require_alone([*engines, *resources.external_engines])
            self._config = engine
        for known in {worker["url"] for worker in self._router.workers()} - set(engines):
            self._router.remove(known)
        return self._router.url

    def _made(self, engine: EngineConfig, logs: str) -> Router | ExternalRouter:
        if engine.router_url is not None:
            return ExternalRouter(engine.router_url)
        port = self._router.port if self._router is not None else None
        return Router(_at_home(engine), port=port, log_path=Path(logs) / "router.log")

    def admit(self, workers: list[str]) -> None:
        """Send requests to these engines from now on: they hold the published weights and are not
        paused."""
        if self._router is None:
            raise EngineUnavailable("the router has not been started", where="router")
        for url in workers:
            self._router.add(url)

    def workers(self) -> list[str] | None:
        """URLs of the engines it routes to; None if it does not run."""
        if self._router is None or not self._router.alive:
            return None
        return [worker["url"] for worker in self._router.workers()]

    def remove(self, workers: list[str]) -> None:
        """Send no more requests to these engines: their weights are unknown."""
        if self._router is not None:
            for url in workers:
                self._router.remove(url)

    def stop(self) -> None:
        """End the router."""
        if self._router is not None:
            self._router.stop()


def _at_home(engine: EngineConfig) -> EngineConfig:
    """Bound to this machine's address, if nothing else is said."""
    return engine if engine.host is not None else engine.model_copy(update={"host": own_address()})


async def _give_up(url: str, tags: Collection[MemoryTag]) -> None:
    async with Engine(url, deadline_s=MEMORY_TIMEOUT_S) as engine:
        await engine.pause("abort")
        await engine.flush()
        await engine.release_memory(tuple(tags))


async def _take_back(url: str, tags: Collection[MemoryTag], *, goes_on: bool) -> None:
    async with Engine(url, deadline_s=MEMORY_TIMEOUT_S) as engine:
        await engine.resume_memory(tuple(tags))
        if goes_on:
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
    """{} of a server that does not say: nothing depends on it."""
    try:
        async with Engine(url, deadline_s=10.0) as engine:
            return facts(await engine.server_info())
    except (EngineError, DeadlineExceeded):
        return {}


async def _stamp(url: str) -> str | None:
    try:
        async with Engine(url, deadline_s=10.0) as engine:
            return await engine.weight_version()
    except (EngineError, DeadlineExceeded):
        return None
