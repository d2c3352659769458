"""Serve OpenAI's Responses API, the default of the openai-agents library.

    POST /v1/responses    input: a text or a list of items; tools, JSON formats, events

The conversation is in the request's items (stateless), or in a session's earlier response
(`previous_response_id`). Reasoning is an item of its own, which clients return with the next
request. Items become messages of chat completions:

    message                 the message; an assistant's message also has the calls after it
    reasoning               `reasoning_content` of the assistant's message
    function_call           `tool_calls` of the assistant's message
    function_call_output    a message of role `tool`

Entry point: `Responses`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from rlpipe.rollout.agent.openai_api import log_prob_entries, tool_offer
from rlpipe.rollout.agent.replies import ToolCall
from rlpipe.rollout.agent.request_models import ResponsesRequest, read_body
from rlpipe.rollout.generation import Generation
from rlpipe.types import Message

_LOG_PROBS = "message.output_text.logprobs"


class Responses:
    """Handler of the Responses API."""

    def __init__(self, sessions: ChatSessions) -> None:
        self._sessions = sessions

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await read_body(request, ResponsesRequest)
        session = self._sessions.session_of(request)
        where = f"POST {request.path}"
        earlier = self._earlier_messages(where, session, body)
        messages = [*earlier, *messages_of(body["input"])]
        wanted = self._wanted(where, body, messages)
        head = self._head(body, wanted)
        if not body.get("stream"):
            (reply,) = await self._sessions.replies(session, wanted)
            response = self._finished(session, head, body, messages, reply)
            return web.json_response(response, headers=wanted.headers)
        stream = _ResponseStream(Events(request, wanted.headers, with_types=True), head)
        try:
            (reply,) = await self._sessions.replies(session, wanted, [stream])
        except RlpipeError as error:
            return await stream.events.failed(error)
        return await stream.finish(
            reply, self._finished(session, head, body, messages, reply, stream)
        )

    def _earlier_messages(
        self, where: str, session: Session, body: dict[str, Any]
    ) -> list[Message]:
        previous = body.get("previous_response_id")
        if previous is None:
            return []
        if previous not in session.responses:
            raise DataError(
                "the session has no such response",
                where=f"{where}: previous_response_id",
                found=previous,
                expected="the id of an earlier response of this session",
                do="use the same session URL, or send all items as input",
            )
        return session.responses[previous]

    def _wanted(self, where: str, body: dict[str, Any], messages: list[Message]) -> ReplyRequest:
        log_probs = _LOG_PROBS in (body.get("include") or ())
        if body.get("top_logprobs") and not log_probs:
            raise DataError(
                "top_logprobs needs the log-probs",
                where=f"{where}: top_logprobs",
                found=f"include: {body.get('include')}",
                expected=_LOG_PROBS,
            )
        sampling, headers = self._sessions.sampling(
            where, body, body.get("max_output_tokens"), None
        )
        given: dict[str, Any] = (body.get("text") or {}).get("format") or {"type": "text"}
        sampling |= json_schema_parameters(
            f"{where}: text.format", given["type"], given.get("schema")
        )
        choice = body.get("tool_choice") or "auto"
        function = choice["name"] if isinstance(choice, dict) else None
        tools = [
            {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
            for tool in body.get("tools") or ()
        ]
        if body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        return ReplyRequest(
            where,
            sampling,
            messages=messages,
            offer=tool_offer(
                where,
                tools,
                "required" if function else choice,
                function,
                parallel=body.get("parallel_tool_calls"),
            ),
            num_top_log_probs=body.get("top_logprobs") or 0,
            headers=headers,
        )

    def _head(self, body: dict[str, Any], wanted: ReplyRequest) -> dict[str, Any]:
        """Return the fields of a response before its output."""
        return {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": body.get("model") or self._sessions.model,
            "output": [],
            "parallel_tool_calls": wanted.offer.parallel,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": wanted.sampling.get("temperature"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": wanted.sampling.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }

    def _finished(
        self,
        session: Session,
        head: dict[str, Any],
        body: dict[str, Any],
        messages: list[Message],
        reply: FinishedReply,
        stream: _ResponseStream | None = None,
    ) -> dict[str, Any]:
        """Return the complete response, and keep its messages in the session."""
        session.responses[head["id"]] = [*messages, reply.text.message()]
        log_probs: list[dict[str, Any]] = []
        if _LOG_PROBS in (body.get("include") or ()):
            log_probs = log_prob_entries(self._sessions.gateway.decode, reply.generation, 0)
        is_cut = reply.reason == "length"
        status = "incomplete" if is_cut else "completed"
        ids = stream.item_ids if stream is not None else _ItemIds()
        return {
            **head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _output(reply, status, log_probs, ids),
            "usage": self._usage(reply),
        }

    def _usage(self, reply: FinishedReply) -> dict[str, Any]:
        num_output = len(reply.generation.response_ids)
        num_reasoning = len(self._sessions.gateway.encode(reply.text.reasoning))
        return {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.generation.cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": reply.num_prompt_tokens + num_output,
        }


class _ItemIds:
    """Ids of the reasoning and message items of one response."""

    def __init__(self) -> None:
        self.reasoning = f"rs_{uuid4().hex}"
        self.message = f"msg_{uuid4().hex}"


def messages_of(items: str | Sequence[dict[str, Any]]) -> list[Message]:
    """Return the input of a request as messages of chat completions."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    # An assistant's turn is one message: reasoning, text and calls in this order.
    turn: Message | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            turn = None
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item["call_id"],
                    "content": _text_of(item["output"]),
                }
            )
        elif kind == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": _text_of(item["content"])})
        else:
            if turn is None or _begins_turn(turn, kind):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, kind, item)
    return messages


def _begins_turn(turn: Message, kind: str) -> bool:
    """True if an item of this kind cannot follow the items of an assistant's turn."""
    if kind == "function_call":
        return False
    return bool(turn["content"] or turn.get("tool_calls")) or (
        kind == "reasoning" and "reasoning_content" in turn
    )


def _add_to_turn(turn: Message, kind: str, item: dict[str, Any]) -> None:
    if kind == "function_call":
        call = ToolCall(item["call_id"], item["name"], item["arguments"])
        turn.setdefault("tool_calls", []).append(call.as_json())
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn["reasoning_content"] = _text_of(parts)
    else:
        turn["content"] = _text_of(item["content"])


def _text_of(content: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _output(
    reply: FinishedReply, status: str, log_probs: list[dict[str, Any]], ids: _ItemIds
) -> list[dict[str, Any]]:
    """Return the output items of a reply."""
    items: list[dict[str, Any]] = []
    if reply.text.reasoning:
        items.append(_reasoning_item(ids.reasoning, reply.text.reasoning, status))
    if reply.text.content or not reply.text.calls:
        items.append(_message_item(ids.message, reply.text.content, status, log_probs))
    items += [_call_item(call, status) for call in reply.text.calls]
    return items


def _reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "type": "reasoning",
        "id": item_id,
        "summary": [],
        "content": content,
        "status": status,
    }


def _message_item(
    item_id: str, text: str | None, status: str, log_probs: list[dict[str, Any]]
) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text, log_probs)]
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _text_part(text: str, log_probs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}


def _call_item(call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


class _ResponseStream:
    """The events of one response: its items one after another."""

    def __init__(self, events: Events, head: dict[str, Any]) -> None:
        self.events = events
        self.item_ids = _ItemIds()
        self._head = head
        self._num_events = 0
        self._num_items = 0
        self._open: str | None = None
        """`reasoning` or `message`: the item that is not complete."""
        self._opened: set[str] = set()
        self._text = ""
        """Text of the open item so far."""

    async def send(self, reasoning: str, content: str, partial: Generation) -> None:
        """See `ReplyStream`."""
        await self._begin()
        if reasoning and "message" not in self._opened:
            await self._open_item("reasoning")
            await self._send_part("response.reasoning_text.delta", delta=reasoning)
            self._text += reasoning
        if content:
            await self._open_item("message")
            await self._send_part("response.output_text.delta", delta=content, logprobs=[])
            self._text += content

    async def finish(self, reply: FinishedReply, response: dict[str, Any]) -> web.StreamResponse:
        """Send the rest of a reply and the complete response."""
        await self.send(*reply.rest, reply.generation)
        for item in response["output"]:
            if item["type"] == "function_call":
                await self._send_call(item)
            elif self._open == item["type"] or item["type"] not in self._opened:
                await self._open_item(item["type"])
                await self._close_item(item)
        await self._send_event(f"response.{response['status']}", response=response)
        return await self.events.end()

    async def _begin(self) -> None:
        if not self._num_events:
            await self._send_event("response.created", response=self._head)
            await self._send_event("response.in_progress", response=self._head)

    async def _open_item(self, kind: str) -> None:
        if self._open == kind:
            return
        if self._open is not None:
            # Only reasoning is before another item.
            await self._close_item(
                _reasoning_item(self.item_ids.reasoning, self._text, "completed")
            )
        self._open = kind
        self._opened.add(kind)
        if kind == "reasoning":
            item = _reasoning_item(self.item_ids.reasoning, "", "in_progress")
        else:
            item = _message_item(self.item_ids.message, None, "in_progress", [])
        await self._send_item("response.output_item.added", item)
        if kind == "message":
            await self._send_part("response.content_part.added", part=_text_part("", []))

    async def _close_item(self, item: dict[str, Any]) -> None:
        part = item["content"][0]
        if self._open == "reasoning":
            await self._send_part("response.reasoning_text.done", text=part["text"])
        else:
            await self._send_part(
                "response.output_text.done", text=part["text"], logprobs=part["logprobs"]
            )
            await self._send_part("response.content_part.done", part=part)
        await self._send_item("response.output_item.done", item)
        self._open = None
        self._text = ""
        self._num_items += 1

    async def _send_call(self, item: dict[str, Any]) -> None:
        added = {**item, "arguments": "", "status": "in_progress"}
        await self._send_item("response.output_item.added", added)
        where = {"item_id": item["id"], "output_index": self._num_items}
        kind = "response.function_call_arguments"
        await self._send_event(f"{kind}.delta", **where, delta=item["arguments"])
        await self._send_event(
            f"{kind}.done", **where, name=item["name"], arguments=item["arguments"]
        )
        await self._send_item("response.output_item.done", item)
        self._num_items += 1

    async def _send_item(self, kind: str, item: dict[str, Any]) -> None:
        await self._send_event(kind, output_index=self._num_items, item=item)

    async def _send_part(self, kind: str, **fields: Any) -> None:
        """Send an event about the text of the open item."""
        ids = self.item_ids
        item_id = ids.reasoning if self._open == "reasoning" else ids.message
        await self._send_event(
            kind, item_id=item_id, output_index=self._num_items, content_index=0, **fields
        )

    async def _send_event(self, kind: str, **fields: Any) -> None:
        await self.events.send({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
