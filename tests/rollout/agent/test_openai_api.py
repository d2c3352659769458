"""Streamed replies to an unmodified OpenAI client, and their tokens in the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import openai
import pytest

from rlpipe.engines.sglang.reply_format import SglangReplies
from rlpipe.errors import EngineUnavailable
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.agent.gateway import Gateway
from rlpipe.rollout.agent.routes import agent_routes
from rlpipe.rollout.generation import Generation
from rlpipe.types import Sample

END = 0
BEGIN = 1
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 500,
    "skip_special_tokens": False,
}
HELLO: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


class _Letters:
    """One token per letter, and a template that only appends."""

    chat_template = "yes"
    name_or_path = "letters"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        begin = [BEGIN] if add_special_tokens else []
        return begin + [ord(letter) if letter != "#" else END for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(
            chr(token) if token != END else "" if skip_special_tokens else "#" for token in ids
        )

    def apply_chat_template(
        self, messages, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> str:
        reply = "".join(
            f"{one['role'][0]}:{one['content'] or ''}{one.get('tool_calls') or ''}#"
            for one in messages
        )
        return reply + ("a:" if add_generation_prompt else "")


class Engine:
    """Return the reply in two halves, the second one or an error after `go` is set."""

    end_ids = frozenset({END})

    def __init__(self, reply: str, half: int, error: Exception | None = None) -> None:
        self.ids = [*map(ord, reply), END]
        self.half = half
        self.error = error
        self.go = asyncio.Event()
        self.reason = "stop"
        self.sampling: list[dict[str, Any]] = []
        self.watched = False

    async def generate(self, ids, sampling, *, watch=None, **_: Any) -> list[Generation]:
        self.sampling.append(sampling)
        if watch is not None:
            self.watched = True
            watch(self._what(self.ids[: self.half], "abort"))
            await self.go.wait()
        if self.error is not None:
            raise self.error
        return [self._what(self.ids, self.reason)]

    def _what(self, ids: list[int], reason: str) -> Generation:
        return Generation(ids, [-0.5] * len(ids), reason, [(len(ids), "b@3@d")], "e", 0, 1.0, 2.0)


@asynccontextmanager
async def opened(
    engine: Engine, *, evaluation: bool = False, sglang: dict[str, Any] | None = None
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ChatSessions, str]]:
    opened_sessions: list[ChatSessions] = []

    def routes(gateway: Gateway):
        sessions = ChatSessions(
            gateway,
            SAMPLING,
            {},
            model="m",
            evaluation=evaluation,
            reply_format=SglangReplies(cast(Any, gateway.tokenizer), sglang or {}),
        )
        opened_sessions.append(sessions)
        return agent_routes(sessions)

    fakes: tuple[Any, Any] = (engine, _Letters())
    async with Gateway(*fakes, context_len=2000, routes=routes) as gateway:
        opened_sessions[0].begin(Sample(session_id="s"))
        client = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/sessions/s/v1", api_key="none", max_retries=0
        )
        async with client:
            yield client, opened_sessions[0], gateway.url


async def _read(
    engine: Engine, client: openai.AsyncOpenAI, **keywords: Any
) -> tuple[list[str], Any]:
    """Return the texts before the engine was released, and the whole message as the client's
    library assembles it."""
    early: list[str] = []
    async with client.chat.completions.stream(model="m", messages=HELLO, **keywords) as stream:
        async for event in stream:
            if event.type == "content.delta" and not engine.go.is_set():
                early.append(event.delta)
                engine.go.set()
        return early, await stream.get_final_completion()


async def test_text_is_sent_before_the_reply_is_finished():
    engine = Engine("good morning to you", half=9)
    async with opened(engine) as (client, sessions, _):
        early, whole = await _read(
            engine, client, logprobs=True, stream_options={"include_usage": True}
        )
        message = whole.choices[0].message
        again: Any = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": "so"},
        ]
        await client.chat.completions.create(model="m", messages=again)
        (sample,) = sessions.samples(Sample(session_id="s"))
    assert early == ["good morn"] and message.content == "good morning to you"
    assert [one.token_id for one in whole.choices[0].logprobs.content] == engine.ids
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == (
        "stop",
        len(engine.ids),
    )
    assert sample.num_turns == 2 and sample.response_ids[: len(engine.ids)] == engine.ids
    assert sample.weight_versions == [(len(sample.response_ids), 3)]


@pytest.mark.parametrize(
    ("reply", "early", "content"),
    [(f"let me see\n{CALL}", "let me", "let me see"), (CALL, None, None)],
)
async def test_a_tool_call_is_sent_as_a_whole_and_the_text_before_it_as_it_is_sampled(
    reply, early, content
):
    engine = Engine(reply, half=7)
    if early is None:
        engine.go.set()
    async with opened(engine) as (client, _, _):
        first, whole = await _read(engine, client, tools=TOOLS)
    message = whole.choices[0].message
    assert (first, message.content or None) == ([early] if early else [], content)
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "it"}')
    assert whole.choices[0].finish_reason == "tool_calls"


async def test_a_lost_engine_is_an_error_in_the_stream_or_a_status_before_the_stream():
    error = EngineUnavailable("no engine answered", where="w")
    for half, kind in ((5, openai.APIError), (0, openai.InternalServerError)):
        engine = Engine("good morning", half, error)
        if not half:
            engine.go.set()
        async with opened(engine) as (client, sessions, _):
            with pytest.raises(kind, match="no engine answered"):
                await _read(engine, client)
            assert sessions.samples(Sample(session_id="s")) == [], (
                "what was not finished is no reply"
            )


async def test_log_probs_of_tokens_without_text_are_sent():
    engine = Engine("yes", half=3)
    async with opened(engine) as (client, _, _):
        early, whole = await _read(engine, client, logprobs=True)
    assert early == ["yes"]
    assert [one.token_id for one in whole.choices[0].logprobs.content] == engine.ids


async def test_each_event_of_sglangs_stream_has_all_tokens_so_far():
    engine = Engine("good", half=2)
    engine.go.set()
    async with opened(engine) as (_, _, url), httpx.AsyncClient() as client:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 9}, "stream": True}
        lines = (await client.post(f"{url}/generate", json=body)).text.split("\n\n")
        several = await client.post(f"{url}/generate", json={**body, "input_ids": [[5], [6]]})
    assert (
        lines[-2] == "data: [DONE]"
        and '"finish_reason": {"type": "stop"}' in lines[-3]
        and '"text": "good"' in lines[-3]
    )
    assert several.status_code == 400 and "a stream has one response" in several.text
