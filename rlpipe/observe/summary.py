"""`summary.json`: the run in figures, for scripts. The page for people is `report`."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from rlpipe.observe.history import REWARD, RunHistory


def summarise(history: RunHistory) -> dict[str, Any]:
    """JSON-able figures; totals stand beside the others under their own names. NaN and infinity
    become null.

    Keys: run, status, iterations, accuracy {dataset: before, after, best, n, curve}, reward {first,
    last, best}, seconds_per_iteration (median), seconds_per_stage {stage: total, median, share},
    train_rollout_logprob_abs_diff {mean, max}, packages, and those of `totals`.
    """
    figures = {
        "run": history.run,
        "status": history.status,
        "iterations": len(history.iterations),
        "accuracy": {dataset: _accuracy(history, dataset) for dataset in history.datasets},
        "reward": _ends(history.series(REWARD)),
        "seconds_per_iteration": history.iteration_seconds,
        "seconds_per_stage": stage_table(history),
        "train_rollout_logprob_abs_diff": _spread(history.logprob_difference()),
        "packages": history.packages,
    }
    return _finite({**figures, **history.totals})


def stage_table(history: RunHistory) -> dict[str, dict[str, float | None]]:
    """Stage → total seconds, median of an iteration (None outside iterations), share of all that
    was timed (0 to 1)."""
    timed = {stage: history.stage_seconds(stage) for stage in history.stages}
    totals = {stage: sum(seconds) for stage, seconds in timed.items()}
    for stage, seconds in history.other_seconds.items():
        totals[stage] = totals.get(stage, 0.0) + seconds
    everything = sum(totals.values()) or 1.0
    return {
        stage: {
            "total": total,
            "median": statistics.median(timed[stage]) if stage in timed else None,
            "share": total / everything,
        }
        for stage, total in totals.items()
    }


def write_summary(history: RunHistory, path: str | Path) -> Path:
    """Write summary.json whole or not at all (a temporary file, then a rename), and return its
    path."""
    path = Path(path)
    text = json.dumps(summarise(history), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return write_whole(path, text)


def write_whole(path: Path, text: str) -> Path:
    """A text file that readers see complete: written beside, then renamed over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)


def _accuracy(history: RunHistory, dataset: str) -> dict[str, Any]:
    curve = history.accuracy(dataset)
    return {
        "before": curve[0].accuracy if curve[0].iteration == 0 else None,
        "after": curve[-1].accuracy,
        "best": max(evaluation.accuracy for evaluation in curve),
        "n": curve[-1].n,
        "curve": [[evaluation.iteration, evaluation.accuracy] for evaluation in curve],
    }


def _ends(series: list[tuple[int, float]]) -> dict[str, float | None]:
    numbers = [value for _, value in series]
    return {
        "first": numbers[0] if numbers else None,
        "last": numbers[-1] if numbers else None,
        "best": max(numbers, default=None),
    }


def _spread(series: list[tuple[int, float]]) -> dict[str, float | None]:
    numbers = [value for _, value in series]
    return {
        "mean": statistics.fmean(numbers) if numbers else None,
        "max": max(numbers, default=None),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
