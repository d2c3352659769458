"""Requests that go to an engine past the router, which would leave out what it does not know of
(sglang-router 0.3.2 drops `return_routed_experts`): which engine gets one.

The router still says which engines there are, so one that is off it, because its weights are
unknown, gets none. A routing key keeps to its engine for as long as that is there; without one the
engine with the fewest of our requests is next.

Not here: the requests (`client`), or a router's policy, cache_aware for one: `engine.router` has no
say in these.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlpipe.errors import EngineUnavailable


class Direct:
    """The requests of one client that are at an engine now."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @contextmanager
    def engine(
        self, workers: Sequence[dict[str, Any]], routing: str | None, avoided: Collection[str]
    ) -> Iterator[str]:
        """The URL of the engine to ask, which has one request more meanwhile. `workers`: as the
        router lists them; `avoided` are taken only if there are no others. Raises:
        EngineUnavailable if there is none."""
        healthy = [
            str(worker["url"]).rstrip("/") for worker in workers if worker.get("is_healthy", True)
        ]
        urls = sorted(set(healthy) - set(avoided)) or sorted(healthy)
        if not urls:
            raise EngineUnavailable(
                "no engine to ask",
                where="the router's workers",
                found=f"{len(workers)}, none healthy",
            )
        url = (
            min(urls, key=lambda one: self._running[one])
            if routing is None
            else max(urls, key=lambda one: _draw(one, routing))
        )
        self._running[url] += 1
        try:
            yield url
        finally:
            self._running[url] -= 1


def _draw(url: str, routing: str) -> bytes:
    """The engine that draws highest has the key: another one that joins or leaves takes only its
    own keys along."""
    return hashlib.sha256(f"{routing} {url}".encode()).digest()
