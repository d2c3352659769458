"""`Router`: the sglang-router as a child process."""

from __future__ import annotations

import math
from pathlib import Path

from rlpipe.config.arguments.check import check_router
from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.process import LOOPBACK, ServerProcess, flags
from rlpipe.engines.sglang.routes import Routes
from rlpipe.system.ports import free_port

_DEFAULTS = {
    # cache_aware counts requests, and one request here is a whole group or more.
    "policy": "round_robin",
    # /health hangs while an engine is paused.
    "health_check_endpoint": "/model_info",
    "health_check_interval_secs": 10,
    # It would remove a live engine after ten refused requests.
    "disable_circuit_breaker": True,
    "log_level": "warn",
}


class Router(ServerProcess, Routes):
    """One sglang-router. See `ServerProcess` for its life, `Routes` for its engines."""

    def __init__(self, config: EngineConfig, *, port: int | None, log_path: str | Path) -> None:
        """`port`: None picks a free one.

        Raises: ConfigError for an argument in `engine.router` that is not allowed.
        """
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
