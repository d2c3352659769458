"""`Routes`: the list of engines of a router, whoever started it.

Adding an engine takes about a second to be effective, removing one a few milliseconds; both return
when it is. Weight pushes need neither (a paused engine keeps its requests waiting). Control of an
engine does not go through the router (`admin`).
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable
from rlpipe.rollout.client.http import fetch, read_workers

_POLL_S = 0.01
_CALL_S = 30.0


class Routes:
    """`add(url)`, `remove(url)`, `workers()` of the router at `url`."""

    name: str
    """For errors: who it is."""
    do: str
    """For errors: what to do if it does not answer."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    def workers(self) -> list[dict[str, Any]]:
        """The engines it routes to, as it describes them: `id`, `url`, `is_healthy`, `load` …"""
        return read_workers(self._call("GET", "/workers"), self.name, ("id", "url", "is_healthy"))

    def add(self, url: str, deadline_s: float = 60.0) -> None:
        """Route to the engine at `url` from now on; harmless if it is there already."""
        if self._id_of(url) is None:
            self._call("POST", "/workers", {"url": url})
        self._wait(
            lambda: any(worker["url"] == url and worker["is_healthy"] for worker in self.workers()),
            f"add {url}",
            deadline_s,
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
                    f"{what} is not effective",
                    where=self.name,
                    found=found,
                    expected=f"within {deadline_s:g} s",
                )
            time.sleep(_POLL_S)

    def _call(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        try:
            answer = fetch(method, f"{self.url}{path}", json=body, deadline_s=_CALL_S)
        except httpx.RequestError as error:
            raise EngineUnavailable(
                "no answer", where=self.name, found=f"{type(error).__name__}: {error}", do=self.do
            ) from error
        if not answer.is_success:
            raise EngineRejected(
                f"{method} {path} was refused",
                where=self.name,
                found=f"HTTP {answer.status_code}: {answer.text[:300]}",
            )
        return answer
