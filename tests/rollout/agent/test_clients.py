"""Unmodified clients of OpenAI and Anthropic: answers, streams, tools, and the session's tokens."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from rlpipe.rollout.agent.chat_sessions import FIXED_SAMPLING, NOT_APPLIED
from rlpipe.types import Sample
from tests.rollout.agent.test_openai_api import CALL, HELLO, TOOLS, Engine, opened

FUNCTION: dict[str, Any] = TOOLS[0]["function"]
RESPONSES_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [{"name": "look", "input_schema": FUNCTION["parameters"]}]
THINKING = {"reasoning_parser": "qwen3"}


def _text(sample: Sample) -> str:
    """The prompt, then the response with a dot for each token that is not trained."""
    assert sample.loss_mask is not None
    pairs = zip(sample.response_ids, sample.loss_mask, strict=True)
    response = "".join((chr(token) if token else "#") if counts else "." for token, counts in pairs)
    return "".join(chr(token) if token else "#" for token in sample.prompt_ids) + "|" + response


def _released(reply: str, half: int = 3) -> Engine:
    engine = Engine(reply, half)
    engine.go.set()
    return engine


def _anthropic(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"{url}/sessions/s", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_replies_is_a_sample(stream: bool):
    async with opened(_released("yes")) as (client, sessions, _):
        if stream:
            texts = {0: "", 1: "", 2: ""}
            chunks = await client.chat.completions.create(
                model="m", messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                usage = chunk.usage
        else:
            answer = await client.chat.completions.create(model="m", messages=HELLO, n=3)
            texts = {choice.index: choice.message.content for choice in answer.choices}
            usage = answer.usage
        samples = sessions.samples(Sample(session_id="s"))
    assert texts == {0: "yes", 1: "yes", 2: "yes"}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("u:hi#a:"), 12)
    assert [_text(sample) for sample in samples] == ["u:hi#a:|yes#"] * 3


async def test_parameters_that_training_fixes_are_named_in_headers():
    async with opened(_released("yes")) as (client, _, _):
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, temperature=0.2, top_p=1.0, seed=3
        )
    assert raw.headers[FIXED_SAMPLING] == "temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=500"
    assert raw.headers[NOT_APPLIED] == "temperature, seed"
    engine = _released("yes")
    async with opened(engine, evaluation=True) as (client, _, _):
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, temperature=0.2, presence_penalty=0.5
        )
    assert FIXED_SAMPLING not in raw.headers and NOT_APPLIED not in raw.headers
    assert engine.sampling[-1]["temperature"] == 0.2
    assert engine.sampling[-1]["presence_penalty"] == 0.5


async def test_formats_and_forced_calls_become_grammars():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[tuple[Any, dict[str, Any]]] = [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, schema),
    ]
    engine = _released("{}")
    async with opened(engine) as (client, _, _):
        for given, wanted in formats:
            await client.chat.completions.create(
                model="m", messages=HELLO, response_format=given, stream=given is formats[0][0]
            )
            assert json.loads(engine.sampling[-1]["json_schema"]) == wanted
        named: Any = {"type": "function", "function": {"name": "look"}}
        for choice in ("required", named):
            await client.chat.completions.create(
                model="m", messages=HELLO, tools=TOOLS, tool_choice=choice
            )
            assert "look" in engine.sampling[-1]["structural_tag"]
        await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        assert "structural_tag" not in engine.sampling[-1], (
            "training applies a grammar only where the request forces it"
        )
    async with opened(engine, evaluation=True) as (client, _, _):
        await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        assert "look" in engine.sampling[-1]["structural_tag"], "the tool is strict"


async def test_the_responses_api_forces_and_forbids_calls():
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    engine = _released(CALL)
    async with opened(engine) as (client, _, _):
        for choice in ("required", {"type": "function", "name": "look"}):
            forced: Any = choice
            answer = await client.responses.create(
                model="m", input="hi", tools=[tool], tool_choice=forced
            )
            assert "look" in engine.sampling[-1]["structural_tag"]
            assert [item.type for item in answer.output] == ["function_call"]
        answer = await client.responses.create(
            model="m", input="hi", tools=[tool], tool_choice="none"
        )
    assert "structural_tag" not in engine.sampling[-1]
    assert answer.tool_choice == "none" and answer.output_text == CALL


async def test_a_reply_under_a_grammar_is_streamed_once_it_is_complete():
    engine = Engine('{"a": 1}', half=3)
    async with opened(engine) as (client, _, _):
        chunks = await client.chat.completions.create(
            model="m", messages=HELLO, response_format={"type": "json_object"}, stream=True
        )
        texts = [chunk.choices[0].delta.content async for chunk in chunks]
    assert not engine.watched and "".join(filter(None, texts)) == '{"a": 1}'


async def test_calls_are_not_read_where_the_request_forbids_them():
    async with opened(_released(CALL)) as (client, _, _):
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, tool_choice="none"
        )
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


async def test_a_text_that_repeats_prompt_and_tokens_continues_the_sample():
    async with opened(_released("yes")) as (client, sessions, _):
        first = await client.completions.create(model="m", prompt="a?", logprobs=0)
        await client.completions.create(model="m", prompt="a?yes# b?")
        await client.completions.create(model="m", prompt="a?no# c?", n=2)
        by_ids: Any = [*map(ord, "a?yes"), 0, *map(ord, " b?yes"), 0, ord("!")]
        chunks = await client.completions.create(model="m", prompt=by_ids, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in chunks])
        samples = sessions.samples(Sample(session_id="s"))
    choice = first.choices[0]
    assert choice.text == streamed == "yes" and choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["y", "e", "s", "#"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert [_text(sample) for sample in samples] == [
        "a?no# c?|yes#",
        "a?no# c?|yes#",
        "a?|yes#...yes#.yes#",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_a_conversation_over_responses_is_one_sample(stream: bool, by_id: bool):
    engine = _released(f"so <think>hm</think>\nlet me\n{CALL}")
    async with opened(engine, sglang=THINKING) as (client, sessions, _):

        async def ask(items: Any, **more: Any) -> Any:
            keywords = {"model": "m", "tools": RESPONSES_TOOLS, "instructions": "be", **more}
            if not stream:
                return await client.responses.create(input=items, **keywords)
            async with client.responses.stream(input=items, **keywords) as events:
                kinds = [event.type async for event in events]
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
                return await events.get_final_response()

        first = await ask("hi")
        items = [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        call = next(item for item in first.output if item.type == "function_call")
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "it"}
        if by_id:
            await ask([answer], previous_response_id=first.id)
        else:
            await ask([{"role": "user", "content": "hi"}, *items, answer])
        (sample,) = sessions.samples(Sample(session_id="s"))
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "it"})
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.usage.output_tokens == len(engine.ids)
    assert sample.num_turns == 2 and sample.response_ids[: len(engine.ids)] == engine.ids
    assert _text(sample).startswith("s:be#u:hi#a:|so <think>")


async def test_events_of_a_response_arrive_while_it_is_sampled():
    engine = Engine("good morning", half=4)
    async with opened(engine) as (client, _, _):
        early: list[str] = []
        async with client.responses.stream(input="hi", model="m") as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    if not engine.go.is_set():
                        early.append(event.delta)
                    engine.go.set()
            final = await events.get_final_response()
    assert early == ["good"] and final.output_text == "good morning"


async def test_a_response_that_the_limit_cuts_is_incomplete():
    engine = _released("good")
    engine.reason = "length"
    async with opened(engine) as (client, _, _):
        response = await client.responses.create(
            input="hi",
            model="m",
            max_output_tokens=5,
            include=["message.output_text.logprobs"],
        )
    assert response.tool_choice == "auto"
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    part: Any = response.output[0].content[0]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalSubscript]
    assert [one.logprob for one in part.logprobs] == [-0.5] * 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_over_anthropics_messages_is_one_sample(stream: bool):
    engine = _released(f"<think>hm</think>let me\n{CALL}")
    async with opened(engine, sglang=THINKING) as (_, sessions, url), _anthropic(url) as client:

        async def ask(messages: Any) -> Any:
            keywords: Any = {
                "model": "m",
                "max_tokens": 99,
                "tools": ANTHROPIC_TOOLS,
                "system": "be",
                "messages": messages,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            if not stream:
                return await client.messages.create(**keywords)
            async with client.messages.stream(**keywords) as events:
                return await events.get_final_message()

        first = await ask([{"role": "user", "content": "hi"}])
        thinking, text, call = first.content
        again = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "it"}],
            },
        ]
        await ask(again)
        (sample,) = sessions.samples(Sample(session_id="s"))
    assert (thinking.thinking, text.text.rstrip()) == ("hm", "let me")
    assert (call.name, call.input, first.stop_reason) == ("look", {"at": "it"}, "tool_use")
    assert first.usage.output_tokens == len(engine.ids)
    assert first.usage.input_tokens == len("s:be#u:hi#a:")
    assert sample.num_turns == 2 and sample.response_ids[: len(engine.ids)] == engine.ids


async def test_anthropics_stop_reasons_and_token_counts():
    async with opened(_released("yes STOP no")) as (_, _, url), _anthropic(url) as client:
        answer = await client.messages.create(
            model="m", max_tokens=9, messages=HELLO, stop_sequences=["STOP"]
        )
        count = await client.messages.count_tokens(model="m", messages=HELLO)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert [block.text for block in answer.content if block.type == "text"] == ["yes "]
    assert count.input_tokens == len("u:hi#a:")


async def test_clients_raise_their_own_errors():
    async with opened(_released("yes")) as (client, _, url), _anthropic(url) as other:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="m", messages=HELLO, extra_body={"regex": "[ab]"}
            )
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.embeddings.create(model="m", input="x")
        assert missing.value.type == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            await other.messages.create(
                model="m", max_tokens=9, messages=HELLO, extra_body={"mcp_servers": []}
            )
