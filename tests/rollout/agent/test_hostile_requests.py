"""Invalid requests to the gateway are refused with the reason, and the server stays up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.rollout.agent.test_openai_api import HELLO, TOOLS, Engine, opened

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
            {"n": 0},
            {"n": 129},
            {"n": "1"},
            {"temperature": 2.1},
            {"top_p": 0},
            {"top_k": -2},
            {"min_p": 1.5},
            {"presence_penalty": 0.5},
            {"frequency_penalty": -3},
            {"logit_bias": {"5": 1}},
            {"stop": ""},
            {"top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 21},
            {"regex": "[ab]"},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "high"},
            {"modalities": ["audio"]},
            {"functions": []},
            {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "xml"}},
            {"tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            {"tools": TOOLS, "parallel_tool_calls": False},
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            {"tools": [{"type": "web_search"}]},
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ]
            },
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
COMPLETIONS: list[Any] = [
    {},
    {"prompt": 5},
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": ["a", "b"], "stream": True},
    {"prompt": "a", "echo": True},
    {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "best_of": 2},
    {"prompt": "a", "logprobs": 6},
    {"prompt": "a", "messages": HELLO},
]
RESPONSES: list[Any] = [
    {},
    {"input": 5},
    {"input": [{"type": "web_search_call", "id": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    *(
        {"input": "hi", **more}
        for more in (
            {"previous_response_id": "resp_no"},
            {"tools": [{"type": "web_search"}]},
            {"tools": TOOLS},
            {"background": True},
            {"truncation": "auto"},
            {"reasoning": {"effort": "high"}},
            {"conversation": "c"},
            {"include": ["file_search_call.results"]},
            {"top_logprobs": 3},
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            {"max_output_tokens": 0},
            {"temperature": 3},
        )
    ),
]
MESSAGES: list[Any] = [
    {},
    {"messages": HELLO},
    *(
        {"messages": HELLO, "max_tokens": 9, **more}
        for more in (
            {"max_tokens": 0},
            {"temperature": 3.0},
            {"stop_sequences": [""]},
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            {"tool_choice": {"type": "any"}},
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"mcp_servers": []},
            {"messages": [{"role": "system", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
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
    error = content.get("error", content)
    kinds = (error["type"], error.get("code"))
    assert status == 400 and kinds in (
        ("DataError", 400),
        ("invalid_request_error", "DataError"),
        ("invalid_request_error", None),
    ), f"{request!r:.80} was answered by {content}"
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


@pytest.mark.parametrize(
    ("path", "bodies"),
    [("completions", COMPLETIONS), ("responses", RESPONSES), ("messages", MESSAGES)],
)
async def test_requests_of_other_apis_are_refused_in_their_format(path: str, bodies: list[Any]):
    async with _gateway() as ask:
        for body in bodies:
            status, content = answer = await ask(f"/sessions/s/v1/{path}", json.dumps(body))
            _refused(answer, body)
            assert (content.get("type") == "error") is (path == "messages"), content
        for body in ({"messages": HELLO, "max_tokens": 5}, {"input": "hi"}, {"prompt": "hi"}):
            api = {"messages": "messages", "input": "responses", "prompt": "completions"}
            status, content = await ask(f"/sessions/s/v1/{api[next(iter(body))]}", json.dumps(body))
            assert status == 200, content


async def test_an_image_is_refused_by_name():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    async with _gateway() as ask:
        answer = await ask("/v1/chat/completions", json.dumps(body))
    _refused(answer, body, "messages.0.content.0.type")
    assert "image_url" in answer[1]["error"]["message"]


async def test_parameters_without_an_effect_on_tokens_are_accepted():
    more = {
        "user": "u",
        "seed": 5,
        "metadata": {},
        "max_tokens": None,
        "stop": None,
        "store": True,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    async with _gateway() as ask:
        status, _ = await ask("/v1/chat/completions", json.dumps({"messages": HELLO, **more}))
    assert status == 200
