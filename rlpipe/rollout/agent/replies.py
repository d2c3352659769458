"""Read reasoning and tool calls in replies, whole or while they are sampled.

The format of both depends on the model's family. `ReplyFormat` is the interface to it;
`rlpipe.engines.sglang.reply_format` implements it with SGLang's parsers.

    text of a reply ──▶ GrowingReply ──▶ parts that later tokens cannot change, for a stream
                   └──▶ ReplyReader  ──▶ ReplyText: reasoning, content, tool calls

During an abort or a lost engine a stream pauses: the client continues the response. Tool calls are
sent once they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlpipe.types import Message

# Decoding the first bytes of a character gives the replacement character.
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class ToolOffer:
    """The tools of a request."""

    tools: tuple[dict[str, Any], ...] = ()
    """Functions in the format of OpenAI's chat completions."""
    choice: Literal["auto", "none", "required"] = "auto"
    function: str | None = None
    """With `required`: the only function that the reply may call."""
    parallel: bool = True
    """False: the reply has at most one call."""

    @property
    def reads_calls(self) -> bool:
        """True if the reply may have calls."""
        return bool(self.tools) and self.choice != "none"


@dataclass(frozen=True)
class ToolCall:
    """One call in a reply."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def as_json(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's chat completions."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ReplyText:
    """The parts of a reply."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """Return the message in the format of OpenAI's chat completions."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_json() for call in self.calls]
        return message


class ReplyReader(Protocol):
    """Reader of one reply."""

    def read(self, text: str) -> ReplyText:
        """Return the parts of the complete text. A call that cannot be read stays in the
        content."""
        ...

    def feed(self, new_text: str) -> tuple[str, str]:
        """Return the new reasoning and the new content that further text cannot change."""
        ...


class ReplyFormat(Protocol):
    """Format in which the run's model writes reasoning and tool calls."""

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning is separated from the content."""
        ...

    def grammar(self, offer: ToolOffer) -> dict[str, Any]:
        """Return SGLang's sampling parameters that force calls in the format; empty if the offer
        forces none. Raises: DataError for a schema that cannot be forced."""
        ...

    def reader(
        self, offer: ToolOffer, prompt_end: str, *, num_earlier_calls: int, constrained: bool
    ) -> ReplyReader:
        """Return the reader of a reply.

        prompt_end: last part of the prompt, which may open or close the reasoning.
        num_earlier_calls: calls in the request's messages; some formats number all calls.
        constrained: a grammar determines the reply from its first token, without reasoning.
        """
        ...


class PlainReader:
    """Reader of replies that are only text."""

    def read(self, text: str) -> ReplyText:
        """See `ReplyReader`."""
        return ReplyText(text)

    def feed(self, new_text: str) -> tuple[str, str]:
        """See `ReplyReader`."""
        return "", new_text


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


class GrowingReply:
    """The parts of an unfinished reply that later tokens cannot change."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        reader: ReplyReader,
        *,
        with_tools: bool,
    ) -> None:
        """`with_tools`: hold back white space, which the format may remove before a call."""
        self.reasoning = ""
        """Reasoning so far."""
        self.content = ""
        """Content so far."""
        self._text = GrowingText(decode)
        self._stops = stops
        self._reader = reader
        self._with_tools = with_tools
        self._num_fed = 0
        self._read_content = ""

    def grow(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return new reasoning and new content, given all tokens so far."""
        text = stable_prefix(self._text.of(ids), self._stops)
        reasoning, content = self._reader.feed(text[self._num_fed :])
        self._num_fed = max(self._num_fed, len(text))
        self._read_content += content
        visible = self._read_content.rstrip() if self._with_tools else self._read_content
        new_content = visible[len(self.content) :]
        self.reasoning += reasoning
        self.content += new_content
        return reasoning, new_content

    def complete(self, reply: ReplyText) -> ReplyText:
        """Return the reply with the sent parts as the beginning of its parts.

        The session must hold the message that the client repeats in its next request.
        """
        return ReplyText(
            with_sent_prefix(reply.content, self.content),
            with_sent_prefix(reply.reasoning, self.reasoning),
            reply.calls,
        )


def stable_prefix(text: str, stops: Sequence[str]) -> str:
    """Return the beginning of an unfinished text that later tokens cannot change."""
    stopped = False
    for stop in stops:
        text, match, _ = text.partition(stop)
        stopped |= bool(match)
    if stopped:
        return text
    # The text may end with the beginning of a stop text.
    overlaps = (
        next(size for size in range(len(stop) - 1, -1, -1) if text.endswith(stop[:size]))
        for stop in stops
    )
    return text[: len(text) - max(overlaps, default=0)]


def with_sent_prefix(text: str, sent: str) -> str:
    """Return a text that begins with the part that was sent. White space at the beginning may
    differ."""
    if text.startswith(sent):
        return text
    leading_space = sent[: len(sent) - len(sent.lstrip())]
    if (leading_space + text).startswith(sent):
        return leading_space + text
    return sent + text[len(sent) :]
