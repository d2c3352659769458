"""`EngineActor` and `RouterActor`: the processes of inference, supervised by Ray.

An engine knows which weights it holds by what its server answers, never by what it was told.

Not here: the servers themselves (`engines.sglang`), generation requests (they go through the router over HTTP).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.errors import DeadlineExceeded, EngineError


class EngineActor:
    """One SGLang server. Starting again after a death is `start` again."""

    def __init__(
        self,
        number: int,
        cwd: str,
        model_dir: str,
        engine: EngineConfig,
        resources: ResourcesConfig,
        dtype: str,
        seed: int,
        logs: str,
    ) -> None:
        os.chdir(cwd)
        self.number = number
        self._arguments = (model_dir, engine, resources)
        self._settings = {"dtype": dtype, "port": None, "log_path": Path(logs) / f"engine-{number}.log", "seed": seed + number}
        self._start_timeout_s = resources.start_timeout_s
        self._server: Server | None = None

    def start(self) -> str:
        """Bring a server up unless it runs; its URL. Raises: EngineUnavailable with the end of its log, ResourceError."""
        if self._server is None or not self._server.alive:
            self._server = Server(*self._arguments, **self._settings)
            self._server.start()
        self._server.wait_ready(self._start_timeout_s)
        return self._server.url

    def status(self) -> dict[str, Any]:
        """`{"number", "url", "alive", "stamp", "pid"}`; `stamp` is the weight version the server itself names, if it answers."""
        server = self._server
        if server is None or not server.alive or server.process is None:
            return {"number": self.number, "url": None, "alive": False, "stamp": None, "pid": None}
        stamp = asyncio.run(_stamp(server.url))
        return {"number": self.number, "url": server.url, "alive": True, "stamp": stamp, "pid": server.process.pid}

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()


class RouterActor:
    """The sglang-router in front of the engines."""

    def __init__(self, cwd: str, engine: EngineConfig, resources: ResourcesConfig, logs: str) -> None:
        os.chdir(cwd)
        self._config, self._log = engine, Path(logs) / "router.log"
        self._start_timeout_s = resources.start_timeout_s
        self._router: Router | None = None

    def start(self, workers: list[str]) -> str:
        """Bring the router up unless it runs, in front of exactly these engines; its URL."""
        if self._router is None or not self._router.alive:
            self._router = Router(self._config, port=None, log_path=self._log)
            self._router.start()
            self._router.wait_ready(self._start_timeout_s)
        for known in {worker["url"] for worker in self._router.workers()} - set(workers):
            self._router.remove(known)
        for url in workers:
            self._router.add(url)
        return self._router.url

    def workers(self) -> list[str]:
        """URLs of the engines it routes to; none if it does not run."""
        if self._router is None or not self._router.alive:
            return []
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


async def _stamp(url: str) -> str | None:
    try:
        async with Engine(url, deadline_s=10.0) as engine:
            return await engine.weight_version()
    except (EngineError, DeadlineExceeded):
        return None
