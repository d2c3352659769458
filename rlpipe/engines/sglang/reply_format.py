"""Read tool calls and reasoning of replies with SGLang's parsers for each family of models.

`engine.sglang.tool_call_parser` and `engine.sglang.reasoning_parser` name the parsers, as for
SGLang's own server. Without the first, the chat template determines it, else it is `hermes`;
without the second, reasoning stays in the content.

Entry point: `SglangReplies`, an implementation of `rlpipe.rollout.agent.replies.ReplyFormat`.
"""

# SGLang's parsers import torch and xgrammar: 4 seconds of a CPU. They are imported at the first
# request that needs them.

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import BaseModel

from rlpipe.errors import ConfigError, DataError
from rlpipe.rollout.agent.replies import ReplyText, ToolCall, ToolOffer, stable_prefix

if TYPE_CHECKING:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from transformers import PreTrainedTokenizerBase

_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    RecursionError,
)
"""Exceptions that the parsers raise for text that a model wrote."""
_SHORTEST_MARKER = 4
_MISTRAL_ID_LEN = 9


class SglangReplies:
    """See `ReplyFormat`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        """`arguments`: the run's `engine.sglang`."""
        self.tokenizer = tokenizer
        self._tool_call_parser = arguments.get("tool_call_parser") or "auto"
        self._reasoning_parser = arguments.get("reasoning_parser")

    @property
    def has_reasoning(self) -> bool:
        """See `ReplyFormat`."""
        return self._reasoning_parser is not None

    @cached_property
    def call_parser_name(self) -> str:
        """Name of SGLang's parser of tool calls. Raises: ConfigError for an unknown name."""
        from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
        from sglang.srt.parser.template_detection import detect_tool_call_parser

        name = self._tool_call_parser
        if name == "auto":
            return detect_tool_call_parser(*self._template) or "hermes"
        return _checked(name, TOOL_CALL_PARSER_NAMES, "tool_call_parser")

    @cached_property
    def reasoning_parser_name(self) -> str | None:
        """Name of SGLang's parser of reasoning. None: the model has none. Raises: ConfigError for
        an unknown name."""
        from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES
        from sglang.srt.parser.template_detection import detect_reasoning_parser

        name = self._reasoning_parser
        if name is None:
            return None
        if name == "auto":
            return detect_reasoning_parser(*self._template)
        return _checked(name, REASONING_PARSER_NAMES, "reasoning_parser")

    @cached_property
    def _template(self) -> tuple[Any, ...]:
        """Arguments of SGLang's detection of parsers."""
        from sglang.srt.parser.template_detection import detect_reasoning_pattern

        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        always_reasons, toggle = detect_reasoning_pattern(template)
        return template, self.tokenizer, toggle, always_reasons

    def grammar(self, offer: ToolOffer) -> dict[str, Any]:
        """See `ReplyFormat`."""
        from sglang.srt.entrypoints.openai.protocol import ToolChoice, ToolChoiceFuncName
        from sglang.srt.function_call.utils import get_json_schema_constraint

        choice: Any = offer.choice
        if offer.function is not None:
            choice = ToolChoice(function=ToolChoiceFuncName(name=offer.function))
        parser = self.call_parser(offer)
        constraint: Any = parser.get_structure_constraint(
            choice, parallel_tool_calls=offer.parallel
        )
        if constraint is None and offer.choice == "required" and not parser.owns_tool_format():
            schema = get_json_schema_constraint(parser.tools, choice, offer.parallel)
            constraint = ("json_schema", schema)
        if constraint is None:
            if offer.choice == "required":
                raise DataError(
                    "SGLang has no grammar for calls in the model's format",
                    where="tool_choice",
                    found=self.call_parser_name,
                    expected="tool_choice: auto",
                )
            return {}
        kind, value = constraint
        if kind == "full_assistant_ebnf":
            return {"ebnf": value, "ebnf_full_assistant": True}
        if isinstance(value, BaseModel):
            value = value.model_dump(by_alias=True)
        return {kind: value if isinstance(value, str) else json.dumps(value)}

    def reader(
        self, offer: ToolOffer, prompt_end: str, *, num_earlier_calls: int, constrained: bool
    ) -> SglangReader:
        """See `ReplyFormat`."""
        return SglangReader(self, offer, prompt_end, num_earlier_calls, constrained=constrained)

    def call_parser(self, offer: ToolOffer) -> FunctionCallParser:
        """Return SGLang's parser for the calls of one reply."""
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        # By default SGLang drops a call of an unknown function. The agent must see the call, as it
        # must tell the policy that the function does not exist.
        envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
        tools = [
            Tool.model_validate(_definition(tool, forced=offer.choice == "required"))
            for tool in offer.tools
            if offer.function in (None, tool["function"]["name"])
        ]
        return FunctionCallParser(tools, self.call_parser_name, tokenizer=self.tokenizer)

    def reasoning_parser(self, prompt_end: str) -> ReasoningParser | None:
        """Return SGLang's parser for the reasoning of one reply."""
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        name = self.reasoning_parser_name
        if name is None:
            return None
        detector = ReasoningParser(name, tokenizer=self.tokenizer).detector
        # Some templates begin or skip the reasoning in the prompt.
        if prompt_end.rstrip().endswith(detector.think_end_token):
            return None
        begins_inside = prompt_end.rstrip().endswith(detector.think_start_token) or None
        return ReasoningParser(name, force_reasoning=begins_inside, tokenizer=self.tokenizer)


class SglangReader:
    """See `ReplyReader`."""

    def __init__(
        self,
        replies: SglangReplies,
        offer: ToolOffer,
        prompt_end: str,
        num_earlier_calls: int,
        *,
        constrained: bool,
    ) -> None:
        self._replies = replies
        self._offer = offer
        self._num_earlier_calls = num_earlier_calls
        # A grammar applies from the first token: the reply has no reasoning.
        self._prompt_end = None if constrained else prompt_end
        self._reasoning = self._new_reasoning_parser()
        self._calls = replies.call_parser(offer) if offer.reads_calls else None
        self._content = ""
        self._num_sent = 0
        self._holds_back = False
        """True if all further text waits for the end of the reply."""

    def read(self, text: str) -> ReplyText:
        """See `ReplyReader`."""
        reasoning, content = "", text
        parser = self._new_reasoning_parser()
        if parser is not None:
            parts = parser.parse_non_stream(text)
            reasoning, content = (part or "" for part in parts)
        if not self._offer.reads_calls:
            return ReplyText(content, reasoning)
        try:
            remaining, calls = self._read_calls(content)
            return ReplyText(remaining, reasoning, calls)
        except _UNREADABLE:
            return ReplyText(content, reasoning)

    def feed(self, new_text: str) -> tuple[str, str]:
        """See `ReplyReader`."""
        if self._holds_back or not new_text:
            return "", ""
        try:
            reasoning, content = "", new_text
            if self._reasoning is not None:
                parts = self._reasoning.parse_stream_chunk(new_text)
                reasoning, content = (part or "" for part in parts)
        except _UNREADABLE:
            self._holds_back = True
            return "", ""
        return reasoning, content if self._calls is None else self._before_calls(content)

    def _before_calls(self, new_content: str) -> str:
        """Return the new content that is certainly not a part of a call."""
        # SGLang's parsers of streams are not used: given the letters of a marker one by one, those
        # of DeepSeek, Kimi and MiniMax return it as content, and the one of Qwen drops the text
        # before a call that is in the same piece.
        assert self._calls is not None
        self._content += new_content
        marker = _marker(self._calls)
        self._holds_back = self._calls.has_tool_call(self._content)
        if not marker or (self._holds_back and marker not in self._content):
            return ""
        visible = stable_prefix(self._content, [marker])
        new_visible = visible[self._num_sent :]
        self._num_sent = max(self._num_sent, len(visible))
        return new_visible

    def _new_reasoning_parser(self) -> ReasoningParser | None:
        if self._prompt_end is None:
            return None
        return self._replies.reasoning_parser(self._prompt_end)

    def _read_calls(self, content: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text without calls, and the calls. Raises: one of `_UNREADABLE`."""
        parser = self._replies.call_parser(self._offer)
        if self._offer.choice == "required" and not parser.owns_tool_format():
            # SGLang's grammar for formats without a grammar of their own.
            entries = json.loads(content)
            return "", tuple(
                self._call(index, entry["name"], json.dumps(entry.get("parameters") or {}))
                for index, entry in enumerate(entries)
            )
        if not parser.has_tool_call(content):
            return content, ()
        remaining, items = parser.parse_non_stream(content)
        marker = _marker(parser)
        num_begun = content.count(marker) if len(marker) >= _SHORTEST_MARKER else 1
        if len(items) < num_begun:
            # SGLang drops calls that it cannot read. The agent gets the text of all calls instead.
            return content, ()
        return remaining, tuple(
            self._call(index, item.name, item.parameters) for index, item in enumerate(items)
        )

    def _call(self, index: int, name: str | None, arguments: str) -> ToolCall:
        if not isinstance(json.loads(arguments or "{}"), dict) or not name:
            raise ValueError(f"no call of a function with arguments: {name} {arguments}")
        return ToolCall(self._call_id(index, name), name, arguments or "{}")

    def _call_id(self, index: int, name: str) -> str:
        family = self._replies.call_parser_name
        number = self._num_earlier_calls + index
        if family == "kimi_k2":
            return f"functions.{name}:{number}"
        if family == "kimi_k3":
            return f"{name}:{number}"
        if family == "mistral":
            # Its chat templates refuse ids of another length.
            return uuid4().hex[:_MISTRAL_ID_LEN]
        return f"call_{uuid4().hex[:24]}"


def _marker(parser: FunctionCallParser) -> str:
    """Return the text at the beginning of calls; empty if the format has none."""
    detector = parser.detector
    return detector.bot_token or getattr(detector, "tool_call_start_token", None) or ""


def _definition(tool: dict[str, Any], *, forced: bool) -> dict[str, Any]:
    """Return a tool as SGLang reads it. A forced call follows the schema of its arguments: without
    `strict` SGLang's grammar accepts any JSON value, such as `true`, in place of an object."""
    function = {**tool["function"], "strict": forced or bool(tool["function"].get("strict"))}
    if forced and not function.get("parameters"):
        function["parameters"] = {"type": "object"}
    return {"type": "function", "function": function}


def _checked(name: str, known: list[str], key: str) -> str:
    if name in known:
        return name
    raise ConfigError(
        "SGLang has no such parser",
        where=f"engine.sglang.{key}",
        found=name,
        expected=f"auto, {', '.join(sorted(known))}",
    )
