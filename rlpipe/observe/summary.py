"""`summary.json`: the results of a run for scripts. `run_report` is the page for people.

Entry points: `summarise`, `write_summary`, `stage_table`.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from rlpipe.observe.pages import write_whole
from rlpipe.observe.run_history import REWARD, RunHistory


def summarise(history: RunHistory) -> dict[str, Any]:
    """Return the results as a JSON-able object. NaN and infinity become null.

    Keys: run, status, iterations, accuracy {dataset: measure, before, after, best, n, curve},
    reward {first, last, best}, reward_errors (samples), seconds_per_iteration (median),
    seconds_per_stage {stage: total, median, share}, train_rollout_logprob_abs_diff {mean, max},
    packages, and those of `totals`.
    `measure` is `accuracy` only if all rewards are 0 or 1 and some are 1 (`RunHistory.measure`).
    """
    figures = {
        "run": history.run,
        "status": history.status,
        "iterations": len(history.iterations),
        "accuracy": {dataset: _accuracy(history, dataset) for dataset in history.datasets},
        "reward": _first_last_best(history.series(REWARD)),
        "reward_errors": sum(record.reward_errors for record in history.iterations),
        "seconds_per_iteration": history.iteration_seconds,
        "seconds_per_stage": stage_table(history),
        "train_rollout_logprob_abs_diff": _mean_and_max(history.logprob_difference()),
        "packages": history.packages,
    }
    return _finite({**figures, **history.totals})


def stage_table(history: RunHistory) -> dict[str, dict[str, float | None]]:
    """Return stage → total seconds, median of an iteration, share of all timed seconds (0 to 1).

    The median is None for activities outside iterations.
    """
    timed = {stage: history.stage_seconds(stage) for stage in history.stages}
    totals = {stage: sum(seconds) for stage, seconds in timed.items()}
    for stage, seconds in history.other_seconds.items():
        totals[stage] = totals.get(stage, 0.0) + seconds
    all_seconds = sum(totals.values()) or 1.0
    return {
        stage: {
            "total": total,
            "median": statistics.median(timed[stage]) if stage in timed else None,
            "share": total / all_seconds,
        }
        for stage, total in totals.items()
    }


def write_summary(history: RunHistory, path: str | Path) -> Path:
    """Write summary.json atomically and return its path."""
    path = Path(path)
    text = json.dumps(summarise(history), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return write_whole(path, text)


def _accuracy(history: RunHistory, dataset: str) -> dict[str, Any]:
    curve = history.scores(dataset)
    # A fork counts its iterations from iteration 0 of its parent.
    first = history.iterations[0].iteration if history.iterations else 0
    return {
        "measure": history.measure(dataset),
        "before": curve[0].value if curve[0].iteration == first else None,
        "after": curve[-1].value,
        "best": max(score.value for score in curve),
        "n": curve[-1].n,
        "curve": [[score.iteration, score.value] for score in curve],
    }


def _first_last_best(series: list[tuple[int, float]]) -> dict[str, float | None]:
    numbers = [value for _, value in series]
    return {
        "first": numbers[0] if numbers else None,
        "last": numbers[-1] if numbers else None,
        "best": max(numbers, default=None),
    }


def _mean_and_max(series: list[tuple[int, float]]) -> dict[str, float | None]:
    numbers = [value for _, value in series]
    return {
        "mean": statistics.fmean(numbers) if numbers else None,
        "max": max(numbers, default=None),
    }


def _finite(value: Any) -> Any:
    """Return the value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
