"""Score the samples of one rollout and return one `RewardRow` a sample.

`score` calls the reward function with deadlines and retries. `open_workers` starts the workers that
run it. A failed call sets `error` in its rows and leaves `reward` None, unless `on_error` gives a
value. An error never becomes a silent 0.
"""

from __future__ import annotations

import asyncio
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlpipe.config.data import (
    EvalDataset,
    MathReward,
    NoReward,
    RewardConfig,
    RewardFunction,
    RowReward,
    RuleReward,
)
from rlpipe.errors import DeadlineExceeded, RewardError, one_line
from rlpipe.observe.pass_rates import pass_rate_metrics, training_threshold
from rlpipe.rewards.scorer import Scorer
from rlpipe.rewards.user_rewards import takes_a_group
from rlpipe.rewards.workers import LoopWorker, Outcome, ProcessWorker, ThreadWorker, Worker
from rlpipe.types import Sample, Status

MAX_ASYNC_CALLS = 64
"""Concurrent calls of an async function with `reward.workers: 0`."""

EXCERPT_CHARS = 150
"""Characters at the beginning and at the end of a text that an error shows."""

FAILED_PROMPTS = 20
"""Prompts with errors of the reward function that a reward node names."""

_ADVICE = (
    "correct the reward function, or before the first iteration is committed the keys of `reward`, "
    "and start the run again; it scores the stored samples"
)
_GROUP_ADVICE = (
    "if the function takes all samples of a group, set reward.function.group=true; else correct "
    "it; then start the run again, which scores the stored samples. After the first iteration, a "
    "changed key needs another run: --fork RUN@K --run NEW"
)
SCORED = (Status.COMPLETED, Status.TRUNCATED)
"""Statuses of samples that are scored."""

Call = list[tuple[int, Sample]]
"""One call of the reward function: (row number, sample) for each sample."""

Progress = Callable[[int, int], None]
"""(finished rows, all rows to score)."""

StartWorker = Callable[[RewardFunction, Namespace | None], Worker]
"""Makes a worker that runs a function in a process."""


@dataclass(slots=True)
class RewardRow:
    """The reward of one sample.

    `reward` None: not scored. `error` then has the reason, or is None if the sample needs no score.
    """

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
    process: StartWorker = ProcessWorker,
) -> list[RewardRow]:
    """Return one row per sample, in the same order.

    Only completed and truncated samples without a reward are scored. With `function.group`, one
    call gets all of these samples of a group. `args` are for functions with slime's signature.
    `workers` come from `open_workers` and serve one call of `score` at a time; None: open workers
    for this call, with `process`.

    With `workers: 0` an async function runs on this event loop (up to 64 calls at once), and a
    plain function in a thread of this process. Mathematical comparison always runs in a process,
    because only the end of the process stops a hanging comparison.

    Raises: RewardError if more than `max_error_fraction` of the scored rows have an error;
    DeadlineExceeded after `timeout_s`; ConfigError if the function cannot be loaded.
    """
    rows = [_initial_row(sample) for sample in samples]
    calls = [] if isinstance(config.function, NoReward) else _calls(samples, config)
    if not calls:
        return rows
    run = _ScoringRun(rows, config, total=sum(map(len, calls)), progress=progress)
    if progress is not None:
        progress(0, run.total)
    try:
        async with asyncio.timeout(config.timeout_s):
            if workers is not None:
                await run.score_all(calls, workers)
            else:
                async with open_workers(config, args, len(calls), process) as opened:
                    await run.score_all(calls, opened)
    except TimeoutError as error:
        raise DeadlineExceeded(
            "the reward stage took too long",
            where="reward",
            found=f"{run.done} of {run.total} rows scored",
            expected=f"all within {config.timeout_s} s (reward.timeout_s)",
        ) from error
    _check_errors([(rows[position], sample) for call in calls for position, sample in call], config)
    return rows


def reward_outputs(
    rows: Sequence[RewardRow], samples: Sequence[Sample], datasets: Sequence[EvalDataset]
) -> dict[str, Any]:
    """Return the outputs of a reward node: numbers of scored rows and errors, mean reward, metrics.

    The mean is absent if no row was scored. With errors, `failed` has the prompts with most of
    them and the last error. `samples`: those of the rows. `datasets`: held-out sets, as
    `training_threshold`.
    """
    rewards = [row.reward for row in rows if row.reward is not None]
    errors = sum(row.error is not None for row in rows)
    outputs: dict[str, Any] = {"scored": len(rewards), "errors": errors}
    if errors:
        outputs["failed"] = _failed(rows, samples)
    outputs["metrics"] = {
        "rollout/reward_error_ratio": errors / max(1, len(rows)),
        **pass_rate_metrics(
            [row.group_id for row in rows],
            [row.reward for row in rows],
            training_threshold(datasets),
        ),
    }
    return {**outputs, "mean": statistics.fmean(rewards)} if rewards else outputs


def _failed(rows: Sequence[RewardRow], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return prompt → number of errors for the most frequent ones, and the last error."""
    prompts = {sample.group_id: sample.prompt for sample in samples}
    failed = [row for row in rows if row.error is not None]
    counts = Counter(_excerpt(prompts.get(row.group_id)) for row in failed)
    return {
        "prompts": dict(counts.most_common(FAILED_PROMPTS)),
        "last_error": one_line(str(failed[-1].error)),
    }


def waits_for(config: RewardConfig) -> str:
    """Return the name of the reward function and the deadline of its calls, for the terminal."""
    return (
        f"{_name(config.function)}; each call has {config.sample_timeout_s:g} s "
        "(reward.sample_timeout_s)"
    )


def error_note(
    rows: Sequence[RewardRow], samples: Sequence[Sample], config: RewardConfig
) -> str | None:
    """Return a line about the errors of a rollout's rewards, with the first; None without errors.

    `samples`: those of the rows.
    """
    failed = [(row, sample) for row, sample in zip(rows, samples, strict=True) if row.error]
    if not failed:
        return None
    row, sample = failed[0]
    groups = len({row.group_id for row, _ in failed})
    handled = (
        f"their {groups} groups are left out"
        if config.on_error == "exclude_group"
        else f"their reward is {config.on_error:g}"
    )
    return (
        f"{_name(config.function)} failed for {len(failed)} of {len(rows)} samples, and {handled} "
        f"(reward.on_error): {one_line(str(row.error))}; sample {row.index} of {row.group_id}, "
        f"response {_excerpt(sample.response)}"
    )


def _initial_row(sample: Sample) -> RewardRow:
    """Return a row with the reward that the generate function set, if any. It is final."""
    return RewardRow(sample.group_id, sample.index, sample.reward, dict(sample.reward_parts))


def _calls(samples: Sequence[Sample], config: RewardConfig) -> list[Call]:
    unscored = [
        (position, sample)
        for position, sample in enumerate(samples)
        if sample.reward is None and sample.status in SCORED
    ]
    if not getattr(config.function, "group", False):
        return [[item] for item in unscored]
    groups: dict[str, Call] = {}
    for position, sample in unscored:
        groups.setdefault(sample.group_id, []).append((position, sample))
    return list(groups.values())


@asynccontextmanager
async def open_workers(
    config: RewardConfig,
    args: Namespace | None = None,
    max_workers: int = MAX_ASYNC_CALLS,
    process: StartWorker = ProcessWorker,
) -> AsyncIterator[list[Worker]]:
    """Yield at most `max_workers` workers of a reward function, and stop them at the end.

    Successive calls of `score` can share them. `process` makes the workers with a process. Raises:
    ConfigError.
    """
    function = config.function
    assert not isinstance(function, NoReward)
    # A hanging comparison can only be stopped by killing its process.
    num_processes = max(1, config.workers) if _can_hang(function) else config.workers
    workers: list[Worker]
    if num_processes:
        workers = [process(function, args) for _ in range(min(num_processes, max_workers))]
    else:
        scorer = Scorer(function, args)
        if scorer.is_async:
            workers = [LoopWorker(scorer) for _ in range(min(MAX_ASYNC_CALLS, max_workers))]
        else:
            workers = [ThreadWorker(scorer)]
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


def _can_hang(function: RewardFunction) -> bool:
    """True if the function compares mathematics, which never ends for some pairs of numbers."""
    return isinstance(function, MathReward | RowReward) or (
        isinstance(function, RuleReward) and function.type == "deepscaler"
    )


@dataclass(slots=True)
class _ScoringRun:
    """The rows of one call of `score`, filled by concurrent tasks."""

    rows: list[RewardRow]
    config: RewardConfig
    total: int
    progress: Progress | None
    done: int = 0

    async def score_all(self, calls: list[Call], workers: list[Worker]) -> None:
        # All tasks share one iterator: each worker takes the next call when it is free.
        queue = iter(calls)
        tasks = [asyncio.create_task(self._serve(queue, worker)) for worker in workers]
        try:
            await asyncio.gather(*tasks)
        finally:
            # Workers must be idle before the caller stops or reuses them.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, calls: Iterator[Call], worker: Worker) -> None:
        while batch := list(islice(calls, worker.at_once)):
            for call, outcome in zip(batch, await self._attempt(batch, worker), strict=True):
                self._fill(call, outcome)
                self.done += len(call)
            if self.progress is not None:
                self.progress(self.done, self.total)

    async def _attempt(self, batch: list[Call], worker: Worker) -> list[Outcome]:
        """Return the outcome of each call, after all attempts if it failed."""
        calls = [[sample for _, sample in call] for call in batch]
        outcomes = list(await worker.call(calls, self.config.sample_timeout_s))
        for _ in range(self.config.attempts - 1):
            failed = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
            again = [calls[number] for number in failed]
            repeated = await worker.call(again, self.config.sample_timeout_s) if again else []
            for number, outcome in zip(failed, repeated, strict=True):
                outcomes[number] = outcome
        return outcomes

    def _fill(self, call: Call, outcome: Outcome) -> None:
        on_error = self.config.on_error
        for number, (position, _) in enumerate(call):
            row = self.rows[position]
            if isinstance(outcome, Exception):
                row.error = str(outcome)
                row.reward = None if on_error == "exclude_group" else float(on_error)
            else:
                row.reward = outcome[number].reward
                row.parts = dict(outcome[number].parts)


def _check_errors(scored: list[tuple[RewardRow, Sample]], config: RewardConfig) -> None:
    failed = [(row, sample) for row, sample in scored if row.error is not None]
    if len(failed) > config.max_error_fraction * len(scored):
        row, sample = failed[0]
        raise RewardError(
            f"{_name(config.function)} failed for {len(failed)} of {len(scored)} samples",
            where="reward",
            found=f"{one_line(row.error or '')}\n"
            f"    in sample {row.index} of group {row.group_id}\n"
            f"    prompt {_excerpt(sample.prompt)}\n"
            f"    response {_excerpt(sample.response)}\n"
            f"    label {_excerpt(sample.label)}",
            expected=f"errors in at most {config.max_error_fraction:.0%} of the samples "
            "(reward.max_error_fraction)",
            do=_GROUP_ADVICE if takes_a_group(config.function) else _ADVICE,
        )


def _name(function: RewardFunction) -> str:
    path = getattr(function, "path", None)
    return f"the reward function {path}" if path else f"the reward {function.type!r}"


def _excerpt(value: object) -> str:
    """Return a value as text with its first and last characters."""
    text = repr(value)
    if len(text) <= 2 * EXCERPT_CHARS:
        return text
    return f"{text[:EXCERPT_CHARS]} ... {text[-EXCERPT_CHARS:]}"
