"""Clients of OpenAI and Anthropic against a real engine: samples equal the engine's answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.recipes.tiny_models import character_tokenizer, make_tiny_model
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.reply_format import SglangReplies
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.agent.gateway import Gateway
from rlpipe.rollout.agent.routes import agent_routes
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generation import Generation
from rlpipe.types import Sample
from tests.live_engine import FIRST_STAMP, START_S

pytestmark = pytest.mark.integration

CONTEXT = 2048
TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}
{% endif %}
{%- for message in messages %}[{{ message.role }}]
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<eos>
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 800,
    "stop_token_ids": [],
    "skip_special_tokens": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}},
    "required": ["side"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "look", "parameters": SCHEMA, "strict": True}
OTHER: dict[str, Any] = {"name": "wait", "parameters": SCHEMA, "strict": True}
TOOLS: Any = [{"type": "function", "function": one} for one in (TOOL, OTHER)]
FORCED: Any = {"type": "function", "function": {"name": "look"}}
HELLO: Any = [{"role": "user", "content": "where to go"}]
SIDES = ("left", "right")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Return a tiny model with a chat template behind a real server and a real router."""
    folder: Path = tmp_path_factory.mktemp("agents")
    tokenizer = character_tokenizer("Question: ")
    tokenizer.chat_template = TEMPLATE
    make_tiny_model(
        str(folder / "model"),
        tokenizer,
        seed=0,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
    )
    server = Server(
        folder / "model",
        EngineConfig(),
        ResourcesConfig(),
        dtype="float32",
        port=None,
        log_path=folder / "server.log",
        seed=1,
        weight_version=FIRST_STAMP,
        reads_text=True,
        device="cpu",
    )
    router = Router(EngineConfig(), port=None, log_path=folder / "router.log")
    try:
        server.start()
        router.start()
        server.wait_ready(START_S)
        router.wait_ready(START_S)
        router.add(server.url)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        yield SimpleNamespace(tokenizer=tokenizer, router=router, model=model)
    finally:
        server.stop()
        router.stop()


class _Recording(GenerateClient):
    """Keep the engine's answers."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.answers: list[tuple[tuple[int, ...], dict[str, Any], Generation]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, **options: Any):
        generations = await super().generate(prompt_ids, sampling, **options)
        self.answers += [(tuple(prompt_ids), sampling, one) for one in generations]
        return generations

    def answer(self, response_ids: list[int]) -> Generation:
        """The answer with these tokens."""
        (found,) = (one[2] for one in self.answers if one[2].response_ids == response_ids)
        return found


@asynccontextmanager
async def _agents(live) -> AsyncIterator[SimpleNamespace]:
    """Open a session, its clients, and the record of the engine's answers."""
    opened: list[ChatSessions] = []
    tokenizer = live.tokenizer

    def routes(gateway: Gateway):
        replies = SglangReplies(tokenizer, {"tool_call_parser": "hermes"})
        sessions = ChatSessions(
            gateway, SAMPLING, {}, model="m", evaluation=False, reply_format=replies
        )
        opened.append(sessions)
        return agent_routes(sessions)

    end_ids = [tokenizer.eos_token_id]
    options: Any = {"vocab_size": len(tokenizer), "deadline_s": 120.0, "end_ids": end_ids}
    async with (
        _Recording(live.router.url, **options) as client,
        Gateway(client, tokenizer, context_len=CONTEXT, routes=routes) as gateway,
    ):
        opened[0].begin(Sample(session_id="s"))
        url = f"{gateway.url}/sessions/s"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="n", max_retries=0) as chat,
            anthropic.AsyncAnthropic(base_url=url, api_key="n", max_retries=0) as claude,
        ):
            yield SimpleNamespace(
                chat=chat,
                claude=claude,
                client=client,
                samples=lambda: opened[0].samples(Sample(session_id="s")),
            )


def _check(live, samples: list[Sample], client: _Recording, num_samples: int) -> None:
    """Compare the samples with the engine's answers, and the log-probs with transformers."""
    assert len(samples) == num_samples
    left = list(client.answers)
    for sample in samples:
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        ids = (*sample.prompt_ids, *sample.response_ids)
        trained = [False] * len(sample.response_ids)
        for answer in [one for one in left if (*one[0], *one[2].response_ids) == ids[: _end(one)]]:
            prompt_ids, sampling, generation = answer
            begin = len(prompt_ids) - len(sample.prompt_ids)
            end = begin + len(generation.response_ids)
            if begin < 0 or not all(sample.loss_mask[begin:end]):
                continue
            left.remove(answer)
            trained[begin:end] = [True] * (end - begin)
            assert sample.rollout_log_probs[begin:end] == generation.log_probs
            if not any(name in sampling for name in ("json_schema", "structural_tag")):
                assert generation.log_probs == pytest.approx(
                    _log_probs(live.model, prompt_ids, generation.response_ids), abs=1e-4
                )
        assert sample.loss_mask == [int(counts) for counts in trained]
    assert not left, "every answer of the engine is trained"


def _end(answer: tuple[tuple[int, ...], Any, Generation]) -> int:
    return len(answer[0]) + len(answer[2].response_ids)


def _log_probs(model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    chosen = torch.tensor(response_ids)[:, None]
    return torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0].tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_with_a_forced_call_formats_and_several_replies(live, stream: bool):
    async with _agents(live) as agents:

        async def ask(messages: Any, **more: Any) -> Any:
            answer = await agents.chat.chat.completions.create(
                model="m", messages=messages, stream=stream, **more
            )
            return await _joined(answer) if stream else answer

        first = (await ask(HELLO, tools=TOOLS, tool_choice=FORCED)).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, call.function.name) == ("tool_calls", "look")
        assert json.loads(call.function.arguments)["side"] in SIDES
        said = {
            "role": "assistant",
            "content": first.message.content,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "look", "arguments": call.function.arguments},
                }
            ],
        }
        told = [*HELLO, said, {"role": "tool", "tool_call_id": call.id, "content": "a wall"}]
        both = await ask(told, tools=TOOLS, n=2, logprobs=True, top_logprobs=3, max_tokens=9)
        (plain,) = (await ask(HELLO, response_format=_format())).choices
        samples = agents.samples()
    assert [choice.index for choice in both.choices] == [0, 1]
    for choice in both.choices:
        entries = choice.logprobs.content
        generation = agents.client.answer([one.token_id for one in entries])
        assert [one.logprob for one in entries] == generation.log_probs
        assert all(len(one.top_logprobs) == 3 for one in entries)
        assert all(one.logprob <= one.top_logprobs[0].logprob + 1e-5 for one in entries)
    assert json.loads(plain.message.content)["side"] in SIDES
    assert sorted(sample.num_turns for sample in samples) == [1, 1, 2], (
        "the first of two replies continues the call; the second begins another sample"
    )
    _check(live, samples, agents.client, 3)


async def _joined(chunks: Any) -> Any:
    """The completion of a stream. The client's helper refuses replies that the limit cuts."""
    choices: dict[int, Any] = {}
    async for chunk in chunks:
        for one in chunk.choices:
            message = SimpleNamespace(content="", tool_calls=[])
            choice = choices.setdefault(
                one.index,
                SimpleNamespace(
                    index=one.index, message=message, logprobs=SimpleNamespace(content=[])
                ),
            )
            choice.message.content += one.delta.content or ""
            choice.message.tool_calls += one.delta.tool_calls or []
            choice.logprobs.content += one.logprobs.content if one.logprobs else []
            choice.finish_reason = one.finish_reason
    return SimpleNamespace(choices=[choices[index] for index in sorted(choices)])


def _format() -> Any:
    return {"type": "json_schema", "json_schema": {"name": "way", "schema": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_a_forced_call(live, stream: bool):
    tools = [{"type": "function", **one} for one in (TOOL, OTHER)]
    async with _agents(live) as agents:

        async def ask(items: Any, **more: Any) -> Any:
            keywords = {"model": "m", "input": items, "tools": tools, **more}
            answer = await agents.chat.responses.create(stream=stream, **keywords)
            return [event async for event in answer][-1].response if stream else answer

        first = await ask("where", tool_choice="required")
        (call,) = first.output
        assert call.type == "function_call" and call.name in ("look", "wait")
        assert json.loads(call.arguments)["side"] in SIDES
        told = {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"}
        second = await ask([told], previous_response_id=first.id, max_output_tokens=7)
        assert second.usage.output_tokens <= 7
        format_of_text = {"format": {"type": "json_schema", "name": "way", "schema": SCHEMA}}
        third = await ask("where", text=format_of_text, tool_choice="none")
        assert json.loads(third.output_text)["side"] in SIDES
        _check(live, agents.samples(), agents.client, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_messages_with_a_forced_call(live, stream: bool):
    tools = [{"name": "look", "input_schema": SCHEMA, "strict": True}]
    async with _agents(live) as agents:

        async def ask(messages: Any, **more: Any) -> Any:
            keywords = {"model": "m", "messages": messages, "tools": tools, "system": "go", **more}
            if not stream:
                return await agents.claude.messages.create(**keywords)
            async with agents.claude.messages.stream(**keywords) as events:
                return await events.get_final_message()

        first = await ask(HELLO, max_tokens=300, tool_choice={"type": "any"})
        (call,) = first.content
        assert (first.stop_reason, call.name) == ("tool_use", "look")
        assert call.input["side"] in SIDES
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a wall"}
        told = [
            *HELLO,
            {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
            {"role": "user", "content": [result]},
        ]
        second = await ask(told, max_tokens=5)
        assert second.usage.output_tokens <= 5
        samples = agents.samples()
        assert [sample.num_turns for sample in samples] == [2]
        _check(live, samples, agents.client, 1)


async def test_completions_of_texts_and_tokens(live):
    async with _agents(live) as agents:
        answer = await agents.chat.completions.create(
            model="m", prompt=["ab", "cd"], n=2, max_tokens=6, logprobs=2
        )
        first = agents.client.answers[0]
        again = [*first[0], *first[2].response_ids, *live.tokenizer.encode("so")]
        chunks = await agents.chat.completions.create(
            model="m", prompt=again, max_tokens=6, stream=True
        )
        streamed = "".join([chunk.choices[0].text async for chunk in chunks])
        samples = agents.samples()
        last = agents.client.answers[-1][2]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        generation = agents.client.answer(choice.logprobs.token_ids)
        assert choice.logprobs.token_logprobs == generation.log_probs
        assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    assert streamed == live.tokenizer.decode(last.response_ids, skip_special_tokens=True)
    assert sorted(sample.num_turns for sample in samples) == [1, 1, 1, 2]
    _check(live, samples, agents.client, 4)


async def test_a_reply_under_a_grammar_that_the_engine_aborts_is_valid(live):
    schema = {**SCHEMA, "properties": {"side": {"enum": ["a" * 600, "b" * 600]}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "way", "schema": schema}}
    async with _agents(live) as agents:
        asking = asyncio.create_task(
            agents.chat.chat.completions.create(
                model="m", messages=HELLO, response_format=wanted, stream=True
            )
        )
        await asyncio.sleep(0.7)
        assert agents.client.pool.in_flight, "the reply was complete before the abort"
        await agents.client.pool.abort_all()
        chunks = [chunk async for chunk in await asking]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert json.loads("".join(texts))["side"] in ("a" * 600, "b" * 600)
        _check(live, agents.samples(), agents.client, 1)


async def test_a_schema_that_the_engine_cannot_compile_is_refused(live):
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no"}}}
    async with _agents(live) as agents:
        with pytest.raises(openai.BadRequestError, match="Unsupported type"):
            await agents.chat.chat.completions.create(
                model="m", messages=HELLO, response_format=wanted
            )
        assert agents.samples() == []
