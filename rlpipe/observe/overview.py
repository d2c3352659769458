"""A run on one page of Markdown, for Prefect's UI: is it learning, is it healthy, where did the
time go.

Not here: the page with curves (`report`), or the figures' origin (`run_history`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlpipe.observe.history import REWARD, RunHistory
from rlpipe.observe.summary import stage_table

RECENT = 10
"""Iterations that "now" is the mean of."""
LEARNING = {
    "reward": REWARD,
    "response length": "rollout/response_len/mean",
    "groups without a spread": "rollout/zero_std_fraction",
}
HEALTH = {
    "engine − trainer, largest log-prob difference": "max_logprob_difference",
    "gradient norm": "train/grad_norm",
    "entropy": "train/entropy",
    "clipped tokens": "train/clipfrac",
    "cut-off responses": "rollout/truncated_ratio",
    "reward errors": "rollout/reward_error_ratio",
    "oldest token, in weight versions": "rollout/staleness/max",
}
"""Label → metric; one that a run does not have is left out."""
BAR = 20


def overview(history: RunHistory) -> str:
    """The page. Figures are means over the first and the last ten iterations, and the extremes of
    all."""
    parts = [f"# {history.run}: {history.status}"]
    parts += ["## Is it learning?", *_accuracies(history), *_figures(history, LEARNING)]
    parts += ["## Is it healthy?", *_figures(history, HEALTH)]
    parts += ["## Where did the time go?", *_times(history)]
    return "\n\n".join(parts) + "\n"


def _accuracies(history: RunHistory) -> list[str]:
    rows = []
    for dataset in history.datasets:
        curve = history.accuracy(dataset)
        best = max(curve, key=lambda one: one.accuracy)
        now = f"{curve[-1].accuracy:.3f} after {curve[-1].iteration}"
        rows.append(
            (
                dataset,
                f"{curve[0].accuracy:.3f}",
                now,
                f"{best.accuracy:.3f} after {best.iteration}",
                _trend(curve),
            )
        )
    return (
        [_table(("held-out set", "first", "now", "best", ""), rows)]
        if rows
        else ["No held-out set was measured yet."]
    )


def _trend(curve: Sequence) -> str:
    return sparkline([one.accuracy for one in curve])


def _figures(history: RunHistory, metrics: dict[str, str]) -> list[str]:
    rows = []
    for label, metric in metrics.items():
        values = [value for _, value in history.series(metric) if math.isfinite(value)]
        if values:
            means = (sum(some) / len(some) for some in (values[:RECENT], values[-RECENT:]))
            extremes = f"{min(values):.4g} to {max(values):.4g}"
            rows.append((label, *(f"{mean:.4g}" for mean in means), extremes, sparkline(values)))
    return (
        [_table(("", "first", "now", "range", ""), rows)]
        if rows
        else ["No iteration is committed yet."]
    )


def _times(history: RunHistory) -> list[str]:
    rows = []
    for stage, spent in sorted(
        stage_table(history).items(), key=lambda item: -(item[1]["total"] or 0)
    ):
        total = spent["total"] or 0.0
        share = spent["share"] or 0.0
        median = spent["median"]
        bar = "█" * round(BAR * share)
        rows.append(
            (
                stage,
                f"{total:.1f}",
                "" if median is None else f"{median:.2f}",
                f"{100 * share:.0f} % {bar}",
            )
        )
    found = [_table(("stage", "seconds", "median of an iteration", "share"), rows)]
    overhead = history.totals.get("orchestration_s_per_iteration")
    return found + (
        [f"Between stages: {overhead:.2f} s an iteration."] if overhead is not None else []
    )


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The values, in order, as so many small bars at the most; each the mean of its part."""
    if not values:
        return ""
    count = min(width, len(values))
    parts = [
        values[n * len(values) // count : (n + 1) * len(values) // count] for n in range(count)
    ]
    means = [sum(part) / len(part) for part in parts]
    low = min(means)
    spread = max(means) - min(means)
    level: Callable[[float], int] = lambda mean: round(7 * (mean - low) / spread) if spread else 3  # noqa: E731
    return "".join("▁▂▃▄▅▆▇█"[level(mean)] for mean in means)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
