"""Weights are pushed over HTTP into a real engine (rlpipe.sync.transports.tensor)."""

from __future__ import annotations

import asyncio
from threading import Event

import numpy as np
import pytest

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import DeadlineExceeded, SyncError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.sync.session import Session
from rlpipe.sync.tensors import expected_shapes
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.tensor import TensorTransport
from tests.live_engine import VOCAB_SIZE, log_probs, make_model
from tests.sync.setups import transport_setup

NOWHERE = "http://127.0.0.1:9"


def _transport(model_dir, **keywords) -> TensorTransport:
    return TensorTransport(transport_setup(model_dir, **keywords))


def _scores(url: str, sequences: list[list[int]]) -> list[list[float]]:
    async def score() -> list[list[float]]:
        async with Engine(url) as engine:
            return await engine.score(sequences)

    return asyncio.run(score())


def _sampled(url: str) -> list:
    async def sample() -> list:
        async with GenerateClient(url, vocab_size=VOCAB_SIZE, deadline_s=30) as client:
            return await client.generate([5, 6], {"max_new_tokens": 4}, n=2)

    return asyncio.run(sample())


@pytest.mark.integration
@pytest.mark.parametrize("buffer_size_bytes", [1, 40_000, 512 * 1024**2])
def test_after_a_push_the_engine_computes_as_the_new_model(live, tmp_path, buffer_size_bytes):
    model = make_model(tmp_path / "other", seed=buffer_size_bytes % 1000 + 7)
    transport = _transport(live.model_dir, buffer_size_bytes=buffer_size_bytes)
    report = transport.send(
        model.state_dict().items(), Push(f"b@0@{buffer_size_bytes}", [live.server.url])
    )
    live.model = model
    assert report.tensors == len(transport.expected) and report.engines == (live.server.url,)
    assert report.paused_s < sum(report.steps.values()) < report.seconds
    assert {"pause", "tensors", "bucket", "close", "continue"} < report.steps.keys()
    assert report.buckets == {1: report.tensors, 512 * 1024**2: 1}.get(
        buffer_size_bytes, report.buckets
    )
    (scores,) = _scores(live.server.url, [[5, 9, 20, 31]])
    np.testing.assert_allclose(scores, log_probs(model, [5], [9, 20, 31]), atol=1e-4)
    for generation in _sampled(live.router.url):
        assert [stamp for _, stamp in generation.weight_versions] == [f"b@0@{buffer_size_bytes}"]
        np.testing.assert_allclose(
            generation.log_probs, log_probs(model, [5, 6], generation.response_ids), atol=1e-4
        )


@pytest.mark.integration
def test_engines_sample_before_the_memory_of_a_push_is_released(live, monkeypatch):
    sampling = Event()
    resume = Session.resume

    async def resumed(session: Session, **keywords: bool) -> None:
        await resume(session, **keywords)
        sampling.set()

    class SlowTransport(TensorTransport):
        def packed(self, *arguments):
            yield from super().packed(*arguments)
            assert sampling.wait(20.0), "engines wait for the memory to be released"

    monkeypatch.setattr(Session, "resume", resumed)
    transport = SlowTransport(transport_setup(live.model_dir))
    report = transport.send(live.model.state_dict().items(), Push("b@0@lasting", [live.server.url]))
    assert report.engines == (live.server.url,) and "give memory back" in report.steps


@pytest.mark.integration
def test_an_engine_without_a_cache_stays_paused(live):
    _transport(live.model_dir).send(
        live.model.state_dict().items(), Push("b@0@paused", [live.server.url], resume=False)
    )

    async def after() -> None:
        async with (
            Engine(live.server.url) as engine,
            Engine(live.server.url, deadline_s=1) as hasty,
        ):
            with pytest.raises(DeadlineExceeded):
                await hasty.health()
            await engine.continue_()
            await engine.health()

    asyncio.run(after())


@pytest.mark.integration
def test_a_silent_engine_is_unknown_and_the_other_engines_are_current(live):
    report = _transport(live.model_dir).send(
        live.model.state_dict().items(), Push("b@0@two", [live.server.url, NOWHERE])
    )
    assert report.engines == (live.server.url,)
    assert list(report.unknown) == [NOWHERE]
    assert len(_sampled(live.router.url)) == 2


@pytest.mark.integration
def test_a_failed_push_leaves_the_engine_paused_until_a_push_succeeds(live):
    read = []

    def broken():
        for name, tensor in live.model.state_dict().items():
            read.append(name)
            yield name, tensor.flatten() if name == "model.norm.weight" else tensor
            if name == "model.layers.1.mlp.up_proj.weight":
                yield "model.layers.1.no.such.weight", tensor

    with pytest.raises(SyncError) as caught:
        _transport(live.model_dir).send(broken(), Push("b@0@broken", [live.server.url]))
    assert "the weights arrived nowhere" in str(caught.value)
    assert "no such tensor" in str(caught.value)
    assert isinstance(caught.value.found, dict)
    assert list(caught.value.found) == [live.server.url]
    assert read == list(live.model.state_dict()), "the stream is read to its end"

    async def waits() -> None:
        async with GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=1) as client:
            await client.generate([5], {"max_new_tokens": 2})

    with pytest.raises(TimeoutError):
        asyncio.run(waits())
    _transport(live.model_dir).send(
        live.model.state_dict().items(), Push("b@0@again", [live.server.url])
    )
    assert len(_sampled(live.router.url)) == 2


@pytest.mark.integration
def test_a_push_without_all_tensors_is_refused(live):
    some = dict(list(live.model.state_dict().items())[:-2])
    with pytest.raises(SyncError, match=r"(?s)tensors are missing.*model.norm.weight"):
        _transport(live.model_dir).send(some.items(), Push("b@0@some", [live.server.url]))
    _transport(live.model_dir).send(
        live.model.state_dict().items(), Push("b@0@again", [live.server.url])
    )


@pytest.mark.integration
def test_a_push_can_be_checked_against_random_numbers(live, tmp_path):
    model = make_model(tmp_path / "other", seed=11)
    report = _transport(live.model_dir).send(
        model.state_dict().items(), Push("b@0@checked", [live.server.url], check=True)
    )
    live.model = model
    assert report.tensors == 2 * len(expected_shapes(live.model_dir)), "each is sent twice"
    (scores,) = _scores(live.server.url, [[5, 9, 20, 31]])
    np.testing.assert_allclose(scores, log_probs(model, [5], [9, 20, 31]), atol=1e-4)


@pytest.mark.integration
def test_a_checked_push_names_a_tensor_that_was_not_sent(live):
    transport = _transport(live.model_dir)
    left_out = "model.layers.1.mlp.down_proj.weight"
    del transport.expected[left_out]
    tensors = {name: tensor for name, tensor in live.model.state_dict().items() if name != left_out}
    with pytest.raises(
        SyncError, match=r"(?s)does not hold the weights that were sent.*layers\.1\.mlp\.down_proj"
    ):
        transport.send(tensors.items(), Push("b@0@less", [live.server.url], check=True))
    _transport(live.model_dir).send(
        live.model.state_dict().items(), Push("b@0@again", [live.server.url])
    )
    (scores,) = _scores(live.server.url, [[5, 9, 20]])
    np.testing.assert_allclose(scores, log_probs(live.model, [5], [9, 20]), atol=1e-4)
