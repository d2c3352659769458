"""`Router`: the sglang-router as a child process.

Not here: its list of engines (`routes`), a router that others start (`external`).
"""

from __future__ import annotations

import math
from pathlib import Path

from rlpipe.config.arguments.check import check_router
from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.process import LOOPBACK, ServerProcess, flags
from rlpipe.engines.sglang.routes import Routes
from rlpipe.system.ports import free_port

_DEFAULTS = {
    # cache_aware counts requests, and a request of ours is a whole group or more
    "policy": "round_robin",
    "health_check_endpoint": "/model_info",  # /health hangs while an engine is paused
    "health_check_interval_secs": 10,
    "disable_circuit_breaker": True,  # it would take a live engine out after ten refused requests
    "log_level": "warn",
}


class Router(ServerProcess, Routes):
    """One sglang-router. `start()`, `wait_ready(deadline_s)`, `stop()`, `add(url)`, `remove(url)`,
    `workers()`."""

    def __init__(self, config: EngineConfig, *, port: int | None, log_path: str | Path) -> None:
        """`port` None picks a free one. Raises: ConfigError for an argument in `engine.router` that
        cannot be taken."""
        super().__init__(
            "sglang-router",
            "rlpipe.engines.sglang.router_launch",
            config.host or LOOPBACK,
            port,
            log_path,
        )
        self.name = f"sglang-router {self.url}"
        self.do = f"read {self.log_path}"
        check_router(config.router)
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
        return flags("router", self._arguments)
