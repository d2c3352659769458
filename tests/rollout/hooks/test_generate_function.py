"""User functions that sample: their forms, their HTTP endpoints, and their rows."""

from __future__ import annotations

import asyncio
import copy
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.recipes.agents import CHATML
from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.config.load import validate
from rlpipe.errors import ConfigError
from rlpipe.rollout.generate import GroupFailed, failed_samples
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.generators import RolloutContext, RolloutResources, open_generate_function
from rlpipe.rollout.hooks.generate_function import load_generate
from rlpipe.types import PlannedGroup, Sample, Status

TOKENIZER = character_tokenizer("Spell: ")
TOKENIZER.chat_template = CHATML
END = 1
GROUP = PlannedGroup(
    group_id="b:00000007",
    prompt="ab",
    prompt_ids=tuple(TOKENIZER.encode("ab")),
    label="l",
    seeds=(10, 11),
)


class _Engine:
    """Return `yes` with an increasing version; abort once `stop` is set."""

    end_ids = frozenset({END})

    def __init__(self, reply: str = "yes") -> None:
        self.reply = reply
        self.requests = []

    async def generate(
        self, ids, sampling, *, stop=None, routing_key=None, where="", **_: Any
    ) -> list[Generation]:
        self.requests.append((list(ids), sampling))
        if stop is not None and stop.is_set():
            return [Generation([], [], "abort", [], "e", 0, 1.0, 2.0)]
        reply = [*TOKENIZER.encode(self.reply), END]
        return [
            Generation(
                reply,
                [-0.5] * len(reply),
                "stop",
                [(len(reply), f"b@{len(self.requests)}@d")],
                "e",
                0,
                1.0,
                2.0,
            )
        ]


@asynccontextmanager
async def _generate_function(
    tmp_path: Path,
    source: str,
    engine: _Engine,
    stop: asyncio.Event | None = None,
    evaluation: bool = False,
    **rollout: Any,
):
    hook = tmp_path / "mine.py"
    hook.write_text(source)
    config = validate(
        {
            "run": "run",
            "num_rollout": 1,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": str(tmp_path)}},
            "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
            "reward": {"function": {"type": "math"}},
            "rollout": {
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 9,
                **rollout,
            },
        }
    )
    model = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 200}
    resources = RolloutResources.load(config, TOKENIZER, model, str(tmp_path))
    context = RolloutContext(config.rollout, 4, evaluation=evaluation, stop=stop)
    async with open_generate_function(resources, context, engine) as generate:  # pyright: ignore[reportArgumentType]
        yield generate


async def _rows(
    tmp_path: Path, source: str, engine: _Engine | None = None, **keywords: Any
) -> list[Sample]:
    path = str(tmp_path / "mine.py")
    async with _generate_function(
        tmp_path, source, engine or _Engine(), custom_generate_function_path=path, **keywords
    ) as generate:
        return await generate(GROUP)


SLIME = """
import httpx
async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with httpx.AsyncClient() as client:
        body = {"input_ids": sample.tokens, "sampling_params": sampling_params}
        answer = await client.post(url, json=body)
    output = answer.json()
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = sample.tokens + [pair[1] for pair in pairs]
    sample.response_length += len(pairs)
    sample.response += output["text"]
    sample.tool_call_count = args.max_turns
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = sample.Status.TRUNCATED
        case "abort":
            sample.status = sample.Status.ABORTED
        case "stop":
            sample.status = sample.Status.COMPLETED
    return sample
"""


async def test_a_function_of_slime_gets_versions_and_log_probs_without_requesting_them(tmp_path):
    engine = _Engine()
    rows = await _rows(tmp_path, SLIME, engine, max_turns=7)
    reply = [*TOKENIZER.encode("yes"), END]
    assert [(row.index, row.rollout_id, row.seed, row.status) for row in rows] == [
        (0, 0, 10, Status.COMPLETED),
        (1, 1, 11, Status.COMPLETED),
    ]
    for row in rows:
        assert (row.response_ids, row.rollout_log_probs, row.prompt_ids) == (
            reply,
            [-0.5] * 4,
            list(GROUP.prompt_ids),
        )
        assert row.weight_versions == [(4, 1)], "equal answers to equal requests: the older weights"
        assert vars(row)["tool_call_count"] == 7 and row.response.startswith("yes")
    assert (
        engine.requests[0][1]["max_new_tokens"] == 9
        and engine.requests[0][1]["no_stop_trim"] is True
    )


WRITTEN_FOR_SLIME = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample
async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    params = state.sampling_params
    body = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
    output = await post(url, body)
    ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    return [
        Sample(
            prompt=sample.prompt,
            tokens=prompt_ids + ids,
            response_length=len(ids),
            response=output["text"],
            loss_mask=[1] * len(ids),
            status=Sample.Status.COMPLETED,
            group_index=sample.group_index,
        )
    ]
"""


async def test_a_file_written_for_slime_runs_unchanged_without_slime(tmp_path):
    rows = await _rows(tmp_path, WRITTEN_FOR_SLIME)
    assert [(row.group_id, row.index, row.rollout_id) for row in rows] == [
        ("b:00000007", 0, 0),
        ("b:00000007", 1, 1),
    ]
    for row in rows:
        assert (row.prompt_ids, len(row.response_ids), row.rollout_log_probs) == (
            list(GROUP.prompt_ids),
            4,
            [-0.5] * 4,
        )


AGENT = """
import openai
async def generate(args, sample, sampling_params, evaluation=False):
    base_url = f"{args.session_url}/{sample.session_id}/v1"
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    create = client.chat.completions.create
    messages = [{"role": "user", "content": "hi"}]
    for turn in range(2):
        if turn:
            stream = await create(model="m", messages=messages, stream=True, temperature=0.1)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            message = {"role": "assistant", "content": text}
        else:
            answer = await create(model="m", messages=messages, logprobs=True, max_tokens=5)
            message = answer.choices[0].message
            assert [one.token_id for one in answer.choices[0].logprobs.content][-1] == 1
            assert answer.usage.completion_tokens == 4 and answer.choices[0].finish_reason == "stop"
        messages += [message, {"role": "user", "content": "so"}]
    sample.reward = 0.25
    return sample
"""


async def test_an_unmodified_openai_client_becomes_token_exact_samples(tmp_path):
    engine = _Engine()
    rows = await _rows(tmp_path, AGENT, engine)
    reply = [*TOKENIZER.encode("yes"), END]
    first = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    for row in rows:
        between = row.response_ids[4:-4]
        assert row.prompt_ids == first and row.response_ids[:4] == row.response_ids[-4:] == reply
        assert (
            TOKENIZER.decode(between)
            == "<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
        )
        assert row.loss_mask == [1] * 4 + [0] * len(between) + [1] * 4 and row.num_turns == 2
        assert (row.reward, row.status, row.group_id, row.label) == (
            0.25,
            Status.COMPLETED,
            "b:00000007",
            "l",
        )
        assert [row.prompt_ids + row.response_ids[:-4], row.prompt_ids] == sorted(
            (ids for ids, _ in engine.requests if ids[: len(first)] == first), key=len, reverse=True
        )[:: len(rows)][:2]
    assert {params["max_new_tokens"] for _, params in engine.requests} == {5, 9}
    assert {params["temperature"] for _, params in engine.requests} == {1.0}, (
        "the run's, whatever the client says"
    )


async def test_an_agent_whose_conversation_was_cut_off_begins_it_again(tmp_path):
    path = str(tmp_path / "mine.py")
    agent = AGENT.replace('"hi"', "sample.prompt")
    async with _generate_function(
        tmp_path, agent, _Engine(), custom_generate_function_path=path
    ) as generate:
        whole = await generate(GROUP)
        begun = copy.deepcopy(whole[0])
        begun.status, begun.reward = Status.ABORTED, None
        begun.response_ids = begun.response_ids[:2]
        begun.loss_mask, begun.rollout_log_probs = [1] * 2, [-0.5] * 2
        begun.weight_versions = [(2, 0)]
        again = await generate(GROUP, [begun, whole[1]])
    assert again[1] is whole[1]
    fields = ("prompt_ids", "response_ids", "loss_mask", "reward", "status")
    for name in fields:
        assert getattr(again[0], name) == getattr(whole[0], name), name


async def test_a_plain_function_may_use_the_blocking_client_and_return_none(tmp_path):
    source = (
        AGENT.replace("async def", "def")
        .replace("AsyncOpenAI", "OpenAI")
        .replace("await ", "")
        .replace("async for", "for")
    )
    rows = await _rows(tmp_path, source.replace("return sample", "return None"))
    assert [row.num_turns for row in rows] == [2, 2] and rows[0].reward == 0.25


async def test_a_function_of_a_group_gets_its_samples_and_may_fan_out(tmp_path):
    source = """
import copy
async def custom_generate(args, samples, evaluation=False):
    assert len(samples) == 2 and evaluation is False
    for sample in samples:
        sample.tokens += [5, 6]
    other = copy.deepcopy(samples[1])
    other.tokens += [7]
    other.reward = 1
    return [samples[0], [samples[1], other]]
def helper(): pass
"""
    rows = await _rows(tmp_path, source)
    assert [(row.index, row.rollout_id, len(row.response_ids), row.reward) for row in rows] == [
        (0, 0, 2, None),
        (1, 1, 2, None),
        (3, 1, 3, 1.0),
    ]


async def test_a_failed_rollout_is_a_row_with_the_error_and_fails_the_group(tmp_path):
    source = """
def generate(args, sample, sampling_params):
    if sample.index:
        raise RuntimeError("no such tool")
    sample.tokens += [5]
    return sample
"""
    with pytest.raises(GroupFailed, match="no such tool") as caught:
        await _rows(tmp_path, source)
    good, bad = failed_samples(GROUP, caught.value)
    assert (good.status, good.response_ids, bad.status) == (Status.COMPLETED, [5], Status.FAILED)
    assert "RuntimeError: no such tool" in str(bad.error) and bad.rollout_log_probs == []


async def test_after_a_cut_off_a_function_returns_partial_samples_and_continues_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("rlpipe.rollout.hooks.generate_function.CUT_OFF_GRACE_S", 0.05)
    stop = asyncio.Event()
    source = (
        SLIME
        + "\n    \n"
        + "import asyncio\n_one = generate\nasync def generate(args, sample, sampling_params):\n"
    )
    source += "    if sample.index:\n        await asyncio.sleep(60)\n"
    source += "    return await _one(args, sample, sampling_params)\n"
    path = f"{tmp_path / 'mine.py'}:generate"
    async with _generate_function(
        tmp_path, source, _Engine(), stop=stop, custom_generate_function_path=path
    ) as generate:
        running = asyncio.ensure_future(generate(GROUP))
        await asyncio.sleep(0.3)
        stop.set()
        rows = await running
        assert [(row.status, len(row.response_ids)) for row in rows] == [
            (Status.COMPLETED, 4),
            (Status.ABORTED, 0),
        ]
        begun = copy.deepcopy(rows[0])
        begun.status = Status.ABORTED
        begun.response_ids = begun.response_ids[:2]
        begun.rollout_log_probs = [-0.5] * 2
        begun.weight_versions = [(2, 0)]
    async with _generate_function(
        tmp_path, source.replace("60", "0"), _Engine(), custom_generate_function_path=path
    ) as generate:
        again = await generate(GROUP, [begun])
    assert [len(row.response_ids) for row in again] == [6, 4]
    assert (
        again[0].weight_versions[0] == (2, 0)
        and sum(tokens for tokens, _ in again[0].weight_versions) == 6
    )


async def test_sample_hooks_get_each_sample_and_their_exceptions_fail_it(tmp_path):
    source = """
async def first(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["seen"] = [rollout_id, evaluation]
def second(args, sample):
    if sample.metadata.get("bad"):
        sample.tokens += [9]
        sample.rollout_log_probs += [-1.0]
    sample.loss_mask = [0] * len(sample.response_ids)
    return sample
"""
    paths = [f"{tmp_path / 'mine.py'}:first", f"{tmp_path / 'mine.py'}:second"]
    single = GROUP.model_copy(update={"seeds": (10,)})
    async with _generate_function(
        tmp_path, source, _Engine(), evaluation=True, rollout_sample_hook_path=paths
    ) as generate:
        (row,) = await generate(single)
        assert row.metadata == {"seen": [4, True]} and row.loss_mask == [0] * 4
        with pytest.raises(GroupFailed, match="tokens were changed"):
            await generate(single.model_copy(update={"metadata": {"bad": 1}}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "async def generate(args, sample): pass",
            r"generate\(args, sample\)[\s\S]*sampling_params",
        ),
        ("async def generate(samples, more, than, wanted): pass", "cannot be called"),
        ("class generate: pass", "a class, not a function"),
    ],
)
def test_a_function_with_a_wrong_signature_is_refused_with_the_accepted_forms(
    tmp_path, source, message
):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_generate(str(tmp_path / "mine.py"))


async def test_the_gateway_answers_texts_batches_and_bad_requests_like_sglang_and_openai(tmp_path):
    source = """
import httpx, openai, json
async def generate(args, sample, sampling_params):
    base = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    async with httpx.AsyncClient(base_url=base) as client:
        body = {"text": "ab", "sampling_params": {"stop": ["s"]}}
        by_text = (await client.post("/generate", json=body)).json()
        body = {"input_ids": [[5], [6]], "sampling_params": {"n": 2}}
        batch = (await client.post("/generate", json=body)).json()
        models = (await client.get("/v1/models")).json()
        workers = (await client.get("/workers")).json()
        empty = await client.post("/generate", json={"input_ids": []})
        body = {"messages": [{"role": "user", "content": "x"}]}
        lost = await client.post("/sessions/none/v1/chat/completions", json=body)
        many = await client.post("/v1/chat/completions", json={**body, "n": 200})
    version = by_text["meta_info"]["weight_version"]
    sample.metadata["answers"] = [by_text["text"], version, len(batch), models["data"][0]["id"]]
    codes = [empty.status_code, lost.status_code, many.status_code]
    sample.metadata["codes"] = [*codes, many.json()["error"]["message"]]
    sample.tokens += [5]
    return sample
"""
    rows = await _rows(tmp_path, source, _Real())
    by_text, version, batch, model = rows[0].metadata["answers"]
    assert (by_text, batch, model) == ("ye", 4, "run") and version.startswith("b@")
    assert (
        rows[0].metadata["codes"][:3] == [400, 400, 400]
        and "less than or equal to 128" in rows[0].metadata["codes"][3]
    )


class _Real(_Engine):
    """Refuse an empty prompt, as the client does."""

    async def generate(self, ids, sampling, **keywords: Any) -> list[Generation]:
        if not ids:
            raise ValueError("the prompt has no tokens")
        return await super().generate(ids, sampling, **keywords)


@pytest.mark.parametrize("name", ["mine.py", "agent.py"])
async def test_the_examples_of_the_readme_give_samples_with_log_probs(tmp_path, name):
    text = (Path(__file__).parents[3] / "rlpipe" / "rollout" / "README.md").read_text(
        encoding="utf-8"
    )
    source = next(
        code for code in text.split("```python\n") if code.startswith(f"# {name}")
    ).partition("```")[0]
    rows = await _rows(tmp_path, source)
    assert [(row.status, row.rollout_log_probs) for row in rows] == [
        (Status.COMPLETED, [-0.5] * 4)
    ] * 2
