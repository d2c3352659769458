"""`Routes`: read and change the engines of a router. Base of `Router` and `ExternalRouter`.

An added engine gets requests after about a second, a removed one gets none after a few
milliseconds; both methods wait for that. Weight pushes need neither: a paused engine keeps its
requests waiting.
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

    def add(self, url: str, deadline_s: float = 60.0) -> None:
        """Add an engine and wait until it gets requests. No error if it is known already."""
        if self._id_of(url) is None:
            self._call("POST", "/workers", {"url": url})
        self._wait(
            lambda: any(worker["url"] == url and worker["is_healthy"] for worker in self.workers()),
            f"add {url}",
            deadline_s,
        )

    def remove(self, url: str, deadline_s: float = 60.0) -> None:
        """Remove an engine and wait until it gets no requests. No error if it is unknown."""
        worker = self._id_of(url)
        if worker is not None:
            self._call("DELETE", f"/workers/{worker}")
        self._wait(lambda: self._id_of(url) is None, f"remove {url}", deadline_s)

    def _id_of(self, url: str) -> str | None:
        return next((worker["id"] for worker in self.workers() if worker["url"] == url), None)

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
