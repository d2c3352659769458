"""`Routes`: read and change the engines of a router. Base of `Router` and `ExternalRouter`.

An added engine gets requests after about a second, a removed one gets none after a few
milliseconds; both methods wait for that, for all of their engines at once. Weight pushes need
neither: a paused engine keeps its requests waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable
from rlpipe.rollout.client.http import fetch, read_workers

_POLL_S = 0.01
_CALL_S = 30.0


class Routes:
    """Engines of the router at `url`."""

    name: str
    """Name of the router in errors."""
    do: str
    """Advice of the error if the router does not answer."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    def workers(self) -> list[dict[str, Any]]:
        """Return the router's engines as it describes them: `id`, `url`, `is_healthy` and more."""
        return read_workers(self._call("GET", "/workers"), self.name, ("id", "url", "is_healthy"))

    def add(self, *urls: str, deadline_s: float = 60.0) -> None:
        """Add engines and wait until they get requests. No error for those that are known already.

        One after another, 512 engines took four times as long: each lists all others.
        """
        known = self._ids()
        for url in urls:
            if url not in known:
                self._call("POST", "/workers", {"url": url})

        def are_healthy() -> bool:
            healthy = {worker["url"] for worker in self.workers() if worker["is_healthy"]}
            return healthy.issuperset(urls)

        self._wait(are_healthy, f"add {', '.join(urls)}", deadline_s)

    def remove(self, *urls: str, deadline_s: float = 60.0) -> None:
        """Remove engines and wait until they get no requests. No error for unknown ones."""
        known = self._ids()
        for url in urls:
            if url in known:
                self._call("DELETE", f"/workers/{known[url]}")
        self._wait(
            lambda: self._ids().keys().isdisjoint(urls), f"remove {', '.join(urls)}", deadline_s
        )

    def _ids(self) -> dict[str, str]:
        """Return the router's id of each engine, by URL."""
        return {worker["url"]: worker["id"] for worker in self.workers()}

    def _wait(self, is_effective: Callable[[], bool], change: str, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not is_effective():
            if time.monotonic() > end_s:
                workers = [(worker["url"], worker["is_healthy"]) for worker in self.workers()]
                raise DeadlineExceeded(
                    f"{change} has no effect",
                    where=self.name,
                    found=workers,
                    expected=f"within {deadline_s:g} s",
                )
            time.sleep(_POLL_S)

    def _call(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        try:
            answer = fetch(method, f"{self.url}{path}", json=body, deadline_s=_CALL_S)
        except httpx.RequestError as error:
            raise EngineUnavailable(
                "the router does not answer",
                where=self.name,
                found=f"{type(error).__name__}: {error}",
                do=self.do,
            ) from error
        if not answer.is_success:
            raise EngineRejected(
                f"{method} {path} was refused",
                where=self.name,
                found=f"HTTP {answer.status_code}: {answer.text[:300]}",
            )
        return answer
