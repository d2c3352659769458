"""Stream a chat completion: send the text that later tokens cannot change.

Held back are the end of a text that may become a stop text or a tool call, incomplete characters,
and, if the request offers tools, white space before a possible call. A tool call is sent as a whole
once it is complete. During an abort or a lost engine the stream pauses: the client continues the
response.

Entry point: `ChatStream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from rlpipe.rollout.agent.events import Events
from rlpipe.rollout.generation import Generation
from rlpipe.types import Message

TOOL_CALL = "<tool_call>"
# Decoding the first bytes of a character gives the replacement character.
_INCOMPLETE = "\ufffd"


class GrowingText:
    """Text of a growing list of tokens.

    Each token is decoded together with its neighbours and only a few times.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = ""
        self._decode = decode
        self._window_start = 0
        self._window_end = 0

    def of(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens so far, without an incomplete character at the end."""
        # Some tokenizers decode a token differently after another one, so the last decoded window
        # is decoded again together with the new tokens.
        window = self._decode(ids[self._window_start : self._window_end])
        extended = self._decode(ids[self._window_start :])
        if len(extended) > len(window) and not extended.endswith(_INCOMPLETE):
            self.text += extended[len(window) :]
            self._window_start = self._window_end
            self._window_end = len(ids)
        return self.text


def stable_prefix(text: str, stops: Sequence[str], *, with_tools: bool) -> str:
    """Return the beginning of an unfinished text that later tokens cannot change."""
    ends = (*stops, *([TOOL_CALL] if with_tools else []))
    ended = False
    for end in ends:
        text, match, _ = text.partition(end)
        ended |= bool(match)
    if not ended:
        # The text may end with the beginning of a stop text.
        overlaps = (
            next(size for size in range(len(end) - 1, -1, -1) if text.endswith(end[:size]))
            for end in ends
        )
        text = text[: len(text) - max(overlaps, default=0)]
    return text.rstrip() if with_tools else text


def with_sent_prefix(message: Message, sent: str) -> Message:
    """Return the message with the text that the client got already as its beginning.

    The session must hold the message that the client repeats in its next request.
    """
    content = message["content"] or ""
    if content.startswith(sent):
        return message
    leading_space = sent[: len(sent) - len(sent.lstrip())]
    if (leading_space + content).startswith(sent):
        return {**message, "content": leading_space + content}
    return {**message, "content": sent + content[len(sent) :]}


class ChatStream:
    """One streamed reply. `send` partial responses, then `finish` with the complete one."""

    def __init__(
        self,
        request: web.Request,
        head: dict[str, Any],
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str],
        with_tools: bool,
        log_prob: Callable[[int, float], dict[str, Any]] | None,
    ) -> None:
        """`head` are the fields of all chunks. `log_prob` formats the log-prob of a token; None if
        log-probs are not requested."""
        self.events = Events(request)
        self.sent = ""
        self._head = {**head, "object": "chat.completion.chunk"}
        self._text = GrowingText(decode)
        self._log_prob = log_prob
        self._stops = stops
        self._with_tools = with_tools
        self._num_log_probs_sent = 0
        self._has_role = False

    async def send(self, partial: Generation) -> None:
        """Send the new part of the text that cannot change."""
        all_text = self._text.of(partial.response_ids)
        text = stable_prefix(all_text, self._stops, with_tools=self._with_tools)
        if len(text) > len(self.sent):
            new = text[len(self.sent) :]
            self.sent = text
            await self._send_delta({"content": new}, partial.response_ids, partial.log_probs)

    async def finish(
        self,
        message: Message,
        ids: Sequence[int],
        log_probs: Sequence[float],
        reason: str,
        usage: dict[str, int] | None,
    ) -> web.StreamResponse:
        """Send the rest and the finish reason. `message` begins with the text that was sent."""
        delta: dict[str, Any] = {}
        if rest := (message["content"] or "")[len(self.sent) :]:
            delta["content"] = rest
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        # Tokens without text, such as the end of the sequence, have log-probs too.
        has_log_probs = self._log_prob is not None and self._num_log_probs_sent < len(ids)
        if delta or not self._has_role or has_log_probs:
            await self._send_delta(delta, ids, log_probs)
        choice = {"index": 0, "delta": {}, "finish_reason": reason}
        await self.events.send({**self._head, "choices": [choice]})
        if usage is not None:
            await self.events.send({**self._head, "choices": [], "usage": usage})
        return await self.events.end()

    async def _send_delta(
        self, delta: dict[str, Any], ids: Sequence[int], log_probs: Sequence[float]
    ) -> None:
        if not self._has_role:
            delta = {"role": "assistant", "content": "", **delta}
            self._has_role = True
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._log_prob is not None:
            start = self._num_log_probs_sent
            pairs = zip(ids[start:], log_probs[start:], strict=True)
            entries = [self._log_prob(token, log_prob) for token, log_prob in pairs]
            choice["logprobs"] = {"content": entries}
            self._num_log_probs_sent = len(ids)
        await self.events.send({**self._head, "choices": [choice]})
