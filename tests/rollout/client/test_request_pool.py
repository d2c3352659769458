"""Choice of the engine for requests that bypass the router; requests of a held client."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import httpx
import pytest
from aiohttp import web

from rlpipe.errors import EngineUnavailable
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.http import Connections
from rlpipe.rollout.client.request_pool import DirectRouting

WORKERS = [{"url": f"http://e{number}/", "is_healthy": True} for number in range(4)]


def test_the_engine_with_the_fewest_requests_is_next():
    direct = DirectRouting()
    with ExitStack() as stack:
        first = [stack.enter_context(direct.engine(WORKERS, None, ())) for _ in range(8)]
    assert sorted(first) == sorted([f"http://e{number}" for number in range(4)] * 2)
    for _ in range(2):
        with direct.engine(WORKERS, None, ()) as again:
            assert again == "http://e0", "what is over does not count"


def test_a_routing_key_keeps_its_engine_when_other_engines_join_or_leave():
    direct = DirectRouting()
    keys = [f"g.{number}" for number in range(64)]

    def homes(workers) -> dict[str, str]:
        found = {}
        for key in keys:
            with direct.engine(workers, key, ()) as found[key]:
                pass
        return found

    every = homes(WORKERS)
    fewer = homes(WORKERS[1:])
    assert set(every.values()) == {f"http://e{number}" for number in range(4)}
    assert all(fewer[key] == home for key, home in every.items() if home != "http://e0")


def test_unhealthy_and_lost_engines_are_not_chosen():
    sick = [{**WORKERS[0], "is_healthy": False}, *WORKERS[1:3]]
    direct = DirectRouting()
    with direct.engine(sick, None, {"http://e1"}) as url:
        assert url == "http://e2"
    with direct.engine(WORKERS[:1], None, {"http://e0"}) as url:
        assert url == "http://e0", "there is no other"
    with pytest.raises(EngineUnavailable, match="none healthy"), direct.engine(sick[:1], None, ()):
        pass


async def test_a_request_to_a_dead_engine_is_sent_to_another_engine():
    hosts = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(200, json={"workers": WORKERS[:2]})
        hosts.append(request.url.host)
        if request.url.host == "e0":
            raise httpx.ConnectError("refused")
        meta = {
            "output_token_logprobs": [[-0.5, 7, None]],
            "finish_reason": {"type": "stop"},
            "weight_version": "b@1@d",
        }
        return httpx.Response(200, json=[{"meta_info": {**meta, "routed_experts": "AQAAAAIAAAA="}}])

    async with GenerateClient(
        "http://router", vocab_size=9, deadline_s=10.0, routed_width=2
    ) as client:
        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        (generation,) = await client.generate([5], {"max_new_tokens": 1}, routed_from=0)
    assert hosts == ["e0", "e1"] and generation.routed_experts is not None
    assert generation.routed_experts.tolist() == [[1, 2]]


async def test_direct_requests_share_a_listing_that_begins_after_them():
    listings: list[int] = []
    hosts: list[str] = []
    asked = asyncio.Event()
    listed = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            number = len(listings)
            listings.append(number)
            asked.set()
            await listed.wait()
            if number == 1:
                raise httpx.ConnectError("refused")
            return httpx.Response(200, json={"workers": [{"url": f"http://e{number}"}]})
        hosts.append(request.url.host)
        meta = {
            "output_token_logprobs": [[-0.5, 7, None]],
            "finish_reason": {"type": "stop"},
            "weight_version": "b@1@d",
        }
        return httpx.Response(200, json=[{"meta_info": meta}])

    sampling = {"max_new_tokens": 1, "structural_tag": "tag"}
    async with GenerateClient(
        "http://router", vocab_size=30, deadline_s=10.0, samples_per_request=1
    ) as client:
        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))

        def requests(count: int) -> list[asyncio.Task]:
            return [asyncio.create_task(client.generate([5 + n], sampling)) for n in range(count)]

        first = requests(4)
        await asked.wait()
        # They come while a listing runs, and may not use it: an engine of it may have left.
        second = requests(4)
        await asyncio.sleep(0)
        second[0].cancel()
        listed.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*first, *second[1:])
    # The third listing follows the second one, which failed for all that waited.
    assert listings == [0, 1, 2]
    assert sorted(hosts) == ["e0"] * 4 + ["e2"] * 3


async def test_a_held_client_sends_its_requests_after_the_release():
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.url.path)
        meta = {
            "output_token_logprobs": [[-0.5, 7, None]],
            "finish_reason": {"type": "stop"},
            "weight_version": "b@1@d",
        }
        return httpx.Response(200, json=[{"meta_info": meta}])

    async with GenerateClient("http://router", vocab_size=9, deadline_s=10.0) as client:
        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        await client.hold("abort", deadline_s=1.0, expires_s=600.0)
        waiting = asyncio.create_task(client.generate([5], {"max_new_tokens": 1}))
        await asyncio.sleep(0.05)
        assert sent == []
        client.release()
        async with asyncio.timeout(60):
            await waiting
    assert sent == ["/generate"]


async def test_a_client_of_more_engines_has_more_requests_at_once():
    busy = 0
    most = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.05)
        busy -= 1
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    connections = Connections(max_connections=2)
    async with httpx.AsyncClient(transport=connections, timeout=None) as client:
        first = [asyncio.create_task(client.get(runner_url(runner))) for _ in range(4)]
        await asyncio.sleep(0.02)
        assert most == 2
        connections.grow(1)  # fewer engines queue what they get
        connections.grow(6)
        await asyncio.gather(*first, *(client.get(runner_url(runner)) for _ in range(6)))
    assert 6 <= most <= 8
    await runner.cleanup()


def runner_url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}/"
