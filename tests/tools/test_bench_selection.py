"""The simulated engine behind the comparison of selections (tools.bench.selection)."""

from __future__ import annotations

import asyncio

from rlpipe.rollout.client.generate_client import GenerateClient
from tools.bench.selection import Case, Run, Workload
from tools.bench.simulated_engine import SimulatedEngine

SAMPLING = {"max_new_tokens": 200}
WORK = Workload(batch=2, group=2, median=4, speed=400.0, knee=16.0, trainer=1.0, rejects=0.3)


def _client(url: str) -> GenerateClient:
    return GenerateClient(
        url, vocab_size=100, deadline_s=20.0, samples_per_request=1, max_connections=64
    )


async def _begun(engine: SimulatedEngine) -> None:
    """Wait until both requests run and have a few tokens."""
    while engine.num_running < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)


async def test_responses_have_the_forced_lengths_and_the_versions_of_their_time():
    engine = SimulatedEngine(lambda prompt, index: 20 * prompt + index, speed=200.0, knee=4.0)
    async with engine.serving() as url, _client(url) as client:
        running = asyncio.ensure_future(client.generate([5], SAMPLING, n=2))
        await _begun(engine)
        engine.publish(1)
        first, second = await running
    assert (len(first.response_ids), len(second.response_ids)) == (100, 101)
    assert [stamp for _, stamp in first.weight_versions] == ["run@0@0", "run@1@0"]


async def test_an_aborted_response_continues_to_its_length():
    engine = SimulatedEngine(lambda prompt, index: 40, speed=200.0, knee=4.0)
    stop = asyncio.Event()
    async with engine.serving() as url, _client(url) as client:
        running = asyncio.ensure_future(client.generate([5], SAMPLING, n=2, stop=stop))
        await _begun(engine)
        await client.cut_off(stop)
        partial = await running
        assert all(0 <= len(one.response_ids) < 40 for one in partial)
        whole = await client.generate([5], SAMPLING, n=2, so_far=partial)
    assert [len(one.response_ids) for one in whole] == [40, 40]


async def test_both_selections_train_whole_batches(tmp_path):
    for pool in (None, 1.0):
        run = Run(WORK, Case(2, pool), str(tmp_path / str(pool)))
        figures = await run.measure(iterations=4, warmup=1)
        assert [batch["samples"] for batch in run.batches] == [4] * 4
        assert figures["samples_per_s"] > 0
