"""Serve OpenAI's chat completions and text completions to unmodified clients.

    POST /v1/chat/completions     messages, tools, JSON formats, log-probs; n replies
    POST /v1/completions          texts or token ids, log-probs; n replies for each prompt

With `stream` the replies are sent while they are sampled; a reply under a grammar (a JSON format or
a forced call) is sent once it is complete. Log-probs have the additional field `token_id`.

Entry points: `ChatCompletions`, `TextCompletions`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from aiohttp import web

from rlpipe.errors import DataError, RlpipeError
from rlpipe.rollout.agent.chat_sessions import (
    ChatSessions,
    FinishedReply,
    ReplyRequest,
    Session,
    json_schema_parameters,
)
from rlpipe.rollout.agent.events import Events
from rlpipe.rollout.agent.replies import ToolOffer
from rlpipe.rollout.agent.request_models import ChatRequest, CompletionRequest, read_body
from rlpipe.rollout.generation import Generation, TopLogProbs

# OpenAI's value for a token that cannot be sampled.
_LOWEST_LOG_PROB = -9999.0


class ChatCompletions:
    """Handler of chat completions."""

    def __init__(self, sessions: ChatSessions) -> None:
        self._sessions = sessions

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await read_body(request, ChatRequest)
        session = self._sessions.session_of(request)
        wanted = self._wanted(f"POST {request.path}", body)
        head = _head("chatcmpl", body, self._sessions)
        format_log_probs = None
        if body.get("logprobs"):
            format_log_probs = partial(log_prob_entries, self._sessions.gateway.decode)
        if body.get("stream"):
            events = Events(request, wanted.headers)
            streams = [
                _ChatStream(events, head, index, format_log_probs) for index in range(wanted.n)
            ]
            return await _streamed(self._sessions, session, wanted, events, streams, head, body)
        replies = await self._sessions.replies(session, wanted)
        choices = []
        for index, reply in enumerate(replies):
            log_probs = format_log_probs and {"content": format_log_probs(reply.generation, 0)}
            choices.append(
                {
                    "index": index,
                    "message": reply.text.message(),
                    "finish_reason": reply.reason,
                    "logprobs": log_probs,
                }
            )
        completion = {
            **head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage([replies]),
        }
        return web.json_response(completion, headers=wanted.headers)

    def _wanted(self, where: str, body: dict[str, Any]) -> ReplyRequest:
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise DataError(
                "top_logprobs needs logprobs",
                where=f"{where}: top_logprobs",
                found=f"logprobs: {body.get('logprobs')}",
                expected="logprobs: true",
            )
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        sampling, headers = self._sessions.sampling(where, body, max_tokens, body.get("stop"))
        given: dict[str, Any] = body.get("response_format") or {"type": "text"}
        schema = (given.get("json_schema") or {}).get("schema")
        sampling |= json_schema_parameters(f"{where}: response_format", given["type"], schema)
        choice = body.get("tool_choice") or "auto"
        function = choice["function"]["name"] if isinstance(choice, dict) else None
        return ReplyRequest(
            where,
            sampling,
            messages=body["messages"],
            offer=tool_offer(
                where,
                body.get("tools") or [],
                "required" if function else choice,
                function,
                parallel=body.get("parallel_tool_calls"),
            ),
            n=body.get("n") or 1,
            num_top_log_probs=body.get("top_logprobs") or 0,
            headers=headers,
        )


class TextCompletions:
    """Handler of text completions."""

    def __init__(self, sessions: ChatSessions) -> None:
        self._sessions = sessions

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await read_body(request, CompletionRequest)
        session = self._sessions.session_of(request)
        all_wanted = self._wanted(f"POST {request.path}", body)
        head = {**_head("cmpl", body, self._sessions), "object": "text_completion"}
        format_log_probs = None
        if body.get("logprobs") is not None:
            format_log_probs = partial(self._log_probs, body["logprobs"])
        if body.get("stream"):
            if len(all_wanted) > 1:
                raise DataError(
                    "a stream has one prompt",
                    where=f"POST {request.path}: prompt",
                    found=f"{len(all_wanted)} prompts, stream: true",
                    expected=1,
                )
            events = Events(request, all_wanted[0].headers)
            streams = [
                _TextStream(events, head, index, format_log_probs)
                for index in range(all_wanted[0].n)
            ]
            return await _streamed(
                self._sessions, session, all_wanted[0], events, streams, head, body
            )
        of_prompts = [await self._sessions.replies(session, wanted) for wanted in all_wanted]
        choices = []
        for reply in (reply for replies in of_prompts for reply in replies):
            log_probs = format_log_probs and format_log_probs(reply.generation, 0)
            choices.append(_text_choice(len(choices), reply.text.content, reply.reason, log_probs))
        completion = {**head, "choices": choices, "usage": usage(of_prompts)}
        return web.json_response(completion, headers=all_wanted[0].headers)

    def _wanted(self, where: str, body: dict[str, Any]) -> list[ReplyRequest]:
        # OpenAI's default is 16 tokens.
        max_tokens = body.get("max_tokens") or 16
        sampling, headers = self._sessions.sampling(where, body, max_tokens, body.get("stop"))
        prompt = body["prompt"]
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return [
            ReplyRequest(
                where,
                sampling,
                prompt=one,
                n=body.get("n") or 1,
                num_top_log_probs=body.get("logprobs") or 0,
                headers=headers,
            )
            for one in (prompt if several else [prompt])
        ]

    def _log_probs(self, num_top: int, generation: Generation, start: int) -> dict[str, Any]:
        """Return the log-probs of the tokens from `start` on."""
        entries = log_prob_entries(self._sessions.gateway.decode, generation, start)
        tokens = [entry["token"] for entry in entries]
        before = self._sessions.gateway.decode(
            generation.response_ids[:start], skip_special_tokens=False
        )
        offsets = [len(before)]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        top = [
            {one["token"]: one["logprob"] for one in reversed(entry["top_logprobs"])}
            for entry in entries
        ]
        return {
            "tokens": tokens,
            "token_ids": [entry["token_id"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": top if num_top else None,
            "text_offset": offsets[:-1],
        }


class _ChatStream:
    """Chunks of one reply of a chat completion."""

    def __init__(
        self,
        events: Events,
        head: dict[str, Any],
        index: int,
        format_log_probs: Callable[[Generation, int], list[dict[str, Any]]] | None,
    ) -> None:
        """`format_log_probs` gets the first token; None if log-probs are not requested."""
        self._events = events
        self._head = {**head, "object": "chat.completion.chunk"}
        self._index = index
        self._format_log_probs = format_log_probs
        self._num_log_probs_sent = 0
        self._has_role = False

    async def send(self, reasoning: str, content: str, partial: Generation) -> None:
        """See `ReplyStream`."""
        await self._send_delta(_text_delta(reasoning, content), partial)

    async def finish(self, reply: FinishedReply) -> None:
        """Send the rest of a reply and its finish reason."""
        delta = _text_delta(*reply.rest)
        if calls := reply.text.message().get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        # Tokens without text, such as the end of the sequence, have log-probs too.
        num_tokens = len(reply.generation.response_ids)
        has_log_probs = self._format_log_probs is not None
        if delta or not self._has_role or (has_log_probs and self._num_log_probs_sent < num_tokens):
            await self._send_delta(delta, reply.generation)
        choice = {"index": self._index, "delta": {}, "finish_reason": reply.reason}
        await self._events.send({**self._head, "choices": [choice]})

    async def _send_delta(self, delta: dict[str, Any], generation: Generation) -> None:
        if not self._has_role:
            delta = {"role": "assistant", "content": "", **delta}
            self._has_role = True
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._format_log_probs is not None:
            entries = self._format_log_probs(generation, self._num_log_probs_sent)
            choice["logprobs"] = {"content": entries}
            self._num_log_probs_sent = len(generation.response_ids)
        await self._events.send({**self._head, "choices": [choice]})


class _TextStream:
    """Chunks of one text completion."""

    def __init__(
        self,
        events: Events,
        head: dict[str, Any],
        index: int,
        format_log_probs: Callable[[Generation, int], dict[str, Any]] | None,
    ) -> None:
        """See `_ChatStream`."""
        self._events = events
        self._head = head
        self._index = index
        self._format_log_probs = format_log_probs
        self._num_log_probs_sent = 0

    async def send(self, reasoning: str, content: str, partial: Generation) -> None:
        """See `ReplyStream`."""
        await self._send_text(content, partial, None)

    async def finish(self, reply: FinishedReply) -> None:
        """Send the rest of a reply and its finish reason."""
        await self._send_text(reply.rest[1], reply.generation, reply.reason)

    async def _send_text(self, text: str, generation: Generation, reason: str | None) -> None:
        log_probs = None
        if self._format_log_probs is not None:
            log_probs = self._format_log_probs(generation, self._num_log_probs_sent)
            self._num_log_probs_sent = len(generation.response_ids)
        choice = _text_choice(self._index, text, reason, log_probs)
        await self._events.send({**self._head, "choices": [choice]})


async def _streamed(
    sessions: ChatSessions,
    session: Session,
    wanted: ReplyRequest,
    events: Events,
    streams: Sequence[_ChatStream] | Sequence[_TextStream],
    head: dict[str, Any],
    body: dict[str, Any],
) -> web.StreamResponse:
    """Send replies while they are sampled."""
    try:
        replies = await sessions.replies(session, wanted, streams)
    except RlpipeError as error:
        return await events.failed(error)
    for stream, reply in zip(streams, replies, strict=True):
        await stream.finish(reply)
    if (body.get("stream_options") or {}).get("include_usage"):
        is_chat = isinstance(streams[0], _ChatStream)
        kind = {"object": "chat.completion.chunk"} if is_chat else {}
        await events.send({**head, **kind, "choices": [], "usage": usage([replies])})
    return await events.end()


def tool_offer(
    where: str,
    tools: Sequence[dict[str, Any]],
    choice: Any,
    function: str | None,
    *,
    parallel: bool | None,
) -> ToolOffer:
    """Return the tools of a request. Raises: DataError for a choice that cannot be met."""
    names = [tool["function"]["name"] for tool in tools]
    if function is not None and function not in names:
        raise DataError(
            "the function is not one of the tools",
            where=f"{where}: tool_choice",
            found=function,
            expected=", ".join(names) or "tools",
        )
    if choice == "required" and not tools:
        raise DataError("a call needs tools", where=f"{where}: tool_choice", found="no tools")
    if parallel is False and tools and choice == "auto":
        raise DataError(
            "only a forced call can be limited to one call",
            where=f"{where}: parallel tool calls",
            found="false, with tool_choice auto",
            expected="true, or a tool_choice that forces a call",
        )
    return ToolOffer(tuple(tools), choice, function, parallel=parallel is not False)


def log_prob_entries(
    decode: Callable[..., str], generation: Generation, start: int
) -> list[dict[str, Any]]:
    """Return OpenAI's log-prob entries of the tokens from `start` on."""
    entries = []
    for position in range(start, len(generation.response_ids)):
        token = generation.response_ids[position]
        top: TopLogProbs = []
        if generation.top_log_probs is not None:
            top = generation.top_log_probs[position]
        entry = _log_prob_entry(decode, token, generation.log_probs[position])
        entry["top_logprobs"] = [_log_prob_entry(decode, one, value) for value, one in top]
        entries.append(entry)
    return entries


def _log_prob_entry(decode: Callable[..., str], token: int, log_prob: float) -> dict[str, Any]:
    text = decode([token], skip_special_tokens=False)
    return {
        "token": text,
        "token_id": token,
        "logprob": max(log_prob, _LOWEST_LOG_PROB),
        "bytes": list(text.encode()),
    }


def usage(of_prompts: Sequence[Sequence[FinishedReply]]) -> dict[str, Any]:
    """Return OpenAI's token counts. The tokens of a prompt with several replies count once."""
    prompt_tokens = sum(replies[0].num_prompt_tokens for replies in of_prompts)
    cached_tokens = sum(replies[0].generation.cached_tokens for replies in of_prompts)
    completion_tokens = sum(
        len(reply.generation.response_ids) for replies in of_prompts for reply in replies
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _head(prefix: str, body: dict[str, Any], sessions: ChatSessions) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "created": int(time.time()),
        "model": body.get("model") or sessions.model,
    }


def _text_delta(reasoning: str, content: str) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reasoning:
        delta["reasoning_content"] = reasoning
    if content:
        delta["content"] = content
    return delta


def _text_choice(
    index: int, text: str, reason: str | None, log_probs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": log_probs}
