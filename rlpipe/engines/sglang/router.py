"""`Router`: the sglang-router as a child process, and its list of engines.

Adding an engine takes about a second to be effective, removing one a few milliseconds; both return when it is. Weight pushes
need neither (a paused engine keeps its requests waiting). Control of an engine does not go through the router (`admin`).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import httpx

from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.process import LOOPBACK, ServerProcess, flags
from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable
from rlpipe.ports import free_port

OWNED = {
    "host": "engine.host",
    "port": "nothing: a free port is chosen",
    "worker_urls": "resources.rollout_num_gpus",
    "request_timeout_secs": "engine.request_timeout_s",
}
"""Router arguments refused in `engine.router`, and the key to use instead."""

_DEFAULTS = {
    "policy": "round_robin",  # cache_aware counts requests, and a request of ours is a whole group or more
    "health_check_endpoint": "/model_info",  # /health hangs while an engine is paused
    "health_check_interval_secs": 10,
    "disable_circuit_breaker": True,  # it would take a live engine out after ten refused requests
    "log_level": "warn",
}
_POLL_S = 0.01


class Router(ServerProcess):
    """One sglang-router. `start()`, `wait_ready(deadline_s)`, `stop()`, `add(url)`, `remove(url)`, `workers()`."""

    def __init__(self, config: EngineConfig, *, port: int | None, log_path: str | Path) -> None:
        """`port` None picks a free one. Raises: ConfigError for an argument in `engine.router` that is not yours to set."""
        super().__init__("sglang-router", "rlpipe.engines.sglang.router_launch", config.host or LOOPBACK, port, log_path)
        self.name = f"sglang-router {self.url}"
        flags("engine.router", config.router, OWNED)
        self._arguments = {
            "host": self.host,
            "port": self.port,
            "request_timeout_secs": math.ceil(config.request_timeout_s),
            "prometheus_host": self.host,
            "prometheus_port": free_port(self.host),
            **_DEFAULTS,
            **config.router,
        }

    def arguments(self) -> list[str]:
        return flags("engine.router", self._arguments, {})

    def workers(self) -> list[dict[str, Any]]:
        """The engines it routes to, as it describes them: `id`, `url`, `is_healthy`, `load` …"""
        return self._call("GET", "/workers").json()["workers"]

    def add(self, url: str, deadline_s: float = 60.0) -> None:
        """Route to the engine at `url` from now on; harmless if it is there already."""
        if self._id_of(url) is None:
            self._call("POST", "/workers", {"url": url})
        self._wait(
            lambda: any(worker["url"] == url and worker["is_healthy"] for worker in self.workers()), f"add {url}", deadline_s
        )

    def remove(self, url: str, deadline_s: float = 60.0) -> None:
        """Route nothing to the engine at `url` any more; harmless if it is not there."""
        worker = self._id_of(url)
        if worker is not None:
            self._call("DELETE", f"/workers/{worker}")
        self._wait(lambda: self._id_of(url) is None, f"remove {url}", deadline_s)

    def _id_of(self, url: str) -> str | None:
        return next((worker["id"] for worker in self.workers() if worker["url"] == url), None)

    def _wait(self, reached, what: str, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not reached():
            if time.monotonic() > end_s:
                found = [(worker["url"], worker["is_healthy"]) for worker in self.workers()]
                raise DeadlineExceeded(
                    f"{what} is not effective", where=self.name, found=found, expected=f"within {deadline_s:g} s"
                )
            time.sleep(_POLL_S)

    def _call(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        try:
            answer = httpx.request(method, f"{self.url}{path}", json=body, timeout=30.0)
        except httpx.TransportError as error:
            raise EngineUnavailable(
                "no answer", where=self.name, found=f"{type(error).__name__}: {error}", do=f"read {self.log_path}"
            ) from error
        if answer.status_code >= 400:
            raise EngineRejected(
                f"{method} {path} was refused", where=self.name, found=f"HTTP {answer.status_code}: {answer.text[:300]}"
            )
        return answer
