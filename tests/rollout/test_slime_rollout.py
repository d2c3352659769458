"""slime's rollout functions through the gateway of a rollout (rlpipe.rollout.slime_rollout)."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from copy import copy
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlpipe.rollout import slime_rollout
from rlpipe.types import Sample, Status
from tests.rollout.hooks.test_generate_function import _Engine, _rows

PLAIN = """
from slime.rollout.sglang_rollout import {name} as sampled

async def generate(args, sample, sampling_params):
    return await sampled(args, sample, sampling_params)
"""


@pytest.mark.parametrize("name", ["generate", "generate_streaming", "generate_and_rm"])
async def test_functions_of_slime_sample_through_the_gateway(tmp_path, name):
    source = PLAIN.format(name=name)
    if name == "generate_and_rm":
        source = source.replace(
            "    return", "    args.custom_generate_function_path = None\n    return"
        )
    rows = await _rows(tmp_path, source, rollout_max_response_len=9)
    assert [(row.response, row.status) for row in rows] == [("yes<eos>", Status.COMPLETED)] * 2
    for row in rows:
        assert row.rollout_log_probs == [-0.5] * 4
        assert row.weight_versions[0][0] == 4
    if name == "generate_and_rm":
        assert [row.reward for row in rows] == [0.0, 0.0]


async def test_a_used_up_response_is_truncated_without_a_request(tmp_path):
    engine = _Engine()
    source = PLAIN.format(name="generate").replace(
        "    return", "    sample.tokens += [5] * 9\n    sample.response_length = 9\n    return"
    )
    rows = await _rows(tmp_path, source, engine)
    assert [(row.status, row.response_length) for row in rows] == [(Status.TRUNCATED, 9)] * 2
    assert not engine.requests


def arguments(port: int, **values: Any) -> Namespace:
    given: dict[str, Any] = {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 8,
        "tokenizer": Namespace(encode=lambda text, **_: [len(text)]),
        "hf_checkpoint": "/none",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 3,
        "custom_rm_path": f"{__name__}.reward_of_length",
        "use_rollout_routing_replay": False,
        "group_rm": False,
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": False,
    }
    for name in (
        "custom_generate_function_path",
        "dynamic_sampling_filter_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
        "rollout_stop",
        "rollout_stop_token_ids",
        "rm_type",
        "reward_key",
        "eval_reward_key",
    ):
        given[name] = None
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_response_len": 4}
    given |= {f"rollout_{name}": value for name, value in params.items()}
    given |= {"rollout_skip_special_tokens": False, "eval_temperature": 0.0}
    return Namespace(**{**given, **values})


async def reward_of_length(args, sample, **_):
    return float(len(sample.prompt))


async def reward_of_one(args, samples, **_):
    return [1.0]


def keep_long(args, samples, **_):
    return len(samples[0].prompt) > 1


class Server:
    """Answer every request with one token, and record the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        await asyncio.sleep(0.01 * len(self.requests))
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.25, 7, None]]}
        return web.json_response({"text": "x", "meta_info": meta})


@pytest.fixture
async def server():
    handler = Server()
    app = web.Application()
    app.router.add_post("/generate", handler.answer)
    async with TestServer(app) as started:
        yield handler, started.port


def groups(prompts: list[str]) -> list[list[Sample]]:
    return [
        [Sample(group_id=f"b:{number:08d}", index=index, prompt=prompt) for index in range(2)]
        for number, prompt in enumerate(prompts)
    ]


async def test_a_batch_is_filled_and_the_other_groups_are_returned(server):
    handler, port = server
    args = arguments(port, dynamic_sampling_filter_path=f"{__name__}.keep_long")
    prompts = iter(groups(["ab", "c", "def", "gh", "ij", "kl"]))
    output, cut_off = await slime_rollout.generate_rollout_async(
        args, 0, lambda number: [next(prompts) for _ in range(number)]
    )
    assert len(output.samples) == 2 and output.metrics == {}
    assert all(len(group[0].prompt) > 1 for group in output.samples)
    for sample in slime_rollout._flat(output.samples):
        assert (sample.reward, sample.response_ids) == (float(len(sample.prompt)), [7])
    assert all(sample.metadata["start_rollout_id"] == 0 for group in cut_off for sample in group)
    assert {request["sampling_params"]["max_new_tokens"] for request in handler.requests} == {4}


async def test_an_evaluation_samples_every_group_of_the_data_source(server):
    handler, port = server
    held_out = groups(["ab", "c"])
    for group in held_out:
        for sample in group:
            sample.group_id = f"eval/set/{sample.group_id}"
    view = _Source(held_out)
    output, _ = await slime_rollout.eval_rollout(arguments(port), 3, view)
    (name,) = output.data
    assert name == "set/b"
    assert output.data[name]["rewards"] == [2.0, 2.0, 1.0, 1.0]
    assert {request["sampling_params"]["temperature"] for request in handler.requests} == {0.0}


class _Source:
    def __init__(self, held_out: list[list[Sample]]) -> None:
        self.held_out = held_out

    def __len__(self) -> int:
        return len(self.held_out)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return self.held_out[:num_samples]


def test_state_belongs_to_the_arguments_of_one_rollout():
    one = arguments(1)
    other = copy(one)
    state = slime_rollout.GenerateState(one)
    assert slime_rollout.GenerateState(one) is state
    assert slime_rollout.GenerateState(other) is not state
    assert state.args is one
    number = len(slime_rollout.GenerateState._instances)
    del other
    assert len(slime_rollout.GenerateState._instances) == number - 1


def test_urls_of_models():
    args = Namespace(
        sglang_router_ip="h", sglang_router_port=1, sglang_model_routers={"ref": ("r", 2)}
    )
    assert slime_rollout.get_model_url(args, "ref") == "http://r:2/generate"
    assert slime_rollout.get_model_url(args, "other", "/x") == "http://h:1/x"


async def test_rewards_of_another_number_than_the_samples_are_an_error(server):
    _, port = server
    args = arguments(port, custom_rm_path=f"{__name__}.reward_of_one", group_rm=True)
    (group,) = groups(["ab"])
    with pytest.raises(ValueError, match="shorter"):
        await slime_rollout.generate_and_rm_group(args, group, {"max_new_tokens": 4})
