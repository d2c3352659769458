"""A chat completion with `stream: true`: what no later token can change goes out as it is sampled.

Held back are the end of a text that may become a stop text or a tool call, half a character, and
(where tools are offered) white space that a call would take along. A tool call goes out whole, once
it can be read.

Not here: the reply as it is kept (`openai_api`), aborts and engines that die while it is sampled
(`client`: it goes on from its tokens, and the stream just waits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from rlpipe.rollout.agent.events import Events
from rlpipe.rollout.generation import Generation
from rlpipe.types import Message

TOOL_CALL = "<tool_call>"
_HALF = "\ufffd"


class GrowingText:
    """The text of tokens that come one after another, each decoded with its neighbours and a few
    times only."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before = self._read = 0
        self.text = ""

    def of(self, ids: Sequence[int]) -> str:
        """The text so far, without half a character at its end. `ids` are all tokens."""
        known = self._decode(ids[self._before : self._read])
        now = self._decode(ids[self._before :])
        if len(now) > len(known) and not now.endswith(_HALF):
            self.text += now[len(known) :]
            self._before, self._read = self._read, len(ids)
        return self.text


def certain(text: str, stops: Sequence[str], *, with_tools: bool) -> str:
    """The beginning of an unfinished text that stays as it is, whatever follows."""
    ends = (*stops, *([TOOL_CALL] if with_tools else []))
    ended = False
    for end in ends:
        text, found, _ = text.partition(end)
        ended |= bool(found)
    if not ended:
        begun = (
            next(size for size in range(len(end) - 1, -1, -1) if text.endswith(end[:size]))
            for end in ends
        )
        text = text[: len(text) - max(begun, default=0)]
    return text.rstrip() if with_tools else text


def begun_with(message: Message, sent: str) -> Message:
    """A message whose text begins with what was sent of it already: it is what the client has."""
    content = message["content"] or ""
    if content.startswith(sent):
        return message
    lead = sent[: len(sent) - len(sent.lstrip())]
    return {
        **message,
        "content": lead + content
        if (lead + content).startswith(sent)
        else sent + content[len(sent) :],
    }


class ChatStream:
    """One reply. `tell` what there is of it, then `finish` with the whole of it."""

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
        """`head`: what all chunks begin with. `log_prob`: how a token's is written, None: they are
        not asked for."""
        self.events = Events(request)
        self.sent = ""
        self._head, self._text, self._log_prob = (
            {**head, "object": "chat.completion.chunk"},
            GrowingText(decode),
            log_prob,
        )
        self._stops = stops
        self._with_tools = with_tools
        self._told = 0
        self._begun = False

    async def tell(self, part: Generation) -> None:
        """Send what is new and certain."""
        text = certain(self._text.of(part.response_ids), self._stops, with_tools=self._with_tools)
        if len(text) > len(self.sent):
            new = text[len(self.sent) :]
            self.sent = text
            await self._delta({"content": new}, part.response_ids, part.log_probs)

    async def finish(
        self,
        message: Message,
        ids: Sequence[int],
        log_probs: Sequence[float],
        reason: str,
        usage: dict[str, int] | None,
    ) -> web.StreamResponse:
        """Send the rest and how it ended. `message` begins with what was sent."""
        rest = (message["content"] or "")[len(self.sent) :]
        calls = [
            {"index": number, **call} for number, call in enumerate(message.get("tool_calls") or [])
        ]
        delta = {**({"content": rest} if rest else {}), **({"tool_calls": calls} if calls else {})}
        if delta or not self._begun or (self._log_prob and self._told < len(ids)):
            await self._delta(delta, ids, log_probs)
        await self.events.send(
            {**self._head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        )
        if usage is not None:
            await self.events.send({**self._head, "choices": [], "usage": usage})
        return await self.events.end()

    async def _delta(
        self, delta: dict[str, Any], ids: Sequence[int], log_probs: Sequence[float]
    ) -> None:
        if not self._begun:
            delta = {"role": "assistant", "content": "", **delta}
            self._begun = True
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        if self._log_prob is not None:
            new = zip(ids[self._told :], log_probs[self._told :], strict=True)
            choice["logprobs"] = {"content": [self._log_prob(token, value) for token, value in new]}
            self._told = len(ids)
        await self.events.send({**self._head, "choices": [choice]})
