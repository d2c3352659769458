"""Serve Anthropic's Messages API.

    POST /v1/messages                 tools, thinking, JSON formats, events
    POST /v1/messages/count_tokens    tokens of the prompt

The base URL of Anthropic's client is `{gateway}/sessions/<session id>`. Blocks become messages of
chat completions:

    text          `content`
    thinking      `reasoning_content` of the assistant's message
    tool_use      `tool_calls` of the assistant's message
    tool_result   a message of role `tool`, before the user's text

`cache_control` has no effect. `thinking` needs a reasoning parser; its budget and the effort are
not applied, and the header of the answer says so.

Entry point: `Messages`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from aiohttp import web

from rlpipe.errors import DataError, RlpipeError
from rlpipe.rollout.agent.chat_sessions import (
    NOT_APPLIED,
    ChatSessions,
    FinishedReply,
    ReplyRequest,
    json_schema_parameters,
)
from rlpipe.rollout.agent.events import Events
from rlpipe.rollout.agent.openai_api import tool_offer
from rlpipe.rollout.agent.replies import ToolCall
from rlpipe.rollout.agent.request_models import CountTokensRequest, MessagesRequest, read_body
from rlpipe.rollout.generation import Generation
from rlpipe.types import Message

_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """Handler of the Messages API."""

    def __init__(self, sessions: ChatSessions) -> None:
        self._sessions = sessions

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await read_body(request, MessagesRequest)
        session = self._sessions.session_of(request)
        wanted = self._wanted(f"POST {request.path}", body)
        head = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or self._sessions.model,
        }
        if not body.get("stream"):
            (reply,) = await self._sessions.replies(session, wanted)
            return web.json_response({**head, **_answer(reply)}, headers=wanted.headers)
        stream = _MessageStream(Events(request, wanted.headers, with_types=True), head)
        stream.num_prompt_tokens = self._sessions.count_tokens(session, wanted)
        try:
            (reply,) = await self._sessions.replies(session, wanted, [stream])
        except RlpipeError as error:
            return await stream.events.failed(error)
        return await stream.finish(reply)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer a request for the number of tokens of a prompt."""
        body = await read_body(request, CountTokensRequest)
        session = self._sessions.session_of(request)
        wanted = self._wanted(f"POST {request.path}", body)
        return web.json_response({"input_tokens": self._sessions.count_tokens(session, wanted)})

    def _wanted(self, where: str, body: dict[str, Any]) -> ReplyRequest:
        stops = body.get("stop_sequences")
        sampling, headers = self._sessions.sampling(where, body, body.get("max_tokens"), stops)
        settings = body.get("output_config") or {}
        if (settings.get("format") or {}).get("schema"):
            sampling |= json_schema_parameters(where, "json_schema", settings["format"]["schema"])
        thinking = body.get("thinking") or {"type": "disabled"}
        if thinking["type"] == "enabled" and not self._sessions.has_reasoning:
            raise DataError(
                "the run does not separate the model's reasoning",
                where=f"{where}: thinking",
                found=thinking["type"],
                expected="disabled",
                do="set engine.sglang.reasoning_parser",
            )
        unused = [headers[NOT_APPLIED]] if NOT_APPLIED in headers else []
        unused += ["thinking.budget_tokens"] if thinking.get("budget_tokens") else []
        unused += ["output_config.effort"] if settings.get("effort") else []
        if unused:
            headers[NOT_APPLIED] = ", ".join(unused)
        choice = body.get("tool_choice") or {"type": "auto"}
        return ReplyRequest(
            where,
            sampling,
            messages=messages_of(body.get("system"), body["messages"]),
            offer=tool_offer(
                where,
                [_tool(tool) for tool in body.get("tools") or ()],
                _CHOICES[choice["type"]],
                choice.get("name") if choice["type"] == "tool" else None,
                parallel=not choice.get("disable_parallel_tool_use"),
            ),
            headers=headers,
        )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the format of OpenAI's chat completions."""
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def messages_of(
    system: str | Sequence[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]
) -> list[Message]:
    """Return the messages of a request as messages of chat completions."""
    converted: list[Message] = []
    if system:
        text = system if isinstance(system, str) else "\n".join(part["text"] for part in system)
        converted.append({"role": "system", "content": text})
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            converted.append(_assistant_message(blocks))
        else:
            converted += _user_messages(blocks)
    return converted


def _assistant_message(blocks: Sequence[dict[str, Any]]) -> Message:
    texts: dict[str, str] = {"text": "", "thinking": ""}
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] in texts:
            texts[block["type"]] += block[block["type"]]
        elif block["type"] == "tool_use":
            call = ToolCall(block["id"], block["name"], json.dumps(block["input"]))
            calls.append(call.as_json())
    message: Message = {"role": "assistant", "content": texts["text"]}
    if texts["thinking"]:
        message["reasoning_content"] = texts["thinking"]
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            messages.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            )
        elif block["type"] == "text":
            texts.append(block["text"])
    if texts:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _answer(reply: FinishedReply) -> dict[str, Any]:
    """Return the fields of a message that a reply determines."""
    content: list[dict[str, Any]] = []
    if reply.text.reasoning:
        content.append({"type": "thinking", "thinking": reply.text.reasoning, "signature": ""})
    if reply.text.content or not reply.text.calls:
        content.append({"type": "text", "text": reply.text.content})
    content += [_tool_use(call, json.loads(call.arguments)) for call in reply.text.calls]
    return {"content": content, **_stop(reply), "usage": _usage(reply)}


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _stop(reply: FinishedReply) -> dict[str, Any]:
    reason = _REASONS[reply.reason]
    if reason == "end_turn" and reply.stop_text is not None:
        reason = "stop_sequence"
    is_stop_text = reason == "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_text if is_stop_text else None}


def _usage(reply: FinishedReply) -> dict[str, Any]:
    # Anthropic's input_tokens do not include tokens from the cache.
    cached = min(reply.generation.cached_tokens, reply.num_prompt_tokens)
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(reply.generation.response_ids),
    }


class _MessageStream:
    """The events of one message: its blocks one after another."""

    def __init__(self, events: Events, head: dict[str, Any]) -> None:
        self.events = events
        self.num_prompt_tokens = 0
        self._head = head
        self._has_begun = False
        self._open: str | None = None
        """`thinking` or `text`: the block that is not complete."""
        self._num_blocks = 0

    async def send(self, reasoning: str, content: str, partial: Generation) -> None:
        """See `ReplyStream`."""
        await self._begin()
        if reasoning and not (self._open == "text" or self._num_blocks > 0):
            await self._send_text("thinking", reasoning)
        if content:
            await self._send_text("text", content)

    async def finish(self, reply: FinishedReply) -> web.StreamResponse:
        """Send the rest of a reply, the stop reason and the token counts."""
        await self.send(*reply.rest, reply.generation)
        if self._open is None and not reply.text.calls and not self._num_blocks:
            await self._open_block("text", {"type": "text", "text": ""})
        await self._close_block()
        for call in reply.text.calls:
            await self._open_block("tool_use", _tool_use(call, {}))
            await self._send_delta({"type": "input_json_delta", "partial_json": call.arguments})
            await self._close_block()
        usage = _usage(reply)
        await self._send("message_delta", delta=_stop(reply), usage=usage)
        await self._send("message_stop")
        return await self.events.end()

    async def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        usage = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        await self._send("message_start", message=message)

    async def _send_text(self, kind: str, text: str) -> None:
        if self._open != kind:
            await self._close_block()
            empty = {"type": kind, kind: ""}
            if kind == "thinking":
                empty["signature"] = ""
            await self._open_block(kind, empty)
        await self._send_delta({"type": f"{kind}_delta", kind: text})

    async def _open_block(self, kind: str, block: dict[str, Any]) -> None:
        self._open = kind
        await self._send("content_block_start", index=self._num_blocks, content_block=block)

    async def _send_delta(self, delta: dict[str, Any]) -> None:
        await self._send("content_block_delta", index=self._num_blocks, delta=delta)

    async def _close_block(self) -> None:
        if self._open is None:
            return
        await self._send("content_block_stop", index=self._num_blocks)
        self._open = None
        self._num_blocks += 1

    async def _send(self, kind: str, **fields: Any) -> None:
        await self.events.send({"type": kind, **fields})
