"""Streamed responses have the same tokens as complete answers, also after aborts and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import EngineRejected, EngineUnavailable
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generation import Generation
from tests.live_engine import VOCAB_SIZE, log_probs

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 40, "ignore_eos": True}


class _Watched(list[Generation]):
    """Partial responses that a watch got, in order."""

    def check(self, whole: Generation) -> None:
        held: list[int] = []
        for part in self:
            assert part.response_ids[: len(held)] == held and len(part.log_probs) == len(
                part.response_ids
            )
            held = part.response_ids
        assert whole.response_ids[: len(held)] == held


@pytest.mark.integration
async def test_a_real_engine_streams_through_the_router_and_continues_after_an_abort(live):
    watched = _Watched()
    async with (
        GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=60) as client,
        Engine(live.server.url) as engine,
    ):

        def watch(part: Generation) -> None:
            watched.append(part)
            if len(watched) == 5:
                aborts.append(asyncio.ensure_future(engine.abort_all()))

        aborts: list[asyncio.Future[None]] = []
        sampling = {**SAMPLING, "max_new_tokens": 200}
        (whole,) = await client.generate([5, 6, 7], sampling, watch=watch)
        await asyncio.gather(*aborts)
        streamed = await asyncio.gather(
            *(client.generate([5, 6, 7], SAMPLING, watch=parts.append) for parts in ([], []))
        )
    watched.check(whole)
    assert len(watched) > 20 and len(whole.response_ids) == 200 and whole.finish_reason == "length"
    np.testing.assert_allclose(
        whole.log_probs, log_probs(live.model, [5, 6, 7], whole.response_ids), atol=1e-4
    )
    assert sum(tokens for tokens, _ in whole.weight_versions) == 200
    assert [len(one.response_ids) for (one,) in streamed] == [40, 40]


def _event(
    ids: Sequence[int], reason: str | None = None, others: dict[str, Any] | None = None
) -> dict[str, Any]:
    pairs = [[-float(token), token, None] for token in ids]
    finish = {"type": reason} if reason else None
    return {
        "meta_info": {
            "output_token_logprobs": pairs,
            "finish_reason": finish,
            "weight_version": "b@1@d",
            **(others or {}),
        }
    }


class _Scripted:
    """Answer each request with its events in order; an exception among them breaks the
    connection."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.requests = []

    def client(self) -> GenerateClient:
        client = GenerateClient("http://router", vocab_size=VOCAB_SIZE, deadline_s=5.0)
        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        return client

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        return httpx.Response(200, content=self._body(self.answers.pop(0)))

    async def _body(self, events: list[Any]) -> AsyncIterator[bytes]:
        for event in events:
            if isinstance(event, Exception):
                raise event
            text = f"data: {json.dumps(event)}\n\n".encode()
            yield text[:9]
            yield text[9:]
        yield b"data: [DONE]\n\n"


async def _streamed(*answers: list[Any]) -> tuple[Generation, _Watched, list[dict[str, Any]]]:
    script = _Scripted(*answers)
    watched = _Watched()
    async with script.client() as client:
        (whole,) = await client.generate([9], {"max_new_tokens": 4}, watch=watched.append)
    watched.check(whole)
    return whole, watched, script.requests


async def test_events_with_all_tokens_and_events_with_new_tokens_give_the_same_response():
    every, _, (request,) = await _streamed([_event([1]), _event([1, 2]), _event([1, 2, 3], "stop")])
    length = "output_token_logprobs_length"
    new, watched, _ = await _streamed(
        [
            _event([1], None, {length: 1}),
            _event([2], None, {length: 2}),
            _event([3], "stop", {length: 3}),
        ]
    )
    for found in (every, new):
        assert (found.response_ids, found.log_probs, found.finish_reason) == (
            [1, 2, 3],
            [-1.0, -2.0, -3.0],
            "stop",
        )
        assert found.weight_versions == [(3, "b@1@d")]
    assert [(part.response_ids, part.finish_reason) for part in watched] == [
        ([1], "abort"),
        ([1, 2], "abort"),
    ]
    assert (request["stream"], request["input_ids"]) == (True, [9])


async def test_tokens_that_are_twice_in_one_event_are_read_once():
    length = "output_token_logprobs_length"
    whole, _, _ = await _streamed(
        [_event([1], None, {length: 1}), _event([2, 1, 2], "stop", {length: 2})]
    )
    assert (whole.response_ids, whole.log_probs) == ([1, 2], [-1.0, -2.0])


@pytest.mark.parametrize("length", [5, -1, "2"])
async def test_tokens_that_do_not_follow_the_earlier_tokens_are_refused(length: Any):
    with pytest.raises(EngineRejected, match="cannot be read"):
        await _streamed(
            [_event([1]), _event([2], "stop", {"output_token_logprobs_length": length})]
        )


async def test_a_response_continues_after_a_broken_connection():
    spans = {"weight_versions": [{"version": "b@1@d", "start": 0, "end": 9}]}
    broken = [_event([1]), _event([1, 2], None, spans), httpx.ReadError("gone")]
    whole, watched, requests = await _streamed(
        broken, [_event([3]), _event([3, 4], "length", {"weight_version": "b@2@e"})]
    )
    assert (whole.response_ids, whole.log_probs) == ([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    assert whole.weight_versions == [(2, "b@1@d"), (2, "b@2@e")]
    assert [part.response_ids for part in watched] == [[1], [1, 2], [1, 2, 3]]
    assert (requests[1]["input_ids"], requests[1]["sampling_params"]["max_new_tokens"]) == (
        [9, 1, 2],
        2,
    )


async def test_a_connection_that_breaks_before_the_first_token_is_repeated():
    whole, _, requests = await _streamed([httpx.ReadError("gone")], [_event([7], "stop")])
    assert whole.response_ids == [7] and requests[0] == requests[1]


async def test_an_error_in_the_stream_is_an_error():
    with pytest.raises(EngineRejected, match=r"HTTP 400.*too long"):
        await _streamed([{"error": {"message": "too long", "code": 400}}])
    abort = _event([], "abort")
    abort["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "bad parameter"}
    with pytest.raises(EngineRejected, match="bad parameter"):
        await _streamed([abort])
    with pytest.raises(EngineRejected, match=r"HTTP 500.*no memory"):
        await _streamed([{"error": "no memory"}])
    for event in (
        {"meta_info": {"output_token_logprobs": [[float("nan"), 1, None]]}},
        {"meta_info": "none"},
        {"error": [1]},
        [1],
    ):
        with pytest.raises(EngineRejected, match="cannot be read"):
            await _streamed([event])


async def test_a_stream_without_an_end_is_an_error():
    script = _Scripted(*([[]] * 50))
    async with script.client() as client:
        client.pool.deadline_s = 0.3
        with pytest.raises(EngineUnavailable, match="without an end"):
            await client.generate([9], {"max_new_tokens": 4}, watch=lambda part: None)


async def test_top_log_probs_have_one_entry_for_each_token_after_a_broken_connection():
    def top(ids: Sequence[int]) -> dict[str, Any]:
        return {"output_top_logprobs": [[[-0.1, 7, None], [-float(one), one, None]] for one in ids]}

    script = _Scripted(
        [_event([1], None, top([1])), _event([1, 2], None, top([1, 2])), httpx.ReadError("gone")],
        [_event([3], "stop", top([3]))],
    )
    watched = _Watched()
    async with script.client() as client:
        (whole,) = await client.generate(
            [9], {"max_new_tokens": 4}, watch=watched.append, num_top_log_probs=2
        )
    assert whole.top_log_probs == [[(-0.1, 7), (-float(one), one)] for one in (1, 2, 3)]
    assert [len(part.top_log_probs or ()) for part in watched] == [1, 2]
    assert [request["top_logprobs_num"] for request in script.requests] == [2, 2]
    assert "top_logprobs_num" not in (await _streamed([_event([1], "stop")]))[2][0]


async def test_a_response_under_a_grammar_starts_again_after_an_abort():
    """An engine that got `{"a` as a prompt would begin the grammar with another brace."""
    rows = [
        [{"meta_info": _event(ids, reason)["meta_info"]}]
        for ids, reason in (([1, 2], "abort"), ([3, 4], "stop"))
    ]
    requests: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content))
        return httpx.Response(200, json=rows[len(requests) - 1])

    client = GenerateClient("http://router", vocab_size=VOCAB_SIZE, deadline_s=5.0)
    client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with client:
        sampling = {"max_new_tokens": 4, "json_schema": "{}"}
        (generation,) = await client.generate([9], sampling)
    assert [request["input_ids"] for request in requests] == [[[9]], [[9]]]
    assert [request["sampling_params"]["max_new_tokens"] for request in requests] == [4, 4]
    assert (generation.response_ids, generation.log_probs) == ([3, 4], [-3.0, -4.0])


async def test_a_structural_tag_goes_to_the_engine_because_the_router_drops_it():
    urls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        urls.append(str(request.url))
        if request.url.path == "/workers":
            return httpx.Response(200, json={"workers": [{"url": "http://engine"}]})
        return httpx.Response(200, json=[_event([1], "stop")])

    client = GenerateClient("http://router", vocab_size=VOCAB_SIZE, deadline_s=5.0)
    client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with client:
        for grammar in ("structural_tag", "json_schema"):
            await client.generate([9], {"max_new_tokens": 4, grammar: "{}"})
    assert urls == ["http://router/workers", "http://engine/generate", "http://router/generate"]
