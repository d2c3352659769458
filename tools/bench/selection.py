"""`python -m tools.bench.selection`: batches of planned groups, and of those that finish first.

Rollouts of `rlpipe.rollout` sample from a simulated engine through HTTP, with the lengths of
reasoning models (log-normal, cut off at the longest). A simulated trainer takes time in proportion
to the tokens of the batch. Iterations start and commit in the order of `tasks.ordering`. Lengths,
speeds and times are scaled down, so the table is about ratios, not about an engine.

| column       | meaning                                                               |
|--------------|-----------------------------------------------------------------------|
| samples/s    | trained samples, after the first iterations                           |
| ratio        | to the first row                                                      |
| engine       | tokens a second, as a share of the most that the engine can sample    |
| trainer      | share of the time in which it trains                                  |
| stale tokens | share of the sampled tokens that were dropped as too old              |
| staleness    | mean over the trained tokens                                          |
| length       | mean of the trained responses, as a share of the mean of all          |

A length below 1 shows that long responses are dropped. Writes `{home}/selection.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.data.source import DataSource
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.filters import Rejection
from rlpipe.rollout.generate import SingleTurn, sampling_params
from rlpipe.rollout.group_selection import GroupJudge
from rlpipe.rollout.planner import Planner
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import PlanPart, StoredRows
from rlpipe.rollout.rollout_settings import RolloutSettings
from rlpipe.rollout.sampler import run_rollout
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import DataState, Sample
from tasks.ordering import commit_before_sampling
from tools.bench.simulated_engine import SimulatedEngine

SIGMA = math.log(8) / 2.326
"""Of the logarithm of the length: the 99th percentile is 8 medians, as 1k and 8k tokens."""
LONGEST = 8
"""Longest response, in medians."""
NUM_PROMPTS = 100_000


@dataclass(frozen=True)
class Workload:
    """Sizes of the simulation."""

    batch: int
    group: int
    median: int
    """Median length of a response in tokens."""
    speed: float
    """Tokens a second of a single request."""
    knee: float
    """Number of requests at which a request has half of this speed."""
    trainer: float
    """Tokens a second of the trainer, as a share of the most that the engine can sample."""
    rejects: float = 0.0
    """Share of the groups that a filter rejects."""

    def length(self, prompt: int, index: int) -> int:
        """Return the length of a response. The same draw has it in every run."""
        normal = random.Random(f"{prompt}/{index}").gauss(0.0, SIGMA)
        return max(1, min(LONGEST * self.median, round(self.median * math.exp(normal))))


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    s: int
    pool: float | None
    """Groups in flight in batches, with `first_finished`; None: `planned`."""

    @property
    def name(self) -> str:
        chosen = "planned" if self.pool is None else f"first_finished, pool {self.pool:g}"
        return f"S = {self.s}, {chosen}"


class Run:
    """The iterations of one case."""

    def __init__(self, work: Workload, case: Case, folder: str) -> None:
        self.work = work
        self.case = case
        self.files = Files(folder)
        pooled = case.pool is not None
        self.config = RolloutConfig(
            rollout_batch_size=work.batch,
            n_samples_per_prompt=work.group,
            rollout_max_response_len=LONGEST * work.median,
            selection="first_finished" if pooled else "planned",
            pool_size=round(case.pool * work.batch) if case.pool is not None else None,
            dynamic_sampling_filter_path="simulated" if work.rejects else None,
            partial_rollout=True,
        )
        rows = [PromptRow(str(number), None, {}, str(number)) for number in range(NUM_PROMPTS)]
        source = DataSource(
            rows,
            _Numbers(),  # type: ignore[arg-type]
            DataConfig(prompts=FilePrompts(type="file", paths=("none",)), rollout_shuffle=False),
            self.config,
            "run",
            async_buffer_size=case.s,
        )
        self.planner = Planner(source, self.config, self.files)
        self.engine = SimulatedEngine(work.length, speed=work.speed, knee=work.knee)
        self.pool = Pool(self.config.groups_in_pool(case.s)) if pooled else None
        self.slots = asyncio.Semaphore(10**6)
        self.judge = GroupJudge(self._keep if work.rejects else None)
        self.committed: dict[int, asyncio.Event] = {}
        self.states: dict[int, asyncio.Future[DataState]] = {}
        self.batches: list[dict[str, Any]] = []

    async def measure(self, iterations: int, warmup: int) -> dict[str, Any]:
        """Run the iterations; return the figures of those after the first ones."""
        loop = asyncio.get_running_loop()
        self.committed = {k: asyncio.Event() for k in range(iterations)}
        self.states = {k: loop.create_future() for k in range(iterations + 1)}
        self.states[0].set_result(DataState())
        async with (
            self.engine.serving() as url,
            GenerateClient(
                url,
                vocab_size=2 * NUM_PROMPTS,
                deadline_s=600.0,
                samples_per_request=1,
                max_connections=10**5,
            ) as client,
        ):
            self.client = client
            async with asyncio.TaskGroup() as tasks:
                for k in range(iterations):
                    tasks.create_task(self._iterate(k))
            if self.pool is not None:
                await self.pool.close()
        return self._figures(self.batches[warmup - 1], self.batches[warmup:])

    async def _iterate(self, k: int) -> None:
        ahead = self.case.s if self.pool is None else 1  # as `tasks.ordering.most_ahead`
        await self._until_committed(commit_before_sampling(k, ahead, 1))
        part = await asyncio.to_thread(self.planner.part, k, await self.states[k], 0)
        if self.config.static:
            self.states[k + 1].set_result(part.plan.after)
        if self.pool is not None:
            await self.pool.stop_writing()
        rows = StoredRows(self.files)
        result = await self._sample(part, rows)
        if not self.config.static:
            if self.pool is not None:
                self.pool.leave(result, StoredRows(self.files), 0.5)
            self.states[k + 1].set_result(result.after)
        await self._until_committed(k - 1)
        samples = table_to_samples(await asyncio.to_thread(read_rows, self.files, rows.files))
        batch = [sample for sample in samples if sample.group_id in set(result.accepted)]
        tokens = sum(len(sample.response_ids) for sample in batch)
        train_s = tokens / (self.work.trainer * self.engine.speed * self.engine.knee)
        await asyncio.sleep(train_s)
        self.engine.publish(k + 1)
        stale = {group_id for group_id, reason in result.dropped.items() if reason == "stale"}
        self.batches.append(
            {
                "at_s": time.perf_counter(),
                "sampled": self.engine.tokens,
                "train_s": train_s,
                "samples": len(batch),
                "tokens": tokens,
                "stale": sum(len(one.response_ids) for one in samples if one.group_id in stale),
                "age": sum(
                    count * (k - version) for one in batch for count, version in one.weight_versions
                ),
            }
        )
        self.committed[k].set()

    async def _sample(self, part: PlanPart, rows: StoredRows) -> RolloutResult:
        stop = asyncio.Event()
        generate = SingleTurn(
            self.client,
            sampling_params(self.config),
            decode=lambda ids: "",
            context_len=10**6,
            stop=stop,
        )
        oldest_version = None
        if self.pool is not None:
            self.pool.retain({group.group_id for group in part.plan.groups})
            oldest_version = part.plan.iteration - self.case.s
        return await run_rollout(
            [part],
            RolloutSettings(
                batch_size=self.work.batch,
                static=self.config.static,
                in_order=False,
                partial=self.pool is None,
                max_rounds=20,
                timeout_s=600.0,
                flush_interval_s=0.5,
                oldest_version=oldest_version,
            ),
            generate,
            rows,
            judge=self.judge,
            slots=self.slots,
            pool=self.pool,
            next_part=None if self.config.static else self.planner.following,
            cut_off=partial(self.client.cut_off, stop) if self.pool is None else None,
        )

    def _keep(self, samples: Sequence[Sample]) -> Rejection | None:
        kept = random.Random(samples[0].group_id).random() >= self.work.rejects
        return None if kept else Rejection("rejected")

    async def _until_committed(self, k: int) -> None:
        if k >= 0:
            await self.committed[k].wait()

    def _figures(self, first: dict[str, Any], batches: list[dict[str, Any]]) -> dict[str, Any]:
        seconds = batches[-1]["at_s"] - first["at_s"]
        sampled = batches[-1]["sampled"] - first["sampled"]
        total = {
            key: sum(batch[key] for batch in batches)
            for key in ("train_s", "samples", "tokens", "stale", "age")
        }
        expected = [
            self.work.length(prompt, 0) for prompt in range(NUM_PROMPTS, NUM_PROMPTS + 5000)
        ]
        return {
            "samples_per_s": total["samples"] / seconds,
            "engine": sampled / seconds / (self.work.speed * self.work.knee),
            "trainer": total["train_s"] / seconds,
            "stale_tokens": total["stale"] / max(1.0, sampled),
            "staleness": total["age"] / total["tokens"],
            "length": total["tokens"] / total["samples"] * len(expected) / sum(expected),
        }


class _Numbers:
    """A tokenizer: the text of a prompt is its number."""

    eos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(text)]


def main() -> int:
    """Measure the cases one after another and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.selection", description=__doc__)
    parser.add_argument("--s", type=int, nargs="+", default=[1, 2], help="async_buffer_size")
    parser.add_argument(
        "--pool", type=float, nargs="+", default=[1.0, 1.5, 2.0], help="pool_size in batches"
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=6, help="first iterations that do not count")
    parser.add_argument("--batch", type=int, default=32, help="groups of a batch")
    parser.add_argument("--group", type=int, default=8, help="samples of a group")
    parser.add_argument("--median", type=int, default=32, help="median length in tokens")
    parser.add_argument("--speed", type=float, default=100.0, help="tokens/s of one request")
    parser.add_argument("--knee", type=float, default=128.0, help="requests that halve the speed")
    parser.add_argument("--trainer", type=float, default=1.0, help="speed of the trainer")
    parser.add_argument("--home", default="runs/bench", help="folder of selection.json")
    parser.add_argument("--rejects", type=float, default=0.0, help="share that a filter rejects")
    given = parser.parse_args()
    work = Workload(
        given.batch,
        given.group,
        given.median,
        given.speed,
        given.knee,
        given.trainer,
        given.rejects,
    )
    cases = [Case(s, pool) for s in given.s for pool in (None, *given.pool)]
    found = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="rl-") as folder:
            figures = asyncio.run(Run(work, case, folder).measure(given.iterations, given.warmup))
        found.append({"case": case.name, **asdict(case), **figures})
        found[-1]["ratio"] = figures["samples_per_s"] / found[0]["samples_per_s"]
        print(row(found[-1]), flush=True)
    home = Path(given.home)
    home.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"work": asdict(work), "rows": found}, indent=1)
    (home / "selection.json").write_text(text)
    return 0


def row(figures: dict[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"{figures['case']:32} {figures['samples_per_s']:7.1f} samples/s  "
        f"ratio {figures['ratio']:.2f}  engine {figures['engine']:.0%}  "
        f"trainer {figures['trainer']:.0%}  stale tokens {figures['stale_tokens']:.1%}  "
        f"staleness {figures['staleness']:.2f}  length {figures['length']:.2f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
