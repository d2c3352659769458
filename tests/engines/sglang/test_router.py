"""A real router adds and removes engines (rlpipe.engines.sglang.routes)."""

from __future__ import annotations

import pytest

from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.router import Router
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


def test_the_error_of_a_missing_router_names_it(tmp_path):
    router = Router(EngineConfig(), port=None, log_path=tmp_path / "log")
    with pytest.raises(EngineUnavailable, match=f"sglang-router {router.url}"):
        router.workers()
