"""Read the tool calls that the policy writes, and render the tool responses for the policy.

    tags     <search>who built it</search>                      <result>…</result>
    hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>
             in ChatML, the format of Qwen and Hermes models

Entry points: the call formats `Tags` and `Hermes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# A call at the end of a response may lack the closing tag.
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class Call:
    """One tool call."""

    name: str
    arguments: str | dict[str, Any]
    """Text for a tool with one argument, else keyword arguments."""
    error: str | None = None
    """Reason why the call cannot be read."""


class CallFormat(Protocol):
    """Format of tool calls in the text of a turn."""

    stops: tuple[str, ...]
    """Texts that end a turn, because the policy waits for a tool response there."""

    def read(self, turn: str) -> list[Call]:
        """Return the calls of a turn. A turn without calls is the last one."""
        ...

    def render(self, answers: Sequence[str], *, ended: bool) -> str:
        """Return the text with the tool responses. `ended`: the turn's last token is an
        end-of-sequence token."""
        ...


class Tags:
    """One call per turn: the first `<name>argument</name>`, which ends the turn."""

    def __init__(self, names: Collection[str]) -> None:
        self.stops = tuple(f"</{name}>" for name in names)
        self._call = re.compile(rf"<({'|'.join(map(re.escape, names))})>(.*?)</\1>", re.DOTALL)

    def read(self, turn: str) -> list[Call]:
        """See `CallFormat`."""
        match = self._call.search(turn)
        return [Call(match[1], match[2].strip())] if match else []

    def render(self, answers: Sequence[str], *, ended: bool) -> str:
        """See `CallFormat`."""
        return "".join(f"<result>{answer}</result>" for answer in answers)


class Hermes:
    """Any number of calls per turn, each a JSON object."""

    stops: tuple[str, ...] = ()

    def read(self, turn: str) -> list[Call]:
        """See `CallFormat`."""
        return [read_hermes(text) for text in _HERMES.findall(turn)]

    def render(self, answers: Sequence[str], *, ended: bool) -> str:
        """See `CallFormat`."""
        responses = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)
        # The sampled end-of-sequence token is ChatML's end of the turn already.
        begin = "" if ended else END_OF_TURN
        return f"{begin}\n<|im_start|>user\n{responses}{END_OF_TURN}\n<|im_start|>assistant\n"


def read_hermes(text: str) -> Call:
    """Read one call in JSON. A call that cannot be read has an error."""
    try:
        content = json.loads(text)
    except ValueError as error:
        return Call("", {}, f"the call is not JSON ({error})")
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return Call("", {}, 'the call is not {"name": ..., "arguments": {...}}')
    arguments = content.get("arguments") or {}
    if not isinstance(arguments, dict):
        return Call(content["name"], {}, "arguments is not an object")
    return Call(content["name"], arguments)
