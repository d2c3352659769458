"""Invalid answers of engines, routers and reward servers are read correctly or give a named
error."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.data import RemoteReward, RewardConfig
from rlpipe.engines.sglang import external, routes
from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.external import ExternalRouter
from rlpipe.errors import DeadlineExceeded, EngineError, EngineRejected, EngineUnavailable
from rlpipe.rewards import remote
from rlpipe.rewards.reward_rows import score
from rlpipe.rollout.client import http
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.streaming import stream
from rlpipe.rollout.generation import Generation, check_lengths_and_ids, read_generations
from rlpipe.types import Sample, Status

DEEP = b"[" * 100_000
META: dict[str, Any] = {
    "finish_reason": {"type": "stop"},
    "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]],
    "weight_versions": [
        {"version": "b@1@d", "start": 0, "end": 1},
        {"version": "b@2@d", "start": 1, "end": 2},
    ],
    "weight_version": "b@2@d",
    "cached_tokens": 0,
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(-2, 0)
    | st.sampled_from(["", "a", "stop", "abort", 1e300, 2**70]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "start", "end", "version"]), inner)
    ),
    max_leaves=5,
)
PLACES: list[tuple[Any, ...]] = [
    *((name,) for name in META),
    ("finish_reason", "type"),
    *(("output_token_logprobs", row, place) for row in (0, 1) for place in (0, 1)),
    *(("weight_versions", row, name) for row in (0, 1) for name in ("version", "start", "end")),
]


def _with(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    meta = copy.deepcopy(META)
    target: Any = meta
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    return meta


@given(st.sampled_from(PLACES), JSON)
def test_an_answer_with_a_changed_value_is_a_complete_response_or_rejected(
    place: tuple[Any, ...], value: Any
):
    with suppress(EngineRejected):
        answer = httpx.Response(
            200, content=json.dumps([{"meta_info": _with(place, value)}]).encode()
        )
        (read,) = read_generations(answer, 1, "e", 0.0, "w")
        check_lengths_and_ids([read], 10, 2, "w")
        assert all(isinstance(token, int) and 0 <= token < 10 for token in read.response_ids)
        assert all(isinstance(value, float | int) for value in read.log_probs)
        assert (
            len(read.log_probs)
            == len(read.response_ids)
            == sum(tokens for tokens, _ in read.weight_versions)
        )
        assert all(tokens > 0 and isinstance(stamp, str) for tokens, stamp in read.weight_versions)
        assert read.finish_reason in ("stop", "length", "abort")


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_rejected(content: bytes):
    with pytest.raises(EngineRejected, match="w: the answer"):
        read_generations(httpx.Response(200, content=content), 1, "e", 0.0, "w")


@pytest.mark.parametrize(
    ("change", "reply"),
    [
        (
            {"output_token_logprobs": [[-0.5, 3]] * 5, "weight_versions": None},
            "longer than max_new_tokens",
        ),
        ({"output_token_logprobs": [[-0.5, 3], [-0.5, 99]]}, "vocabulary"),
        ({"output_token_logprobs": [[-0.5, -3], [-0.5, 9]]}, "vocabulary"),
        ({"output_token_logprobs": [[-0.5, True], [-0.5, 9]]}, "not an integer"),
        ({"output_token_logprobs": [[None, 3], [-0.5, 9]]}, "finite number"),
        ({"output_token_logprobs": [[-0.5], [-0.5, 9]]}, "IndexError"),
        ({"weight_versions": META["weight_versions"][:1]}, "do not cover"),
        ({"weight_versions": [META["weight_versions"][0]] * 2}, "do not cover"),
        ({"weight_versions": None, "weight_version": 7}, "not a string"),
        ({"finish_reason": {"type": "done"}}, "'done'"),
    ],
)
async def test_an_invalid_response_is_rejected_with_the_group(change: dict[str, Any], reply: str):
    async with (
        _server(lambda _: orjson.dumps([{"meta_info": {**META, **change}}])) as url,
        _client(url) as client,
    ):
        with pytest.raises(EngineRejected, match=reply) as caught:
            await client.generate([1], {"max_new_tokens": 2}, where="group b:7")
    assert caught.value.where == "group b:7"


async def test_an_unexpected_exception_reaches_the_caller_at_once():
    reply = orjson.dumps({"meta_info": {**META, "finish_reason": None}})

    def breaks(_: Generation) -> None:
        raise RuntimeError("the one who watched has gone")

    async with _server(lambda _: b"data: " + reply + b"\n\n") as url, _client(url) as client:
        async with asyncio.timeout(2.5):
            with pytest.raises(RuntimeError, match="the one who watched has gone"):
                await client.generate([1], {"max_new_tokens": 2}, watch=breaks)


async def test_a_closed_client_raises_in_its_callers():
    async with _server(_endless) as url, _client(url) as client:
        waiting = asyncio.create_task(
            client.generate([1], {"max_new_tokens": 2}, where="group b:7")
        )
        await asyncio.sleep(0.2)
        async with asyncio.timeout(2.5):
            await client.aclose()
            with pytest.raises(EngineUnavailable, match=r"(?s)group b:7.*closed"):
                await waiting


def test_an_aborted_response_ends_with_the_last_known_weight_version():
    meta = {
        **META,
        "finish_reason": {"type": "abort"},
        "weight_versions": META["weight_versions"][:1],
    }
    (read,) = read_generations(
        httpx.Response(200, content=orjson.dumps([{"meta_info": meta}])), 1, "e", 0.0, "w"
    )
    assert (read.response_ids, read.weight_versions) == ([3], [(1, "b@1@d")])


@asynccontextmanager
async def _server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """Serve the same bytes or response for every request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = answer(request)
        if isinstance(reply, web.StreamResponse):
            return reply
        return (
            web.Response(body=reply, content_type="application/json")
            if isinstance(reply, bytes)
            else await reply
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _client(url: str) -> GenerateClient:
    return GenerateClient(url, vocab_size=10, deadline_s=5.0, routed_width=1)


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b" " * 65536)
    return response


LISTS = [
    b"",
    b"[]",
    b"{}",
    b"\xff",
    DEEP,
    b'{"workers": 1}',
    b'{"workers": [1]}',
    b'{"workers": [{"id": "a"}]}',
    b'{"workers": [{"url": 5}]}',
]


@pytest.mark.parametrize("reply", LISTS)
async def test_an_invalid_list_of_workers_is_an_error_at_once(reply: bytes):
    async with _server(lambda _: reply) as url, _client(url) as client:
        with pytest.raises(EngineError, match="router"):
            await client.generate([1], {"max_new_tokens": 2}, routed_from=0)
        with pytest.raises(EngineRejected, match="router"):
            await asyncio.to_thread(ExternalRouter(url).workers)


async def test_a_redirect_is_an_error():
    async with _server(
        lambda _: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})
    ) as url:
        async with Engine(url) as engine:
            with pytest.raises(EngineRejected, match="HTTP 307"):
                await engine.pause()
        with pytest.raises(EngineRejected, match="HTTP 307"):
            await asyncio.to_thread(ExternalRouter(url).workers)
        (row,) = await score([SAMPLE], _rewards(url))
    assert row.reward is None and "HTTP 307" in str(row.error)


async def test_a_body_with_wrong_content_encoding_is_an_error():
    def torn(_: web.Request) -> web.Response:
        return web.Response(
            body=b"\x00" + gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}
        )

    async with _server(torn) as url:
        async with Engine(url) as engine:
            with pytest.raises(EngineError):
                await engine.info()
        with pytest.raises(EngineUnavailable):
            await asyncio.to_thread(ExternalRouter(url).workers)
        assert await asyncio.to_thread(external._get, url) is None


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"[]",
        b"\xff",
        DEEP,
        b'[{"meta_info": 1}]',
        b'[{"meta_info": {"input_token_logprobs": [[null], [NaN, 1]]}}]',
    ],
)
async def test_invalid_answers_to_administration_requests_are_rejected(reply: bytes):
    async with _server(lambda _: reply) as url, Engine(url) as engine:
        for asked in (engine.score([[1, 2]]), engine.require_spans(), engine.weight_version()):
            with pytest.raises(EngineRejected, match="cannot be read"):
                await asked


async def test_scores_have_one_value_per_token_of_each_sequence():
    reply = orjson.dumps([{"meta_info": {"input_token_logprobs": [[None, 1], [-1.0, 2]]}}])
    async with _server(lambda _: reply) as url, Engine(url) as engine:
        assert await engine.score([[1, 2]]) == [[-1.0]]
        for sequences in ([[1, 2, 3]], [[1, 2], [1, 2]]):
            with pytest.raises(EngineRejected, match="another number of log-prob"):
                await engine.score(sequences)


async def test_an_endless_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http, "LARGEST_ANSWER_BYTES", 10**6)
    monkeypatch.setattr(remote, "_MAX_ANSWER_BYTES", 10**6)
    monkeypatch.setattr("rlpipe.rollout.client.streaming._LONGEST_EVENT_BYTES", 10**6)
    monkeypatch.setattr(routes, "_CALL_S", 0.2)
    monkeypatch.setattr(external, "LOOK_S", 0.2)
    async with _server(_endless) as url, _client(url) as client:
        with pytest.raises(EngineRejected, match="more than 1000000 bytes"):
            await client.generate([1], {"max_new_tokens": 2})
        with pytest.raises(EngineRejected, match="more than 1000000 bytes"):
            await client.generate([1], {"max_new_tokens": 2}, watch=lambda _: None)
        with pytest.raises(EngineUnavailable, match="no end after"):
            await asyncio.to_thread(ExternalRouter(url).workers)
        assert await asyncio.to_thread(external._get, url) is None
        (row,) = await score([SAMPLE], _rewards(url))
        assert "more than 1000000 bytes" in str(row.error)


SAMPLE = Sample("g", 0, "p", [1], status=Status.COMPLETED)


def _rewards(url: str) -> RewardConfig:
    return RewardConfig(
        function=RemoteReward(type="remote", url=url, reward_key="r", tries=1),
        max_error_fraction=1.0,
    )


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff",
        DEEP,
        b"NaN",
        b"null",
        b'"1"',
        b"[1]",
        b"{}",
        b'{"r": "x"}',
        b'{"r": 1, "a": []}',
        b"1" + b"0" * 400,
    ],
)
async def test_an_invalid_reward_is_the_error_of_its_row(reply: bytes):
    async with _server(lambda _: reply) as url:
        (row,) = await score([SAMPLE], _rewards(url))
    assert row.reward is None and row.error


@given(
    st.lists(
        st.sampled_from(PLACES).flatmap(lambda place: st.tuples(st.just(place), JSON))
        | st.binary(max_size=9),
        max_size=3,
    )
)
def test_an_arbitrary_stream_is_a_response_or_a_named_error(events: list[Any]):
    def handle(request: httpx.Request) -> httpx.Response:
        lines = [
            event if isinstance(event, bytes) else json.dumps({"meta_info": _with(*event)}).encode()
            for event in events
        ]
        return httpx.Response(200, content=b"".join(b"data: " + line + b"\n\n" for line in lines))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            keep: dict[str, Any] = {
                "content": b"{}",
                "headers": None,
                "deadline_s": 5.0,
                "where": "w",
                "watch": lambda _: None,
            }
            answer = await stream(client, "http://e", **keep)
            read_generations(answer, 1, "e", 0.0, "w")

    with suppress(EngineError, DeadlineExceeded):
        asyncio.run(ask())
