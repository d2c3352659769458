"""`KeptRouter`: the router as its keeper sees it. Not here: who is admitted, and when (`fleet`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from rlpipe.actors.ray.calls import Patience, call
from rlpipe.errors import ActorLost, RlpipeError

if TYPE_CHECKING:
    from rlpipe.actors.engines.engine import EngineSpec

CALL_TIMEOUT_S = 60.0


class KeptRouter:
    """One router, or what is made in its place."""

    def __init__(self, make: Callable[[], ActorHandle]) -> None:
        self._make, self.actor = make, make()
        self._patience = Patience()

    async def look(self) -> list[str] | None:
        """URLs of the engines that it routes to; None if it does not run. One whose actor died is
        made anew.

        Raises: what asking it meets; if that goes on, it is ended.
        """
        try:
            known = await call(
                self.actor.workers.remote(), where="router.workers", deadline_s=CALL_TIMEOUT_S
            )
        except ActorLost:
            self.actor = await asyncio.to_thread(self._make)
            return None
        except RlpipeError:
            await self._patience.missed(self.actor)
            raise
        self._patience.answered()
        return known

    async def start(self, spec: EngineSpec, urls: list[str]) -> str:
        """Bring it up, without engines other than these; its URL. Raises: as
        `RouterActor.start`."""
        start = self.actor.start.remote(spec.engine, spec.resources, spec.logs, urls)
        return await call(start, where="router.start", deadline_s=spec.resources.start_timeout_s)

    async def admit(self, urls: list[str]) -> None:
        """Requests go to these engines from now on."""
        await call(
            self.actor.admit.remote(urls), where="router.admit", deadline_s=2 * CALL_TIMEOUT_S
        )

    async def remove(self, urls: list[str]) -> None:
        """No more requests go to these engines."""
        await call(self.actor.remove.remote(urls), where="router.remove", deadline_s=CALL_TIMEOUT_S)
