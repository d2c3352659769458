"""Responses in several pieces, with a real engine: cut off, continued, with a push in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import httpx
import numpy as np
import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.train import SyncConfig
from rlpipe.engines.sglang.admin import Engine, PauseMode
from rlpipe.errors import DeadlineExceeded, EngineError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.request_pool import Gate
from rlpipe.rollout.generate import SingleTurn, sampling_params
from rlpipe.rollout.generation import Generation, joined, settled
from rlpipe.sync.transports.base import Push, TransportSetup
from rlpipe.sync.transports.tensor import TensorTransport
from rlpipe.types import PlannedGroup, Status
from tests.live_engine import CONTEXT_LEN, END, VOCAB_SIZE, log_probs, make_model

LONG = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 240, "ignore_eos": True}
PROMPTS = [[5 + number, 6, 7] for number in range(8)]


def _client(url: str, **keywords) -> GenerateClient:
    return GenerateClient(
        url, **{"vocab_size": VOCAB_SIZE, "deadline_s": 60.0, "samples_per_request": 64, **keywords}
    )


async def _push(live, model, stamp: str, pause: PauseMode = "abort") -> None:
    sync = SyncConfig(update_weight_buffer_size=2**20, timeout_s=40.0)
    transport = TensorTransport(TransportSetup(model_dir=live.model_dir, sync=sync))
    push = Push(stamp, [live.server.url], pause=pause)
    await asyncio.to_thread(transport.send, list(model.state_dict().items()), push)
    live.model = model


def _check(prompt: list[int], generation: Generation, models: Mapping[str, Any]) -> None:
    """Check the log-prob of each token against the model of its weight version."""
    ends = list(accumulate(tokens for tokens, _ in generation.weight_versions))
    assert ends[-1] == len(generation.response_ids) == len(generation.log_probs)
    for (tokens, stamp), end in zip(generation.weight_versions, ends, strict=True):
        expected = log_probs(models[stamp], prompt, generation.response_ids)
        np.testing.assert_allclose(
            generation.log_probs[end - tokens : end], expected[end - tokens : end], atol=1e-4
        )


@pytest.mark.integration
@pytest.mark.parametrize(("mode", "pause"), [("abort", "abort"), ("in_place", "retract")])
async def test_a_push_during_a_response_is_another_span_with_exact_log_probs(
    live, tmp_path, mode, pause
):
    old = live.model
    new = make_model(tmp_path / "new", seed=len(mode) + 20)
    await _push(live, old, "b@1@old")
    models = {"b@1@old": old, "b@2@new": new}
    async with _client(live.router.url) as client:
        running = asyncio.gather(*(client.generate(prompt, LONG, n=8) for prompt in PROMPTS))
        await asyncio.sleep(0.25)
        await client.hold(mode, deadline_s=20, expires_s=30)
        await _push(live, new, "b@2@new", pause)
        client.release()
        late = client.generate(PROMPTS[0], {**LONG, "max_new_tokens": 20}, n=2)
        groups = await running
        for generation in await late:
            assert generation.weight_versions == [(20, "b@2@new")]
            _check(PROMPTS[0], generation, models)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for generation in group:
            assert [stamp for _, stamp in generation.weight_versions] == ["b@1@old", "b@2@new"]
            assert (len(generation.response_ids), generation.finish_reason) == (240, "length")
            _check(prompt, generation, models)


@pytest.mark.integration
async def test_drain_waits_for_running_requests_and_starts_none(live):
    async with _client(live.router.url) as client:
        running = asyncio.create_task(client.generate([5, 6], {**LONG, "max_new_tokens": 120}, n=4))
        await asyncio.sleep(0.1)
        await client.hold("drain", deadline_s=20, expires_s=30)
        await asyncio.wait_for(asyncio.shield(running), 1)
        waiting = asyncio.create_task(client.generate([5, 6], {**LONG, "max_new_tokens": 2}))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        client.release()
        assert len((await waiting)[0].response_ids) == 2


@pytest.mark.integration
async def test_a_drain_that_takes_too_long_names_the_groups_and_opens_the_gate(live):
    async with _client(live.router.url) as client:
        running = asyncio.create_task(client.generate([5, 6], LONG, n=32, where="group b:7"))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded, match=r"(?s)group b:7.*within 0.01 s"):
            await client.hold("drain", deadline_s=0.01, expires_s=30)
        assert len(await client.generate([5], {**LONG, "max_new_tokens": 1})) == 1
        await running


@pytest.mark.integration
async def test_a_cut_off_ends_the_requests_of_its_caller_only(live):
    stop = asyncio.Event()
    async with _client(live.router.url) as client:
        ours = asyncio.create_task(client.generate([5, 6], LONG, n=8, stop=stop))
        others = asyncio.create_task(client.generate([7, 8], {**LONG, "max_new_tokens": 230}, n=8))
        await asyncio.sleep(0.25)
        await client.cut_off(stop)
        for generation in await ours:
            assert generation.finish_reason == "abort" and 0 < len(generation.response_ids) < 240
            _check(
                [5, 6],
                generation,
                dict.fromkeys([stamp for _, stamp in generation.weight_versions], live.model),
            )
        for generation in await others:
            assert (generation.finish_reason, len(generation.response_ids)) == ("length", 230)
            _check(
                [7, 8],
                generation,
                dict.fromkeys([stamp for _, stamp in generation.weight_versions], live.model),
            )
        start_s = time.monotonic()
        (late,) = await client.generate([5], LONG, stop=stop)
        assert (late.response_ids, late.finish_reason) == (
            [],
            "abort",
        ) and time.monotonic() - start_s < 1


@pytest.mark.integration
async def test_a_group_continues_over_iterations_with_other_weights(live, tmp_path):
    models = [live.model, make_model(tmp_path / "b", seed=31), make_model(tmp_path / "c", seed=32)]
    config = RolloutConfig(
        rollout_batch_size=1, n_samples_per_prompt=16, rollout_max_response_len=240
    )
    group = PlannedGroup(
        group_id="b:00000001", prompt="p", prompt_ids=(5, 6, 7), seeds=tuple(range(16))
    )
    samples = []
    lengths = [0] * 16
    for version, model in enumerate(models):
        await _push(live, model, f"b@{version}@d")
        stop = asyncio.Event()
        async with _client(live.router.url, end_ids=[END]) as client:
            generate = SingleTurn(
                client, sampling_params(config), decode=str, context_len=CONTEXT_LEN, stop=stop
            )
            running = asyncio.ensure_future(generate(group, samples))
            if version < 2:
                await asyncio.sleep(0.08)
                await client.cut_off(stop)
            before = samples
            samples = await running
        for earlier in before:
            assert (
                samples[earlier.index].response_ids[: len(earlier.response_ids)]
                == earlier.response_ids
            )
        assert all(
            len(sample.response_ids) >= length
            for sample, length in zip(samples, lengths, strict=True)
        )
        lengths = [len(sample.response_ids) for sample in samples]
    assert {sample.status for sample in samples} <= {Status.COMPLETED, Status.TRUNCATED}
    assert any(len(sample.weight_versions) == 3 for sample in samples)
    for sample in samples:
        assert END not in sample.response_ids[:-1]
        expected = [log_probs(model, [5, 6, 7], sample.response_ids) for model in models]
        by_token = [version for tokens, version in sample.weight_versions for _ in range(tokens)]
        chosen = [expected[version][place] for place, version in enumerate(by_token)]
        np.testing.assert_allclose(sample.rollout_log_probs or [], chosen, atol=1e-4)


@pytest.mark.integration
async def test_the_installed_engine_reports_spans_of_weight_versions(live):
    async with Engine(live.server.url) as engine:
        await engine.require_spans()


def _row(ids: list[int], reason: str, spans: bool = True) -> dict:
    versions = (
        {"weight_versions": [{"version": "b@1@d", "start": 0, "end": len(ids)}]} if spans else {}
    )
    logprobs = [[-float(token), token, None] for token in ids]
    meta = {
        "output_token_logprobs": logprobs,
        "finish_reason": {"type": reason},
        "weight_version": "b@1@d",
        **versions,
    }
    return {"meta_info": meta}


class _Scripted:
    """Answer requests of `/generate` with given rows, in order, and record the requests."""

    def __init__(self, *answers: list[dict]) -> None:
        self.answers = list(answers)
        self.requests = []

    def client(self, **keywords) -> GenerateClient:
        client = _client("http://router", **keywords)
        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return client

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        return httpx.Response(200, json=self.answers.pop(0))


async def test_only_the_aborted_responses_of_a_batch_are_continued():
    script = _Scripted([_row([1, 2, 3], "length"), _row([4], "abort")], [_row([5, 6], "length")])
    async with script.client() as client:
        first, second = await client.generate([9], {"max_new_tokens": 3}, n=2)
    assert (first.response_ids, second.response_ids, second.log_probs) == (
        [1, 2, 3],
        [4, 5, 6],
        [-4.0, -5.0, -6.0],
    )
    assert second.weight_versions == [(3, "b@1@d")]
    (again,) = script.requests[1:]
    assert (again["input_ids"], again["sampling_params"]["max_new_tokens"]) == ([[9, 4]], 2)


@pytest.mark.parametrize(
    ("ids", "reason", "kept"),
    [
        ([1, 7], "stop", [1, 7]),
        ([1, 8], "stop", [1, 8]),
        ([7, 5], "stop", [7]),
        ([1, 2, 3], "length", [1, 2, 3]),
    ],
)
async def test_an_aborted_response_that_had_ended_is_finished(ids, reason, kept):
    script = _Scripted([_row(ids, "abort")])
    async with script.client(end_ids=[7]) as client:
        (generation,) = await client.generate([9], {"max_new_tokens": 3, "stop_token_ids": [8]})
    assert (generation.finish_reason, generation.response_ids) == (reason, kept)
    assert (
        sum(tokens for tokens, _ in generation.weight_versions)
        == len(generation.log_probs)
        == len(kept)
    )


async def test_a_response_aborted_before_its_first_token_starts_again():
    without = _row([], "abort")
    del without["meta_info"]["output_token_logprobs"]
    script = _Scripted([without], [_row([], "abort")], [_row([1], "stop")])
    async with script.client() as client:
        (generation,) = await client.generate([9], {"max_new_tokens": 3})
    assert (
        generation.response_ids == [1]
        and [request["input_ids"] for request in script.requests] == [[[9]]] * 3
    )


async def test_in_place_is_refused_for_an_engine_that_reports_one_version_per_answer():
    script = _Scripted([_row([1], "stop", spans=False)])
    async with script.client() as client:
        await client.generate([9], {"max_new_tokens": 3})
        await client.hold("abort", deadline_s=1, expires_s=1)
        with pytest.raises(EngineError, match=r"(?s)older than 0.5.21.*sync.in_flight"):
            await client.hold("in_place", deadline_s=1, expires_s=1)


async def test_an_answer_without_spans_after_a_push_in_place_is_an_error():
    script = _Scripted()
    async with script.client() as client:

        def moved(_request: httpx.Request) -> httpx.Response:
            client.pool.num_in_place_pushes += 1
            return httpx.Response(200, json=[_row([1], "stop", spans=False)])

        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(moved))
        with pytest.raises(EngineError, match="the weight version of each token"):
            await client.generate([9], {"max_new_tokens": 3})


async def test_a_hold_expires_and_its_time_does_not_count_for_deadlines():
    script = _Scripted([_row([1], "stop")])
    async with script.client(deadline_s=0.2) as client:
        await client.hold("abort", deadline_s=1, expires_s=0.5)
        start_s = time.monotonic()
        assert len(await client.generate([9], {"max_new_tokens": 3})) == 1
        assert 0.4 < time.monotonic() - start_s < 2


async def test_a_second_hold_or_release_changes_nothing():
    gate = Gate()
    gate.release()
    gate.hold(60)
    gate.hold(60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.opened(), 0.05)
    gate.release()
    gate.release()
    await asyncio.wait_for(gate.opened(), 1)
    held_s = gate.held_s()
    assert held_s >= 0.05
    await asyncio.sleep(0.05)
    assert gate.held_s() == held_s


def test_pieces_of_equal_weights_are_one_run_length():
    first = Generation([1, 2], [-1.0, -2.0], "abort", [(2, "a")], "e", 3, 1.0, 2.0)
    more = Generation([3], [-3.0], "abort", [(1, "a")], "e", 9, 4.0, 5.0)
    both = joined(first, more)
    assert (both.response_ids, both.log_probs, both.weight_versions) == (
        [1, 2, 3],
        [-1.0, -2.0, -3.0],
        [(3, "a")],
    )
    assert (both.t_start_s, both.t_end_s, both.cached_tokens) == (1.0, 5.0, 3)
    assert settled(both, {"max_new_tokens": 9}, []) is both
