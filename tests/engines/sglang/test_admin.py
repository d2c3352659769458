"""The control client calls a real engine (rlpipe.engines.sglang.admin)."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

from rlpipe.engines.sglang import admin
from rlpipe.engines.sglang.admin import MEMORY_TAGS, Engine, EngineLoad
from rlpipe.engines.sglang.push_routes import CLOSE, OPEN
from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable
from rlpipe.rollout.client.generate_client import GenerateClient
from tests.live_engine import VOCAB_SIZE, log_probs

pytestmark = pytest.mark.integration


async def test_an_engine_reports_its_model(live):
    async with Engine(live.server.url) as engine:
        await engine.health()
        assert (await engine.info())["tokenizer_path"] == str(live.model_dir)
        assert await engine.weight_version()


async def test_scores_equal_transformers(live):
    sequences = [[5, 9, 20, 31], [7, 8], [3] * 30]
    async with Engine(live.server.url) as engine:
        scores = await engine.score(sequences)
    for sequence, score in zip(sequences, scores, strict=True):
        np.testing.assert_allclose(
            score, log_probs(live.model, sequence[:1], sequence[1:]), atol=1e-4
        )


async def test_scores_do_not_wait_for_requests_that_came_before(live):
    random = np.random.default_rng(0)  # more tokens than a server prefills at once, none cached
    prompts = random.integers(2, VOCAB_SIZE, (400, 200)).tolist()
    async with (
        Engine(live.server.url) as engine,
        httpx.AsyncClient(
            base_url=live.server.url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as client,
    ):
        await engine.pause()  # so that all requests are there before the first is answered
        body = {"sampling_params": {"max_new_tokens": 1}}
        requests = [
            asyncio.create_task(client.post("/generate", json={"input_ids": prompt, **body}))
            for prompt in prompts
        ]
        await asyncio.sleep(2.0)
        scored = asyncio.create_task(engine.score([[5, 9, 20, 31]]))
        await asyncio.sleep(0.2)
        await engine.continue_()
        await scored
        assert sum(request.done() for request in requests) < len(requests) / 2
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*requests))


async def test_a_paused_engine_keeps_requests_waiting(live):
    async with (
        Engine(live.server.url) as engine,
        GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=30) as client,
    ):
        await engine.pause()
        await engine.flush()
        waiting = asyncio.create_task(client.generate([5, 6], {"max_new_tokens": 4}, n=2))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert await engine.weight_version()
        await engine.continue_()
        assert len(await waiting) == 2


async def test_abort_returns_the_tokens_sampled_so_far(live):
    async with (
        Engine(live.server.url) as engine,
        GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=30) as client,
    ):
        # On any machine one of these waits ends in the middle of the sampling.
        for wait_s in (0.3, 0.1, 0.2, 0.05, 0.15, 0.02):
            stop = asyncio.Event()
            running = asyncio.create_task(
                client.generate([5, 6], {"max_new_tokens": 240, "ignore_eos": True}, n=2, stop=stop)
            )
            await asyncio.sleep(wait_s)
            stop.set()
            await engine.abort_all()
            found = await running
            if all(
                generation.finish_reason == "abort" and generation.response_ids
                for generation in found
            ):
                break
        assert all(0 < len(generation.response_ids) < 240 for generation in found)
        assert {generation.finish_reason for generation in found} == {"abort"}


async def test_the_error_of_an_unreadable_answer_names_engine_and_endpoint(live, monkeypatch):
    async def other_answer(client, method, url, **_):
        return httpx.Response(
            200, text=answers.pop(0), headers={"content-type": "application/json"}
        )

    monkeypatch.setattr(admin, "call", other_answer)
    answers = ["<html>", "[]", "{}", "{}", '[{"meta_info": {}}]', "null"]
    async with Engine(live.server.url) as engine:
        for ask in (
            engine.info(),
            engine.require_spans(),
            engine.weight_version(),
            engine.score([[1, 2]]),
            engine.score([[1, 2]]),
        ):
            with pytest.raises(EngineRejected, match="cannot be read") as caught:
                await ask
            assert str(caught.value.where).startswith(f"engine {live.server.url} /")


async def test_the_next_update_ends_an_open_update(live):
    async with Engine(live.server.url) as engine:
        assert await engine.begin_weight_update()
        assert await engine.begin_weight_update()
        await engine.end_weight_update()
        with pytest.raises(
            EngineRejected, match=r"(?s)end_weight_update.*no weight-update session"
        ):
            await engine.end_weight_update()


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of all requests to engines."""
    asked: list[str] = []
    original = admin.call

    async def recorded(http, method, url, **keywords):
        asked.append(httpx.URL(url).path)
        return await original(http, method, url, **keywords)

    monkeypatch.setattr(admin, "call", recorded)
    return asked


async def test_the_steps_before_a_load_are_one_request_and_so_are_those_after_it(live, paths):
    async with Engine(live.server.url) as engine:
        stamp = await engine.weight_version()
        paths.clear()
        opened = await engine.open_update("abort", begin=True)
        closed = await engine.close_update(stamp, end=opened.begun, sample=True)
        assert paths == [OPEN, CLOSE]
        await engine.health()
    assert (opened.begun, closed.weight_version) == (True, stamp)
    assert list(opened.seconds) == ["pause", "flush the cache", "begin"]
    assert list(closed.seconds) == ["end", "continue"]


async def test_a_server_of_others_gets_a_request_for_each_step(live, paths, monkeypatch):
    monkeypatch.setattr(admin, "OPEN", "/missing")
    monkeypatch.setattr(admin, "CLOSE", "/missing")
    async with Engine(live.server.url) as engine:
        stamp = await engine.weight_version()
        paths.clear()
        opened = await engine.open_update("abort", begin=True)
        closed = await engine.close_update(stamp, end=opened.begun, sample=True)
        await engine.health()
    assert closed.weight_version == stamp
    names = ["pause_generation", "flush_cache", "begin_weight_update", "end_weight_update"]
    names += ["model_info", "continue_generation", "health_generate"]
    assert [path for path in paths if path != "/missing"] == [f"/{name}" for name in names]


async def test_requests_end_when_an_update_opens(live):
    sampling = {"max_new_tokens": 240, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": sampling}
    async with Engine(live.server.url) as engine, httpx.AsyncClient(timeout=60) as http:
        running = asyncio.create_task(http.post(f"{live.server.url}/generate", json=body))
        await asyncio.sleep(0.2)
        await engine.open_update("abort", begin=False)
        assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await engine.close_update(await engine.weight_version(), end=False, sample=True)


async def test_an_engine_with_other_weights_than_expected_stays_paused(live):
    async with Engine(live.server.url) as engine, Engine(live.server.url, deadline_s=1) as hasty:
        opened = await engine.open_update("abort", begin=True)
        closed = await engine.close_update("b@9@other", end=opened.begun, sample=True)
        assert closed.weight_version != "b@9@other" and "continue" not in closed.seconds
        with pytest.raises(DeadlineExceeded):
            await hasty.health()
        await engine.continue_()


async def test_an_update_that_cannot_be_opened_is_refused_with_the_reason(live):
    client = GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=60)
    async with Engine(live.server.url, deadline_s=1) as engine, client:
        running = asyncio.create_task(
            client.generate([5, 6], {"max_new_tokens": 240, "ignore_eos": True})
        )
        await asyncio.sleep(0.2)
        try:
            with pytest.raises(EngineRejected, match=r"still in use"):
                await engine.open_update("in_place", begin=True)
        finally:
            await engine.continue_()
        assert len((await running)[0].response_ids) == 240


async def test_a_flush_waits_for_a_cache_in_use_until_the_deadline(live):
    client = GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=30)
    async with Engine(live.server.url, deadline_s=1) as engine, client:
        running = asyncio.create_task(
            client.generate([5, 6], {"max_new_tokens": 240, "ignore_eos": True})
        )
        await asyncio.sleep(0.2)
        await engine.pause("in_place")
        try:
            with pytest.raises(DeadlineExceeded, match=r"still in use"):
                await engine.flush()
        finally:
            await engine.continue_()
        assert len((await running)[0].response_ids) == 240
        await engine.flush()


async def test_the_error_of_a_missing_engine_names_its_url():
    async with Engine("http://127.0.0.1:9", deadline_s=5) as engine:
        with pytest.raises(EngineUnavailable, match=r"engine http://127.0.0.1:9 /pause_generation"):
            await engine.pause()


async def test_a_hanging_call_ends_at_its_deadline(live):
    async with Engine(live.server.url) as engine, Engine(live.server.url, deadline_s=0.5) as hasty:
        await engine.pause()
        start_s = time.monotonic()
        try:
            with pytest.raises(DeadlineExceeded, match=r"(?s)/health_generate.*within 0.5 s"):
                await hasty.health()
        finally:
            await engine.continue_()
        assert time.monotonic() - start_s < 3


async def test_a_paused_engine_releases_memory_and_resumes_it(live):
    """On the CPU no memory moves, but the calls are the same."""
    async with Engine(live.server.url) as engine:
        before = await engine.score([[5, 9, 20]])
        await engine.pause()
        await engine.flush()
        await engine.release_memory(MEMORY_TAGS)
        await engine.resume_memory(("weights",))
        await engine.flush()
        await engine.resume_memory(("cuda_graph", "kv_cache"))
        await engine.continue_()
        np.testing.assert_allclose(await engine.score([[5, 9, 20]]), before, atol=1e-5)


async def idle_load(engine: Engine) -> EngineLoad:
    """Return the load once the server has published that it is idle."""
    load = await engine.load()
    until_s = time.monotonic() + 20
    while load is None or load.running:
        assert time.monotonic() < until_s, load
        await asyncio.sleep(0.05)
        load = await engine.load()
    return load


async def test_an_engine_reports_its_requests(live):
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    async with (
        Engine(live.server.url) as engine,
        GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=60) as client,
    ):
        assert (await idle_load(engine)).queued == 0
        request = asyncio.create_task(client.generate([5, 6, 7], sampling, n=4))
        loads = []
        while not request.done():
            loads.append(await engine.load())
        assert max(load.running for load in loads if load) == 4
        assert max(load.cache_used for load in loads if load) > 0
        assert (await idle_load(engine)).running == 0


async def test_the_load_is_that_of_all_data_parallel_ranks(monkeypatch):
    def rank(running: int, queued: int, used: float) -> dict[str, float]:
        return {"num_running_reqs": running, "num_waiting_reqs": queued, "token_usage": used}

    answers = [
        httpx.Response(200, json={"loads": [rank(3, 1, 0.5), rank(2, 0, 0.1)]}),
        httpx.Response(200, json={"loads": []}),
        EngineRejected("refused", where="x", found="HTTP 404 Not Found"),
    ]

    async def answer(_http, method, url, **_):
        assert (method, url) == ("GET", "http://x/v1/loads?include=core")
        found = answers.pop(0)
        if isinstance(found, EngineRejected):
            raise found
        return found

    monkeypatch.setattr(admin, "call", answer)
    async with Engine("http://x") as engine:
        assert tuple(await engine.load() or ()) == (5, 1, pytest.approx(0.3))
        with pytest.raises(EngineRejected, match="cannot be read"):
            await engine.load()
        assert await engine.load() is None, "before SGLang 0.5.21"
