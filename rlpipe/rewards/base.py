"""Scores the samples of one rollout: calls, deadlines, retries, workers, and what an error means.

An error never becomes a reward unless `on_error` says which: it is the `error` of its row, whose
reward stays None.

Not here: reading or writing rows (`store`), leaving groups out of a batch (the advantage stage),
the verifiers themselves.
"""

from __future__ import annotations

import asyncio
import statistics
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.data import (
    MathReward,
    NoReward,
    RewardConfig,
    RewardFunction,
    RowReward,
    RuleReward,
)
from rlpipe.errors import DeadlineExceeded, RewardError
from rlpipe.rewards.python import Score, Scorer
from rlpipe.rewards.workers import LoopWorker, ProcessWorker, ThreadWorker, Worker
from rlpipe.types import Sample, Status

ASYNC_CALLS = 64
SCORED = (Status.COMPLETED, Status.TRUNCATED)

Call = list[tuple[int, Sample]]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class RewardRow:
    """The reward of one sample. `reward` None: not scored (see `error`; both None: there was
    nothing to score)."""

    group_id: str
    index: int
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None


async def score(
    samples: Sequence[Sample],
    config: RewardConfig,
    *,
    args: Namespace | None = None,
    progress: Progress | None = None,
    workers: list[Worker] | None = None,
) -> list[RewardRow]:
    """One row for each sample, in the order given. `args` are for functions in slime's form.
    `workers`: those of `open_workers` that are used, by one call of `score` at a time; None: own
    ones.

    Only samples that are completed or truncated are scored; with `function.group`, a group's call
    gets those of its samples. `workers: 0` runs an async function on this event loop (up to 64
    calls at once) and a plain one in a thread of this process; what compares as mathematics always
    gets a process, because nothing else can end it when it hangs. `progress(done, total)` is called
    with numbers of rows.

    Raises: RewardError if more than `max_error_fraction` of the scored rows have an error;
    DeadlineExceeded after `timeout_s`; ConfigError if the function cannot be loaded.
    """
    rows = [_given(sample) for sample in samples]
    calls = [] if isinstance(config.function, NoReward) else _calls(samples, config)
    if not calls:
        return rows
    run = _Run(rows, config, total=sum(map(len, calls)), progress=progress)
    try:
        async with asyncio.timeout(config.timeout_s):
            if workers is not None:
                await run.all(calls, workers)
            else:
                async with open_workers(config, args, len(calls)) as own:
                    await run.all(calls, own)
    except TimeoutError as error:
        raise DeadlineExceeded(
            "the reward stage took too long",
            where="reward",
            found=f"{run.done} of {run.total} rows scored",
            expected=f"all within {config.timeout_s} s (reward.timeout_s)",
        ) from error
    _check_errors([rows[position] for call in calls for position, _ in call], config)
    return rows


def reward_outputs(rows: Sequence[RewardRow]) -> dict[str, Any]:
    """What a reward node says about its rows: how many were scored, errors, the mean reward (absent
    if nothing was scored)."""
    scored = [row.reward for row in rows if row.reward is not None]
    errors = sum(row.error is not None for row in rows)
    outputs: dict[str, Any] = {"scored": len(scored), "errors": errors}
    outputs["metrics"] = {"rollout/reward_error_ratio": errors / max(1, len(rows))}
    return {**outputs, "mean": statistics.fmean(scored)} if scored else outputs


def _given(sample: Sample) -> RewardRow:
    """A row with the reward that the sample comes with, if its generate function gave it one: that
    stands."""
    return RewardRow(sample.group_id, sample.index, sample.reward, dict(sample.reward_parts))


def _calls(samples: Sequence[Sample], config: RewardConfig) -> list[Call]:
    wanted = [
        (position, sample) for position, sample in enumerate(samples) if sample.reward is None
    ]
    scored = [(position, sample) for position, sample in wanted if sample.status in SCORED]
    if not getattr(config.function, "group", False):
        return [[item] for item in scored]
    groups: dict[str, Call] = {}
    for position, sample in scored:
        groups.setdefault(sample.group_id, []).append((position, sample))
    return list(groups.values())


@asynccontextmanager
async def open_workers(
    config: RewardConfig, args: Namespace | None = None, most: int = ASYNC_CALLS
) -> AsyncIterator[list[Worker]]:
    """At most so many workers of a reward function, for one stage or for one after another. Raises:
    ConfigError."""
    function = config.function
    assert not isinstance(function, NoReward)
    num_processes = max(1, config.workers) if _may_hang(function) else config.workers
    workers: list[Worker]
    if num_processes:
        workers = [ProcessWorker(function, args) for _ in range(min(num_processes, most))]
    else:
        scorer = Scorer(function, args)
        workers = (
            [LoopWorker(scorer) for _ in range(min(ASYNC_CALLS, most))]
            if scorer.is_async
            else [ThreadWorker(scorer)]
        )
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


def _may_hang(function: RewardFunction) -> bool:
    """Does it compare as mathematics, which on the wrong numbers takes for ever?"""
    return isinstance(function, MathReward | RowReward) or (
        isinstance(function, RuleReward) and function.type == "deepscaler"
    )


@dataclass(slots=True)
class _Run:
    """The rows of one `score` call while they are being filled."""

    rows: list[RewardRow]
    config: RewardConfig
    total: int
    progress: Progress | None
    done: int = 0

    async def all(self, calls: list[Call], workers: list[Worker]) -> None:
        queue = iter(calls)
        tasks = [asyncio.create_task(self._serve(queue, worker)) for worker in workers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, calls: Iterator[Call], worker: Worker) -> None:
        for call in calls:
            self._fill(call, await self._attempt([sample for _, sample in call], worker))
            self.done += len(call)
            if self.progress is not None:
                self.progress(self.done, self.total)

    async def _attempt(self, samples: list[Sample], worker: Worker) -> list[Score] | str:
        error: Exception | None = None
        for _ in range(self.config.attempts):
            try:
                return await worker.call(samples, self.config.sample_timeout_s)
            except (RewardError, DeadlineExceeded) as failed:
                error = failed
        return str(error)

    def _fill(self, call: Call, answer: list[Score] | str) -> None:
        for number, (position, _) in enumerate(call):
            row = self.rows[position]
            if isinstance(answer, str):
                row.error = answer
                row.reward = (
                    None if self.config.on_error == "exclude_group" else float(self.config.on_error)
                )
            else:
                row.reward, row.parts = answer[number].reward, dict(answer[number].parts)


def _check_errors(rows: list[RewardRow], config: RewardConfig) -> None:
    failed = [row for row in rows if row.error is not None]
    if len(failed) > config.max_error_fraction * len(rows):
        raise RewardError(
            "too many rows could not be scored",
            where=f"reward/{failed[0].group_id}/{failed[0].index}",
            found=f"{len(failed)} of {len(rows)}; the first: {failed[0].error}",
            expected=f"at most {config.max_error_fraction:.0%} (reward.max_error_fraction)",
        )
