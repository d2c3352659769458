"""Summarise a run on one page of Markdown for Prefect's UI: learning, health, time.

Entry point: `overview`. `run_report` is the HTML page with curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rlpipe.observe.pages import REPORT_PAGE, SAMPLES_PAGE
from rlpipe.observe.run_history import REWARD, RunHistory
from rlpipe.observe.summary import stage_table

RECENT = 10
"""Number of iterations in the means "first" and "now"."""
LEARNING = {
    "reward": REWARD,
    "response length": "rollout/response_len/mean",
    "groups without a spread": "rollout/zero_std_fraction",
    "prompts that no sample solves": "rollout/pass_rate/0",
    "prompts that some samples solve": "rollout/pass_rate/between",
    "prompts that all samples solve": "rollout/pass_rate/100",
}
HEALTH = {
    "engine − trainer, largest log-prob difference": "max_logprob_difference",
    "gradient norm": "train/grad_norm",
    "entropy": "train/entropy",
    "clipped tokens": "train/clipfrac",
    "cut-off responses": "rollout/truncated_ratio",
    "repeated 4-grams of tokens": "rollout/repetition_ratio",
    "reward errors": "rollout/reward_error_ratio",
    "oldest token, in weight versions": "rollout/staleness/max",
}
SPEED = {
    "MFU of optimizer steps": "perf/train_mfu",
    "MFU of scoring": "perf/scoring_mfu",
    "MFU of sampling": "perf/rollout_mfu",
    "TFLOP/s of optimizer steps": "perf/train_tflops",
    "TFLOP/s of scoring": "perf/scoring_tflops",
    "TFLOP/s of sampling": "perf/rollout_tflops",
    "GPU use in optimizer steps": "perf/train_gpu_utilization",
    "GPU use in sampling": "perf/rollout_gpu_utilization",
    "prompt tokens in the engines' cache": "engine/prefix_cache_hit_rate",
    "running requests of an engine": "engine/running_requests",
    "queued requests of an engine": "engine/queued_requests",
    "accepted tokens of a speculative step": "engine/spec_accept_length",
}
"""Label → metric; metrics that a run does not have are omitted."""
BAR_LENGTH = 20
"""Characters of a bar of 100 %."""


def overview(history: RunHistory, folder: Path | None = None) -> str:
    """Return the page, with means of the first and last ten iterations and extremes of all.

    `folder`: the run's folder, which has the HTML pages. Prefect's pages cannot link to files.
    """
    parts = [f"# {history.run}: {history.status}"]
    parts += ["## Is it learning?", *_scores(history), *_figures(history, LEARNING)]
    parts += ["## Is it healthy?", *_figures(history, HEALTH)]
    parts += ["## Where did the time go?", *_times(history)]
    if speed := _rows(history, SPEED):
        parts.append(_table(("", "first", "now", "range", ""), speed))
    if folder is not None:
        pages = [REPORT_PAGE, *(name for name in history.links.values() if name == SAMPLES_PAGE)]
        parts += ["## Pages", *(f"- `{folder / name}`" for name in pages)]
    return "\n\n".join(parts) + "\n"


def _scores(history: RunHistory) -> list[str]:
    rows = []
    for dataset in history.datasets:
        curve = history.scores(dataset)
        best = max(curve, key=lambda score: score.value)
        rows.append(
            (
                dataset,
                history.measure(dataset),
                f"{curve[0].value:.3f}",
                f"{curve[-1].value:.3f} after {curve[-1].iteration}",
                f"{best.value:.3f} after {best.iteration}",
                sparkline([score.value for score in curve]),
            )
        )
    if not rows:
        return ["No held-out set was measured yet."]
    return [_table(("held-out set", "measure", "first", "now", "best", ""), rows)]


def _figures(history: RunHistory, metrics: dict[str, str]) -> list[str]:
    rows = _rows(history, metrics)
    if not rows:
        return ["No iteration is committed yet."]
    return [_table(("", "first", "now", "range", ""), rows)]


def _rows(history: RunHistory, metrics: dict[str, str]) -> list[tuple[str, ...]]:
    rows = []
    for label, metric in metrics.items():
        values = [value for _, value in history.series(metric) if math.isfinite(value)]
        if values:
            ends = (values[:RECENT], values[-RECENT:])
            means = (sum(part) / len(part) for part in ends)
            extremes = f"{min(values):.4g} to {max(values):.4g}"
            rows.append((label, *(f"{mean:.4g}" for mean in means), extremes, sparkline(values)))
    return rows


def _times(history: RunHistory) -> list[str]:
    rows = []
    stages = sorted(stage_table(history).items(), key=lambda item: -(item[1]["total"] or 0))
    for stage, times in stages:
        total = times["total"] or 0.0
        share = times["share"] or 0.0
        median = "" if times["median"] is None else f"{times['median']:.2f}"
        bar = "█" * round(BAR_LENGTH * share)
        rows.append((stage, f"{total:.1f}", median, f"{100 * share:.0f} % {bar}"))
    parts = [_table(("stage", "seconds", "median of an iteration", "share"), rows)]
    overhead = history.totals.get("orchestration_s_per_iteration")
    if overhead is not None:
        parts.append(f"Between stages: {overhead:.2f} s an iteration.")
    return parts


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Return the values as at most `width` small bars; each bar is the mean of its part."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [n * len(values) // count for n in range(count + 1)]
    parts = [values[start:stop] for start, stop in pairwise(bounds)]
    means = [sum(part) / len(part) for part in parts]
    low = min(means)
    spread = max(means) - low
    # A constant series is drawn at middle height.
    levels = [round(7 * (mean - low) / spread) if spread else 3 for mean in means]
    return "".join("▁▂▃▄▅▆▇█"[level] for level in levels)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
