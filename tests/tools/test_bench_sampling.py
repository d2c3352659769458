"""The baseline of the rollout benchmark on an engine that only counts (tools.bench.sampling)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rlpipe.errors import EngineRejected, EngineUnavailable
from rlpipe.types import PlannedGroup
from tools.bench.bench import Bench, open_bench
from tools.bench.sampling import straight

GROUPS = [
    PlannedGroup(group_id=f"g:{n}", prompt="", prompt_ids=(n, n + 1), seeds=(0, 1, 2, 3))
    for n in range(40)
]


@dataclass
class Engine:
    """Bodies of its requests, and its answers."""

    url: str = ""
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        rows = [{"meta_info": {"completion_tokens": 3}} for _ in body["input_ids"]]
        return web.json_response(rows, status=self.status)

    async def flush(self, _request: web.Request) -> web.Response:
        return web.Response()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """A server on a free port."""
    made = Engine()
    app = web.Application()
    app.router.add_post("/generate", made.generate)
    app.router.add_post("/flush_cache", made.flush)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
def bench(tmp_path) -> Bench:
    """On the tiny model, which nothing here needs."""
    return open_bench(tmp_path, "tiny", [], seconds=1, repeats=1)


async def test_the_baseline_asks_for_every_sample_of_the_plan_once(engine, bench):
    async with aiohttp.ClientSession() as http:
        sampled = await straight(bench, [engine.url], GROUPS, http)
    assert sampled.tokens == 3 * 4 * len(GROUPS)
    ids = [tuple(prompt) for body in engine.requests for prompt in body["input_ids"]]
    assert sorted(ids) == sorted(group.prompt_ids for group in GROUPS for _ in group.seeds)
    sampling = engine.requests[0]["sampling_params"]
    assert (
        sampling["ignore_eos"]
        and sampling["max_new_tokens"] == bench.config.rollout.rollout_max_response_len
    )
    assert engine.requests[0]["return_logprob"] is True


async def test_an_engine_that_refuses_ends_the_part_by_name(engine, bench):
    engine.status = 500
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineRejected, match="HTTP 500"):
            await straight(bench, [engine.url], GROUPS, http)


async def test_an_engine_that_is_gone_ends_the_part_by_name(bench):
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineUnavailable):
            await straight(bench, ["http://127.0.0.1:9"], GROUPS, http)
