"""`rollout`: tokens/s of a rollout stage, against the same requests sent straight to the engines.

Ours is what the stage does: a `Generator` plans an iteration, writes the plan, asks the router,
reads and decodes the answers and writes shards; the clock runs from before the plan until the last
shard is safe. The baseline takes the prompts of that very plan and posts the same bodies, so many
at a time as ours has in flight, to the engines, in turn; it reads the answers (aiohttp and orjson,
nothing else) and counts their tokens. Caches are flushed before each. The model has no
end-of-sequence token, so both get responses of full length.
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

from rlpipe.actors.generator import SAMPLES_PER_REQUEST_ON_CPU, Generator
from rlpipe.actors.specs import Driver, GeneratorSpec
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
    """What a side sampled, and how long that took."""

    tokens: int
    seconds: float
    planning_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def measure(bench: Bench) -> list[Row]:
    """The rows of `rollout`."""
    bench.have_model()
    say = bench.says("rollout")
    with serving(bench, say) as up:
        ours, straight = asyncio.run(compare(bench, up, say))
    rollout = bench.config.rollout
    lengths = f"{bench.shape.prompt_tokens} + {rollout.rollout_max_response_len} tokens"
    note = f"{bench.name}, {rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} samples of {lengths}"
    rates = tuple(one.rate for one in ours), tuple(one.rate for one in straight)
    planning = tuple(one.planning_s for one in ours)
    return [
        Row("rollout", "sampling", "tokens/s", *rates, "SGLang alone", note),
        Row("rollout", "planning", "s", planning, note="a part of the time above"),
    ]


async def compare(bench: Bench, up: Serving, say) -> tuple[list[Sampled], list[Sampled]]:
    """Rounds of ours and the baseline on the plan of one iteration after another; a round that is
    not counted comes first."""
    store = bench.home / "rollout"
    shutil.rmtree(store, ignore_errors=True)
    path = Path.cwd()
    generator = Generator(str(path))
    await generator.setup(DRIVER, GeneratorSpec(bench.config, str(bench.model_dir), str(store)))
    await generator.connect(up.router, on_gpus=bench.on_gpus)
    files = Files(store)
    state = DataState()
    found: tuple[list[Sampled], list[Sampled]] = [], []
    until_s = bench.until_s()
    longest_s = 0.0
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=NO_TIMEOUT
    ) as http:
        for k in range(bench.repeats + 1):
            begun_s = time.monotonic()
            if k > 1 and begun_s + longest_s > until_s:
                say(f"no time for round {k} of {bench.repeats}")
                break
            state, *pair = await _round(bench, up, (generator, files, http), k, state)
            for sampled, samples in zip(found, pair, strict=True):
                sampled.append(samples)
            longest_s = max(longest_s, time.monotonic() - begun_s)
            say(
                f"round {k} of {bench.repeats}: {pair[0].rate:,.0f} of {pair[1].rate:,.0f} tokens/s{'' if k else ', not counted'}"
            )
    return found[0][1:], found[1][1:]


async def _round(
    bench: Bench,
    up: Serving,
    parts: tuple[Generator, Files, aiohttp.ClientSession],
    k: int,
    state: DataState,
) -> tuple[DataState, Sampled, Sampled]:
    """Both on the plan of iteration k, the baseline first where k is odd. The state after it comes
    first."""
    generator, files, http = parts
    begun_s = time.perf_counter()
    planned = await generator.plan(DRIVER, k, state)
    planning_s = time.perf_counter() - begun_s
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
    """A rollout stage, whose plan took so long."""
    begun_s = time.perf_counter()
    answer = await generator.rollout(DRIVER, plan)
    return Sampled(
        answer["outputs"]["tokens"], planning_s + time.perf_counter() - begun_s, planning_s
    )


async def straight(
    bench: Bench,
    engines: Sequence[str],
    groups: Sequence[PlannedGroup],
    http: aiohttp.ClientSession,
) -> Sampled:
    """The same requests, without us."""
    rollout = bench.config.rollout
    turns = itertools.cycle(engines)
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
            url = f"{next(turns)}/generate"
            status, text = await _answer(http, url, orjson.dumps(body))
        if status >= 400:
            raise rejected("bench rollout", url, status, text.decode(errors="replace"))
        return sum(row["meta_info"]["completion_tokens"] for row in orjson.loads(text))

    await _flush(engines)
    begun_s = time.perf_counter()
    tokens = await asyncio.gather(
        *(post(groups[start : start + together]) for start in range(0, len(groups), together))
    )
    return Sampled(sum(tokens), time.perf_counter() - begun_s)


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
