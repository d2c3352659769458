"""Text and length of responses follow the configuration for every generate function."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.recipes.agents import CHATML
from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.config.data import EvalDataset, FilePrompts
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.generators import (
    RolloutContext,
    RolloutResources,
    open_generate_function,
    open_rollout_function,
)
from rlpipe.rollout.slime_rollout import GenerateState, evaluation_params
from rlpipe.slime.args import slime_args
from rlpipe.store.parquet.rows import samples_to_table, table_to_samples
from rlpipe.store.parquet.shards import decode, encode
from rlpipe.types import PlannedGroup, Sample

TOKENIZER = character_tokenizer("Spell: ")
TOKENIZER.chat_template = CHATML
END = 1
END_TEXT = TOKENIZER.decode([END])
PROMPT = tuple(TOKENIZER.encode("ab"))
RESPONSE = (*TOKENIZER.encode("yes"), END)
GROUP = PlannedGroup(group_id="b:00000007", prompt="ab", prompt_ids=PROMPT, label="l", seeds=(10,))
SUPERVISED = GROUP.model_copy(update={"response_ids": RESPONSE, "loss_mask": (1,) * len(RESPONSE)})
CALLS_THE_ENGINE = """
import httpx
async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with httpx.AsyncClient() as client:
        params = sampling_params
        body = {"input_ids": sample.tokens, "sampling_params": params}
        output = (await client.post(url, json=body)).json()
    sample.tokens = sample.tokens + output["output_ids"]
    sample.response_length, sample.response = len(output["output_ids"]), output["text"]
    sample.metadata["args"] = args.rollout_skip_special_tokens
    return sample
"""
AGENT = """
import httpx
async def generate(args, sample, sampling_params):
    url = f"{args.session_url}/{sample.session_id}/v1/chat/completions"
    async with httpx.AsyncClient() as client:
        answer = await client.post(url, json={"messages": [{"role": "user", "content": "hi"}]})
    sample.metadata["told"] = answer.json()["choices"][0]["message"]["content"]
    return sample
"""
SLIMES_STATE = """
from slime.rollout.sglang_rollout import GenerateState
""" + CALLS_THE_ENGINE.replace("= sampling_params\n", "= GenerateState(args).sampling_params\n")


class _Engine:
    """Return `yes` and the end-of-sequence token."""

    end_ids = frozenset({END})

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def generate(self, ids: Any, sampling: dict[str, Any], **_: Any) -> list[Generation]:
        self.requests.append(sampling)
        return [
            Generation(
                list(RESPONSE),
                [-0.5] * len(RESPONSE),
                "stop",
                [(len(RESPONSE), "b@1@d")],
                "e",
                0,
                1.0,
                2.0,
            )
        ]


def _config(tmp_path: Path, rollout: dict[str, Any], **sections: Any) -> RunConfig:
    return validate(
        {
            "run": "run",
            "num_rollout": 1,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": str(tmp_path)}},
            "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
            "reward": {"function": {"type": "math"}},
            "rollout": {
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 90,
                **rollout,
            },
            **sections,
        }
    )


async def _row(
    config: RunConfig, engine: _Engine, group: PlannedGroup = GROUP, **changes: Any
) -> Sample:
    resources = RolloutResources.load(
        config, TOKENIZER, {"vocab_size": len(TOKENIZER), "max_position_embeddings": 200}, "/m"
    )
    rollout = config.rollout.model_copy(update=changes)
    async with open_generate_function(resources, RolloutContext(rollout), engine) as generate:  # pyright: ignore[reportArgumentType]
        (row,) = await generate(group)
    return row


def _skip_setting(value: bool | None) -> dict[str, Any]:
    return {} if value is None else {"rollout_skip_special_tokens": value}


TEXT_OF_ROWS = {None: "yes", True: "yes", False: f"yes{END_TEXT}"}
TEXT_OF_FUNCTIONS = {None: f"yes{END_TEXT}", True: "yes", False: f"yes{END_TEXT}"}
"""By default a user function gets text that it can tokenize again."""


@pytest.mark.parametrize("skip", [None, True, False])
async def test_the_text_of_a_response_has_special_tokens_as_configured(
    tmp_path: Path, skip: bool | None
):
    tool = {"tools": [{"path": "rlpipe.rollout.tools.calculator"}]}
    for more in ({}, tool):
        row = await _row(_config(tmp_path, {**_skip_setting(skip), **more}), _Engine())
        assert (row.response, row.response_ids) == (TEXT_OF_ROWS[skip], list(RESPONSE))
        (stored,) = table_to_samples(decode(encode(samples_to_table([row], 0)), "test"))
        assert stored.response == row.response, "rewards that are computed again read the same text"
    given = await _row(
        _config(tmp_path, _skip_setting(skip)), _Engine(), SUPERVISED, type="dataset"
    )
    assert (given.response, given.response_ids) == (TEXT_OF_ROWS[skip], list(RESPONSE))


@pytest.mark.parametrize("source", [CALLS_THE_ENGINE, SLIMES_STATE])
@pytest.mark.parametrize("skip", [None, True, False])
async def test_a_generate_function_gets_special_tokens_as_configured(
    tmp_path: Path, skip: bool | None, source: str
):
    (tmp_path / "mine.py").write_text(source)
    hook = {"custom_generate_function_path": str(tmp_path / "mine.py")}
    row = await _row(_config(tmp_path, {**_skip_setting(skip), **hook}), _Engine())
    assert (row.response, row.response_ids) == (TEXT_OF_FUNCTIONS[skip], list(RESPONSE))
    assert row.metadata["args"] is (skip is True)


@pytest.mark.parametrize("skip", [None, True, False])
async def test_the_text_of_a_session_has_special_tokens_as_configured_and_replies_never(
    tmp_path: Path, skip: bool | None
):
    (tmp_path / "mine.py").write_text(AGENT)
    hook = {"custom_generate_function_path": str(tmp_path / "mine.py")}
    row = await _row(_config(tmp_path, {**_skip_setting(skip), **hook}), _Engine())
    assert (row.response, row.metadata["told"]) == (TEXT_OF_ROWS[skip], "yes")


async def test_a_held_out_set_may_keep_special_tokens_where_the_run_does_not(tmp_path: Path):
    held_out = EvalDataset(
        name="a", prompts=FilePrompts(type="file", paths=("a.jsonl",)), skip_special_tokens=False
    )
    config = _config(tmp_path, {"rollout_skip_special_tokens": True})
    changes = {**held_out.sampling(), "n_samples_per_prompt": 1}
    assert (await _row(config, _Engine(), **changes)).response == f"yes{END_TEXT}"
    assert (await _row(config, _Engine())).response == "yes"


def test_the_settings_at_their_defaults_are_not_part_of_the_identity(tmp_path: Path):
    config = _config(tmp_path, {})
    assert "rollout_skip_special_tokens" not in config.rollout.identity()
    assert "overlong_prompts" not in config.data.identity()
    held_out = EvalDataset(name="a", prompts=FilePrompts(type="file", paths=("a.jsonl",)))
    assert "skip_special_tokens" not in held_out.identity()
    assert (
        _config(tmp_path, _skip_setting(False)).rollout.identity()["rollout_skip_special_tokens"]
        is False
    )
    assert slime_args(config).rollout_skip_special_tokens is False


@pytest.mark.parametrize(
    ("context_length", "room"), [(None, 90), (50, 48), ("0.05k", 48), (200, 90)]
)
async def test_a_response_fits_into_the_context_of_the_engines(
    tmp_path: Path, context_length: Any, room: int
):
    sglang = {} if context_length is None else {"context_length": context_length}
    engine = _Engine()
    await _row(_config(tmp_path, {}, engine={"sglang": sglang}), engine)
    assert engine.requests[0]["max_new_tokens"] == room


async def test_slimes_rollout_samples_each_held_out_set_with_its_own_parameters(tmp_path: Path):
    path = "slime.rollout.sglang_rollout.generate_rollout"
    config = _config(tmp_path, {"eval_function_path": path})
    resources = RolloutResources.load(
        config,
        TOKENIZER,
        {"vocab_size": len(TOKENIZER), "max_position_embeddings": 200},
        str(tmp_path),
    )
    sampled = []
    for number, own in enumerate(
        ({"temperature": 0.0, "max_response_len": 5}, {"top_p": 0.5, "stop_token_ids": (9,)})
    ):
        held_out = EvalDataset(
            name=f"set{number}", prompts=FilePrompts(type="file", paths=("a.jsonl",)), **own
        )
        context = RolloutContext(
            config.rollout.model_copy(update=held_out.sampling()),
            evaluation=True,
            temperature=held_out.temperature,
        )
        async with open_rollout_function(resources, context, _Engine()) as function:  # pyright: ignore[reportArgumentType]
            args = function.args
        params = GenerateState(args).sampling_params
        sampled.append((evaluation_params(args), params["stop_token_ids"]))
    names = ("temperature", "top_p", "max_new_tokens")
    assert [tuple(params[name] for name in names) for params, _ in sampled] == [
        (0.0, 1.0, 5),
        (1.0, 0.5, 90),
    ]
    assert [stop for _, stop in sampled] == [None, [9]]


async def test_rollouts_one_after_another_have_one_address_and_open_ones_their_own(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def rollout(args, rollout_id, source, evaluation=False): ..."
    )
    config = _config(tmp_path, {"rollout_function_path": f"{tmp_path}/mine.py:rollout"})
    model = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 200}
    resources = RolloutResources.load(config, TOKENIZER, model, str(tmp_path))
    context = RolloutContext(config.rollout)

    def opened():
        return open_rollout_function(resources, context, _Engine())  # pyright: ignore[reportArgumentType]

    async with opened() as first, opened() as other:
        ports = [function.args.sglang_router_port for function in (first, other)]
    assert len({*ports}) == 2
    url = f"http://127.0.0.1:{ports[0]}/health"
    async with httpx.AsyncClient(timeout=20.0) as client:
        waiting = asyncio.create_task(client.get(url))
        await asyncio.sleep(0.2)
        assert not waiting.done(), "between two rollouts a request waits"
        async with opened() as later:
            assert later.args.sglang_router_port == ports[0]
            assert (await waiting).status_code == 200
