"""A gate before the engines: while it is held, no new request starts.

A hold ends by itself after a time, so a holder that dies stops nothing for good. Not here: what is
already in flight (`client`), or the push that the gate is held for (`rlpipe.sync`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time


class Gate:
    """Open at first. Used by one event loop."""

    def __init__(self) -> None:
        self._since_s = self._until_s = self._before_s = 0.0
        self._changed = asyncio.Event()

    def hold(self, expires_s: float) -> None:
        """Close it for so many seconds from now, or until `release`. Holding it again only moves
        its end."""
        now = time.monotonic()
        if now >= self._until_s:
            self._settle()
            self._since_s = now
        self._until_s = now + expires_s
        self._wake()

    def release(self) -> None:
        """Open it; harmless if it is open."""
        self._settle()
        self._wake()

    def held_s(self) -> float:
        """Seconds it was closed so far, all holds together: time that nobody who waits for an
        answer is to blame for."""
        return self._before_s + max(0.0, min(time.monotonic(), self._until_s) - self._since_s)

    async def opened(self) -> None:
        """Returns once it is open."""
        while (left_s := self._until_s - time.monotonic()) > 0:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def _settle(self) -> None:
        self._before_s = self.held_s()
        self._since_s = self._until_s = 0.0

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
