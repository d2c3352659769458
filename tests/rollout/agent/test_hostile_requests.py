"""Invalid requests to the gateway are refused with the reason, and the server stays up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.rollout.agent.test_openai_stream import HELLO, Engine, opened

DEEP = "[" * 100_000
CHATS: list[Any] = [
    [],
    None,
    "x",
    {},
    {"messages": "hi"},
    {"messages": []},
    {"messages": ["hi"]},
    {"messages": [{"role": 1, "content": "x"}]},
    {"messages": [{"role": "user", "content": {"a": 1}}]},
    {"messages": [{"role": "user", "content": [1]}]},
    {"messages": [{"role": "user", "content": [{"text": 1}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "assistant", "tool_calls": [1]}]},
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        ]
    },
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}
        ]
    },
    *(
        {"messages": HELLO, **more}
        for more in (
            {"max_tokens": 0},
            {"max_tokens": "5"},
            {"max_completion_tokens": 1e400},
            {"n": 2},
            {"n": "1"},
            {"stop": 5},
            {"stop": [5]},
            {"tools": "x"},
            {"tools": [1]},
            {"stream": "yes"},
            {"stream_options": 5},
            {"temperature": "hot"},
            {"temperature": float("nan")},
            {"top_k": 0.5},
            {"logprobs": 3},
            {"model": 5},
        )
    ),
]
GENERATES: list[Any] = [
    [],
    {"input_ids": 5},
    {"input_ids": ["a"]},
    {"input_ids": [1.5]},
    {"text": 5},
    {"input_ids": [1], "sampling_params": 5},
    {"input_ids": [1], "sampling_params": {"n": 10**9}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": "9"}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    {"input_ids": [1], "sampling_params": {"temperature": float("inf")}},
    {"input_ids": [1], "routed_experts_start_len": -1},
]


@asynccontextmanager
async def _gateway() -> AsyncIterator[
    Callable[[str, str | bytes], Awaitable[tuple[int, dict[str, Any]]]]
]:
    async with opened(Engine("yes", 1)) as (client, _, url):

        async def post(path: str, content: str | bytes) -> tuple[int, dict[str, Any]]:
            answer = await client._client.post(f"{url}{path}", content=content)
            return answer.status_code, answer.json()

        yield post


def _refused(answer: tuple[int, dict[str, Any]], request: Any, where: str = "") -> None:
    status, content = answer
    assert (status, content.get("error", content).get("type")) == (400, "DataError"), (
        f"{request!r:.80} was answered by {content}"
    )
    assert where in content["error"]["message"]


async def test_invalid_chat_requests_are_refused_by_field_and_the_session_stays_open():
    async with _gateway() as ask:
        for body in CHATS:
            _refused(await ask("/sessions/s/v1/chat/completions", json.dumps(body)), body)
        status, content = await ask(
            "/sessions/s/v1/chat/completions", json.dumps({"messages": HELLO})
        )
    assert status == 200 and content["choices"][0]["message"]["content"] == "yes"


async def test_invalid_generate_requests_are_refused_by_field():
    async with _gateway() as ask:
        for body in GENERATES:
            _refused(await ask("/generate", json.dumps(body)), body, "/generate")


async def test_a_body_that_is_not_json_is_refused():
    async with _gateway() as ask:
        for content in (b"", b"{", b"\xff\xfe", DEEP.encode(), b"9" * 5000):
            for path in ("/generate", "/v1/chat/completions", "/sessions/s/v1/chat/completions"):
                _refused(await ask(path, content), content, path)


async def test_an_unknown_session_is_refused():
    async with _gateway() as ask:
        _refused(
            await ask("/sessions/other/v1/chat/completions", json.dumps({"messages": HELLO})),
            "other",
            "other",
        )


async def test_other_fields_of_openai_are_ignored():
    more = {"user": 5, "seed": "x", "metadata": [], "max_tokens": None, "stop": None, "store": True}
    async with _gateway() as ask:
        status, _ = await ask("/v1/chat/completions", json.dumps({"messages": HELLO, **more}))
    assert status == 200
