"""Sampling through a real router and a real engine."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.router import Router
from rlpipe.errors import (
    DataError,
    DeadlineExceeded,
    EngineError,
    EngineRejected,
    EngineUnavailable,
)
from rlpipe.rollout.client.generate_client import AnsweredTokens, GenerateClient
from rlpipe.rollout.generation import Generation, joined, read_meta
from tests.live_engine import END, START_S, VOCAB_SIZE, log_probs, make_server

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 12,
    "stop_token_ids": [END],
}


def _client(url: str, **keywords) -> GenerateClient:
    return GenerateClient(url, **{"vocab_size": VOCAB_SIZE, "deadline_s": 60.0, **keywords})


@pytest.mark.integration
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_equal_transformers(live, temperature):
    prompts = [[5, 6, 7], [9] * 17, [100]]
    async with _client(live.router.url, samples_per_request=64) as client:
        groups = await asyncio.gather(
            *(
                client.generate(prompt, {**SAMPLING, "temperature": temperature}, n=8)
                for prompt in prompts
            )
        )
    for prompt, group in zip(prompts, groups, strict=True):
        assert len(group) == 8
        for generation in group:
            expected = log_probs(live.model, prompt, generation.response_ids, temperature)
            np.testing.assert_allclose(generation.log_probs, expected, atol=1e-4)
            assert sum(tokens for tokens, _ in generation.weight_versions) == len(
                generation.response_ids
            )
            assert (generation.response_ids[-1] == END) == (generation.finish_reason == "stop")
            assert generation.finish_reason == "stop" or len(generation.response_ids) == 12
            assert generation.t_start_s <= generation.t_end_s


@pytest.mark.integration
async def test_each_seed_gives_one_sample(live):
    async with _client(live.router.url) as client:
        assert len(await client.generate([5, 6], SAMPLING, seeds=[1, 2, 3])) == 3


@pytest.mark.parametrize("prompt", [[], [5, VOCAB_SIZE], [-1]])
async def test_a_prompt_that_would_crash_the_engine_is_refused(prompt):
    async with _client("http://127.0.0.1:9") as client:
        with pytest.raises(DataError, match="group b:7"):
            await client.generate(prompt, SAMPLING, where="group b:7")


@pytest.mark.integration
async def test_a_refused_group_does_not_fail_the_others_of_its_request(live):
    async with _client(live.router.url, samples_per_request=64) as client:
        good, bad = await asyncio.gather(
            client.generate([5, 6], {**SAMPLING, "max_new_tokens": 100}, n=2, where="good"),
            client.generate([5] * 200, {**SAMPLING, "max_new_tokens": 100}, n=2, where="bad"),
            return_exceptions=True,
        )
    assert isinstance(bad, EngineRejected) and "bad" in str(bad)
    assert isinstance(good, list) and len(good) == 2


@pytest.mark.integration
async def test_a_request_ends_at_the_deadline_and_the_error_names_the_group(live):
    async with _client(live.router.url) as client, Engine(live.server.url) as engine:
        await engine.pause()
        start_s = time.monotonic()
        try:
            with pytest.raises(DeadlineExceeded, match=r"(?s)group b:3.*within 0.5 s"):
                await client.generate([5], SAMPLING, where="group b:3", deadline_s=0.5)
        finally:
            await engine.continue_()
        assert time.monotonic() - start_s < 3
        assert len(await client.generate([5], SAMPLING)) == 1


async def test_no_router_is_a_named_error_at_the_deadline():
    async with _client("http://127.0.0.1:9", deadline_s=1.0) as client:
        with pytest.raises((EngineUnavailable, DeadlineExceeded), match=r"(?s)group b:3"):
            await client.generate([5], SAMPLING, where="group b:3")


@pytest.mark.long
@pytest.mark.integration
async def test_a_killed_engine_is_a_named_error_within_the_deadline(live, tmp_path):
    server = make_server(live.model_dir, tmp_path / "server.log")
    router = Router(EngineConfig(), port=None, log_path=tmp_path / "router.log")
    try:
        server.start()
        router.start()
        server.wait_ready(START_S)
        router.wait_ready(START_S)
        router.add(server.url)
        async with _client(router.url, deadline_s=10) as client:
            endless = {**SAMPLING, "max_new_tokens": 240, "ignore_eos": True, "stop_token_ids": []}
            running = asyncio.gather(
                *(client.generate([5, i], endless, n=8) for i in range(8)), return_exceptions=True
            )
            await asyncio.sleep(0.5)
            server.stop()
            start_s = time.monotonic()
            outcomes = await running
            assert time.monotonic() - start_s < 11
            assert all(
                isinstance(outcome, EngineError | DeadlineExceeded) for outcome in outcomes
            ), outcomes
    finally:
        server.stop()
        router.stop()


@pytest.mark.integration
async def test_the_metrics_have_the_prompt_tokens_that_the_engine_had_in_its_cache(live):
    prompt = [number % 90 + 5 for number in range(40)]
    async with Engine(live.server.url) as engine, _client(live.router.url) as client:
        assert client.take_metrics() == {}
        await engine.flush()
        await client.generate(prompt, SAMPLING)
        assert client.take_metrics() == {"engine/prefix_cache_hit_rate": 0.0}
        await client.generate(prompt, SAMPLING)
        # An engine always computes the last token of a prompt.
        assert client.take_metrics() == {"engine/prefix_cache_hit_rate": 39 / 40}
        assert client.take_metrics() == {}


def test_accept_length_is_tokens_by_forward_pass_of_speculative_responses():
    answered = AnsweredTokens()
    for tokens, steps, cached in ((30, 10, 3), (10, 6, 0), (7, 0, 9)):
        answered.add(6, generation(tokens, steps, cached))
    assert answered.metrics() == {
        "engine/prefix_cache_hit_rate": (3 + 0 + 6) / 18,
        "engine/spec_accept_length": 40 / 16,
    }


def test_a_continued_response_adds_its_forward_passes():
    assert joined(generation(30, 10, 3), generation(10, 6, 33)).verify_steps == 16


def generation(tokens: int, steps: int, cached: int) -> Generation:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 7, None]] * tokens,
        "weight_version": "run@0@x",
        "cached_tokens": cached,
        **({"spec_verify_ct": steps} if steps else {}),
    }
    return read_meta(meta, "http://x", 1.0, 2.0)
