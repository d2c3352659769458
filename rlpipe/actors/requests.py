"""Generation requests from outside: held in the generator while engines have something else to do.

Not here: how a request waits and goes on (`rollout.client.client`, `rollout.client.gate`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ray.actor import ActorHandle

from rlpipe.actors.ray.calls import call
from rlpipe.config.run import RunConfig
from rlpipe.errors import ActorLost, RlpipeError

CALL_TIMEOUT_S = 60.0


class Requests:
    """Those of one generator, which works by this configuration. A generator that is gone asks for
    nothing."""

    def __init__(self, generator: ActorHandle, config: RunConfig) -> None:
        self._generator = generator
        self._config = config

    async def connect(self, router_url: str, *, on_gpus: bool) -> None:
        """They go to this router from now on."""
        connect = self._generator.connect.remote(router_url, on_gpus=on_gpus)
        await call(connect, where="generator.connect", deadline_s=CALL_TIMEOUT_S)

    @asynccontextmanager
    async def held_for_push(self) -> AsyncIterator[None]:
        """While weights are on their way, as `sync.in_flight` says."""
        await self._hold(self._config.sync.in_flight, self._config.sync.timeout_s + CALL_TIMEOUT_S)
        try:
            yield
        finally:
            with suppress(RlpipeError):  # a hold ends by itself
                await self._release()

    async def hold(self) -> None:
        """Until `release`: engines give up their memory. What is in flight ends before, one way or
        the other."""
        mode = "drain" if self._config.sync.in_flight == "drain" else "abort"
        await self._hold(mode, self._config.orchestration.timeout_s)

    async def release(self) -> None:
        """Engines have their memory again."""
        with suppress(ActorLost):
            await self._release()

    async def _hold(self, mode: str, expires_s: float) -> None:
        drain_s = self._config.engine.request_timeout_s
        hold = self._generator.hold.remote(mode, deadline_s=drain_s, expires_s=expires_s)
        with suppress(ActorLost):
            await call(hold, where="generator.hold", deadline_s=drain_s + CALL_TIMEOUT_S)

    async def _release(self) -> None:
        await call(
            self._generator.release.remote(), where="generator.release", deadline_s=CALL_TIMEOUT_S
        )
