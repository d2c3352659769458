"""A real router adds and removes engines (rlpipe.engines.sglang.routes)."""

from __future__ import annotations

import httpx
import pytest

from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.routes import Routes
from rlpipe.errors import DeadlineExceeded, EngineUnavailable
from rlpipe.rollout.client.generate_client import GenerateClient
from tests.live_engine import VOCAB_SIZE

pytestmark = pytest.mark.integration


def test_a_router_lists_its_engines(live):
    (worker,) = live.router.workers()
    assert worker["url"] == live.server.url and worker["is_healthy"]


async def test_a_removed_engine_gets_no_requests_and_an_added_engine_does(live):
    async with GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=5) as client:
        live.router.remove(live.server.url)
        live.router.remove(live.server.url)
        try:
            assert live.router.workers() == []
            with pytest.raises((EngineUnavailable, DeadlineExceeded)):
                await client.generate([5], {"max_new_tokens": 2})
        finally:
            live.router.add(live.server.url)
        live.router.add(live.server.url)
        assert len(live.router.workers()) == 1
        assert len(await client.generate([5], {"max_new_tokens": 2})) == 1


def test_a_missing_engine_is_not_added(live):
    with pytest.raises(DeadlineExceeded, match=r"add http://127\.0\.0\.1:9 has no effect"):
        live.router.add("http://127.0.0.1:9", deadline_s=2)
    live.router.remove("http://127.0.0.1:9")


class CountedRoutes(Routes):
    """A router in memory. An engine is healthy after a few calls."""

    name = "router"
    do = ""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.known: dict[str, int] = {}

    def _call(self, method: str, path: str, body: dict | None = None) -> httpx.Response:
        self.calls.append(method)
        if method == "POST":
            assert body is not None
            self.known[body["url"]] = 0
        elif method == "DELETE":
            del self.known[path.removeprefix("/workers/")]
        workers = []
        for url in self.known:
            self.known[url] += 1
            workers.append({"id": url, "url": url, "is_healthy": self.known[url] > 2})
        return httpx.Response(200, json={"workers": workers})


def test_engines_are_added_and_removed_together():
    routes = CountedRoutes()
    urls = [f"http://e{number}" for number in range(8)]
    routes.add(*urls)
    assert routes.known.keys() == {*urls}
    # One listing before, and a few until all are healthy: not a few for each engine.
    assert routes.calls.count("POST") == 8 and routes.calls.count("GET") <= 4
    routes.calls.clear()
    routes.add(*urls)
    assert routes.calls.count("POST") == 0
    routes.calls.clear()
    routes.remove(*urls[:6], "http://unknown")
    assert [*routes.known] == urls[6:]
    assert routes.calls == ["GET", *["DELETE"] * 6, "GET"]


def test_the_error_of_a_missing_router_names_it(tmp_path):
    router = Router(EngineConfig(), port=None, log_path=tmp_path / "log")
    with pytest.raises(EngineUnavailable, match=f"sglang-router {router.url}"):
        router.workers()
