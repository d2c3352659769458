"""`rollout`: tokens/s of a rollout stage, against the same requests sent directly to the engines.

Ours is the stage: a `Generator` plans an iteration, writes the plan, asks the router, decodes the
answers and writes shards. The clock runs from before the plan until the last shard is stored. The
baseline posts the same bodies for the prompts of the same plan to the engines, round-robin, with as
many requests in flight; it only parses the answers (aiohttp and orjson) and counts tokens. Caches
are flushed before each side. The model has no end-of-sequence token, so all responses have full
length.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from rlpipe.actors.drivers import Driver
from rlpipe.actors.generator import SAMPLES_PER_REQUEST_ON_CPU, Generator
from rlpipe.actors.specs import GeneratorSpec
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import EngineUnavailable
from rlpipe.rollout.client.http import rejected
from rlpipe.rollout.generate import sampling_params
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.types import DataState, PlannedGroup
from tools.bench.bench import Bench
from tools.bench.measures import Row
from tools.bench.serving import Serving, serving

DRIVER = Driver("bench", 0)
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


@dataclass(frozen=True)
class Sampled:
    """Tokens and time of one side."""

    tokens: int
    seconds: float
    planning_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def measure(bench: Bench) -> list[Row]:
    """Return the rows of `rollout`."""
    bench.ensure_model()
    say = bench.progress("rollout")
    with serving(bench, say) as up:
        ours, straight = asyncio.run(compare(bench, up, say))
    rollout = bench.config.rollout
    lengths = f"{bench.shape.prompt_tokens} + {rollout.rollout_max_response_len} tokens"
    samples = f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} samples"
    note = f"{bench.name}, {samples} of {lengths}"
    rates = tuple(one.rate for one in ours), tuple(one.rate for one in straight)
    planning = tuple(one.planning_s for one in ours)
    return [
        Row("rollout", "sampling", "tokens/s", *rates, "SGLang alone", note),
        Row("rollout", "planning", "s", planning, note="a part of the time above"),
    ]


async def compare(bench: Bench, up: Serving, say) -> tuple[list[Sampled], list[Sampled]]:
    """Measure both sides on the plan of one iteration after another.

    The first round does not count.
    """
    store = bench.home / "rollout"
    shutil.rmtree(store, ignore_errors=True)
    path = Path.cwd()
    generator = Generator(str(path))
    await generator.setup(DRIVER, GeneratorSpec(bench.config, str(bench.model_dir), str(store)))
    await generator.connect(up.router, on_gpus=bench.on_gpus, engines=len(up.engines))
    files = Files(store)
    state = DataState()
    found: tuple[list[Sampled], list[Sampled]] = [], []
    until_s = bench.until_s()
    longest_s = 0.0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=NO_TIMEOUT
    ) as http:
        for k in range(bench.repeats + 1):
            started_s = time.monotonic()
            if k > 1 and started_s + longest_s > until_s:
                say(f"no time for round {k} of {bench.repeats}")
                break
            state, *pair = await _round(bench, up, (generator, files, http), k, state)
            for sampled, samples in zip(found, pair, strict=True):
                sampled.append(samples)
            longest_s = max(longest_s, time.monotonic() - started_s)
            rates = f"{pair[0].rate:,.0f} of {pair[1].rate:,.0f} tokens/s"
            say(f"round {k} of {bench.repeats}: {rates}{'' if k else ', not counted'}")
    return found[0][1:], found[1][1:]


async def _round(
    bench: Bench,
    up: Serving,
    parts: tuple[Generator, Files, aiohttp.ClientSession],
    k: int,
    state: DataState,
) -> tuple[DataState, Sampled, Sampled]:
    """Measure both sides on the plan of iteration k, the baseline first if k is odd.

    Returns the data state after the plan, ours, the baseline.
    """
    generator, files, http = parts
    started_s = time.perf_counter()
    planned = await generator.plan(DRIVER, k, state)
    planning_s = time.perf_counter() - started_s
    groups = Plans(files).read(planned["plan"]).groups
    other = None
    if k % 2:
        other = await straight(bench, up.engines, groups, http)
    await _flush(up.engines)
    mine = await through(generator, planned["plan"], planning_s)
    if other is None:
        other = await straight(bench, up.engines, groups, http)
    return DataState.model_validate(planned["after"]), mine, other


async def through(generator: Generator, plan: str, planning_s: float) -> Sampled:
    """Measure a rollout stage whose planning took `planning_s`."""
    started_s = time.perf_counter()
    answer = await generator.rollout(DRIVER, plan)
    return Sampled(
        answer["outputs"]["tokens"], planning_s + time.perf_counter() - started_s, planning_s
    )


async def straight(
    bench: Bench,
    engines: Sequence[str],
    groups: Sequence[PlannedGroup],
    http: aiohttp.ClientSession,
) -> Sampled:
    """Measure the same requests sent directly to the engines."""
    rollout = bench.config.rollout
    urls = itertools.cycle(engines)
    together = max(
        1, 1 if bench.on_gpus else SAMPLES_PER_REQUEST_ON_CPU // rollout.n_samples_per_prompt
    )
    requests = bench.config.engine.server_concurrency * len(engines)
    slots = asyncio.Semaphore(max(1, requests // rollout.n_samples_per_prompt // together))
    params = {**sampling_params(rollout), "ignore_eos": True}

    async def post(some: Sequence[PlannedGroup]) -> int:
        ids = [list(group.prompt_ids) for group in some for _ in group.seeds]
        body = {
            "input_ids": ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }
        async with slots:
            url = f"{next(urls)}/generate"
            status, text = await _answer(http, url, orjson.dumps(body))
        if status >= 400:
            raise rejected("bench rollout", url, status, text.decode(errors="replace"))
        return sum(row["meta_info"]["completion_tokens"] for row in orjson.loads(text))

    await _flush(engines)
    started_s = time.perf_counter()
    tokens = await asyncio.gather(
        *(post(groups[start : start + together]) for start in range(0, len(groups), together))
    )
    return Sampled(sum(tokens), time.perf_counter() - started_s)


async def _answer(http: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, bytes]:
    try:
        async with http.post(
            url, data=body, headers={"Content-Type": "application/json"}
        ) as answer:
            return answer.status, await answer.read()
    except aiohttp.ClientError as error:
        raise EngineUnavailable(
            "no answer", where="bench rollout", found=f"{error!r} from {url}"
        ) from error


async def _flush(engines: Sequence[str]) -> None:
    for url in engines:
        async with Engine(url) as engine:
            await engine.flush()
