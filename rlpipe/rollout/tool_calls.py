"""How the policy writes a call of a tool, and how the answer is shown to it.

    tags     <search>who built it</search>              <result>…</result>
    hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call> in ChatML, as Qwen and Hermes models are trained to

Not here: running a tool (`tools`), or which tokens are sampled (`multi_turn`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class Call:
    """One call. `arguments` is text for a tool that takes one, else keyword arguments; `error`: it
    cannot be read."""

    name: str
    arguments: str | dict[str, Any]
    error: str | None = None


class CallFormat(Protocol):
    """How calls look in a turn's text."""

    stops: tuple[str, ...]
    """Texts that end a turn: the policy waits for the answer there."""

    def read(self, turn: str) -> list[Call]:
        """The calls of a turn; none: it is the last."""
        ...

    def render(self, answers: Sequence[str], *, ended: bool) -> str:
        """The answers as the policy sees them. `ended`: the turn's last token is the
        end-of-sequence one."""
        ...


class Tags:
    """One call a turn: the first of `<name>argument</name>`, which ends it."""

    def __init__(self, names: Collection[str]) -> None:
        self.stops = tuple(f"</{name}>" for name in names)
        self._call = re.compile(rf"<({'|'.join(map(re.escape, names))})>(.*?)</\1>", re.DOTALL)

    def read(self, turn: str) -> list[Call]:
        """See `CallFormat`."""
        found = self._call.search(turn)
        return [Call(found[1], found[2].strip())] if found else []

    def render(self, answers: Sequence[str], *, ended: bool) -> str:
        """See `CallFormat`."""
        return "".join(f"<result>{answer}</result>" for answer in answers)


class Hermes:
    """Any number of calls a turn, each a JSON object."""

    stops: tuple[str, ...] = ()

    def read(self, turn: str) -> list[Call]:
        """See `CallFormat`."""
        return [read_hermes(text) for text in _HERMES.findall(turn)]

    def render(self, answers: Sequence[str], *, ended: bool) -> str:
        """See `CallFormat`."""
        shown = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)
        begin = "" if ended else END_OF_TURN
        return f"{begin}\n<|im_start|>user\n{shown}{END_OF_TURN}\n<|im_start|>assistant\n"


def read_hermes(text: str) -> Call:
    """One call in JSON; what is wrong with it is its error."""
    try:
        said = json.loads(text)
    except ValueError as error:
        return Call("", {}, f"the call is not JSON ({error})")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return Call("", {}, 'the call is not {"name": ..., "arguments": {...}}')
    arguments = said.get("arguments") or {}
    if not isinstance(arguments, dict):
        return Call(said["name"], {}, "arguments is not an object")
    return Call(said["name"], arguments)


def without_calls(turn: str) -> str:
    """A turn's text beside its hermes calls."""
    return _HERMES.sub("", turn).strip()
