"""`Board`: short messages between trainer ranks while they send weights, beside the collectives of
their model.

A store of its own, at rank 0: whoever waits in the trainer's own store would keep others from it.
Messages are JSON, each is taken once. Waiting is polling, so that it can be given up.

Not here: what is said (`staged`).
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

from rlpipe.errors import DeadlineExceeded
from rlpipe.system.rendezvous import store

CALL_S = 60.0
_POLL_S = 0.002


class Board:
    """One rank's connection. The first one is made at rank 0 and opens it; others are made with its
    `port`."""

    def __init__(self, address: str, port: int | None = None) -> None:
        """`address`: of rank 0's machine, as this rank reaches it."""
        within = timedelta(seconds=CALL_S)
        self._server = store(address, 0, listens=True, timeout=within) if port is None else None
        self.port = self._server.port if self._server is not None else port
        assert self.port is not None
        self._store = store(address, self.port, listens=False, timeout=within)

    def put(self, key: str, message: Any) -> None:
        self._store.set(key, json.dumps(message))

    async def take(self, key: str, *, timeout_s: float) -> Any:
        """Wait for a message, and take it off. Raises: DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._store.check([key]):  # noqa: ASYNC110 - the store calls nobody
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "a trainer rank does not answer",
                where=f"push: {key}",
                expected=f"within {timeout_s:g} s",
            ) from error
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message
