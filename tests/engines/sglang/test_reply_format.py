"""SGLang's parsers read the calls and the reasoning of each family of models."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from rlpipe.engines.sglang.reply_format import SglangReplies
from rlpipe.errors import ConfigError, DataError
from rlpipe.rollout.agent.replies import ReplyText, ToolOffer


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


OFFER = ToolOffer((_tool("look"), _tool("wait")))
CALLS = {
    "hermes": '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>',
    "qwen": '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3": '<|python_tag|>{"name": "look", "parameters": {"at": "it"}}',
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "it"}}]',
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
        '```json\n{"at": "it"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        '{"at": "it"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": "it"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "glm45": ("<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n</tool_call>"),
    "pythonic": '[look(at="it")]',
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">it</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    "step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="look"><steptml:parameter name="at">it</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    ),
}
CHATML_QWEN3 = "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}"


class _Tokenizer:
    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def get_vocab(self) -> dict[str, int]:
        return {}


def _replies(template: str | None = None, **arguments: str) -> SglangReplies:
    return SglangReplies(cast(Any, _Tokenizer(template)), arguments)


def _read(
    replies: SglangReplies, text: str, offer: ToolOffer = OFFER, prompt: str = "a:"
) -> ReplyText:
    reader = replies.reader(offer, prompt, num_earlier_calls=3, constrained=False)
    return reader.read(text)


@pytest.mark.parametrize("family", CALLS)
def test_a_call_of_each_family_is_read(family: str):
    replies = _replies(tool_call_parser=family)
    reply = _read(replies, CALLS[family])
    (call,) = reply.calls
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "it"})
    assert not reply.content
    wanted = {"kimi_k2": "functions.look:3"}.get(family)
    assert call.id == wanted if wanted else len(call.id) == (9 if family == "mistral" else 29)


@pytest.mark.parametrize("family", CALLS)
def test_the_sent_text_of_each_family_is_the_text_before_the_call(family: str):
    text = f"let me {CALLS[family]}"
    reader = _replies(tool_call_parser=family).reader(
        OFFER, "a:", num_earlier_calls=0, constrained=False
    )
    sent = "".join(reader.feed(letter)[1] for letter in text)
    # Without a marker, any text may become a call.
    assert sent == ("" if family == "pythonic" else "let me ")


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("function", [None, "look"])
def test_each_family_has_a_grammar_for_forced_calls(family: str, function: str | None):
    offer = ToolOffer(OFFER.tools, "required", function)
    (grammar,) = _replies(tool_call_parser=family).grammar(offer).items()
    assert grammar[0] in ("structural_tag", "json_schema") and "look" in grammar[1]
    assert ("wait" in grammar[1]) is (function is None)
    assert '"required": ["at"]' in grammar[1], (
        "the arguments follow the schema without `strict`, too"
    )
    assert _replies(tool_call_parser=family).grammar(OFFER) == {}


def test_calls_of_a_format_without_a_grammar_are_json():
    replies = _replies(tool_call_parser="pythonic")
    offer = ToolOffer(OFFER.tools, "required")
    assert set(replies.grammar(offer)) == {"json_schema"}
    reader = replies.reader(offer, "a:", num_earlier_calls=0, constrained=True)
    reply = reader.read('[{"name": "look", "parameters": {"at": "it"}}]')
    assert [(call.name, call.arguments) for call in reply.calls] == [("look", '{"at": "it"}')]
    assert reader.read('[{"name": ').content == '[{"name": ', "a call that the limit cuts is text"


def test_a_format_whose_calls_cannot_be_forced_is_refused():
    with pytest.raises(DataError, match="no grammar for calls"):
        _replies(tool_call_parser="hunyuan").grammar(ToolOffer(OFFER.tools, "required"))


def test_calls_that_cannot_be_read_stay_in_the_text():
    text = f"so {CALLS['qwen']}<tool_call>\n{{oops\n</tool_call>"
    assert _read(_replies(tool_call_parser="qwen"), text) == ReplyText(text)


def test_a_call_of_an_unknown_function_is_a_call():
    (call,) = _read(_replies(), CALLS["hermes"].replace("look", "fly")).calls
    assert call.name == "fly"


def test_without_a_parser_the_template_determines_the_format():
    assert _replies().call_parser_name == "hermes"
    assert _replies(CHATML_QWEN3).call_parser_name == "qwen"
    assert _replies(CHATML_QWEN3, tool_call_parser="glm45").call_parser_name == "glm45"
    assert _replies(CHATML_QWEN3, reasoning_parser="auto").reasoning_parser_name == "qwen3"


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_names(key: str):
    replies = _replies(**{key: "no"})
    with pytest.raises(ConfigError, match=rf"engine.sglang.{key}[\s\S]*qwen3"):
        _ = replies.call_parser_name, replies.reasoning_parser_name


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("a:", "<think>hm</think>yes"), ("a:<think>\n", "hm</think>yes")],
)
def test_reasoning_is_separated_where_it_begins_in_reply_or_prompt(prompt: str, text: str):
    replies = _replies(reasoning_parser="qwen3")
    assert _read(replies, text, ToolOffer(), prompt) == ReplyText("yes", "hm")
    reader = replies.reader(ToolOffer(), prompt, num_earlier_calls=0, constrained=False)
    parts = [reader.feed(letter) for letter in text]
    assert "".join(reasoning for reasoning, _ in parts) == "hm"
    assert "".join(content for _, content in parts) == "yes"


def test_a_prompt_that_skips_the_reasoning_and_a_grammar_have_none():
    replies = _replies(reasoning_parser="deepseek-r1")
    skipped = _read(replies, "yes", ToolOffer(), "a:<think>\n\n</think>\n\n")
    constrained = replies.reader(ToolOffer(), "a:<think>", num_earlier_calls=0, constrained=True)
    assert skipped == constrained.read("yes") == ReplyText("yes")
