"""Curves of the report of a run: training, engines and GPUs.

A chart without data is omitted. A dashed line marks each iteration that begins with another reward.
Entry points: `training`, `machines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from rlpipe.observe.charts import FEW_POINTS, Series, line_chart, stacked_chart
from rlpipe.observe.pass_rates import PARTS
from rlpipe.observe.pass_rates import PASS_RATE as PASS_RATES
from rlpipe.observe.run_history import PAIR_ACCURACY, PAIR_MARGIN, REWARD, SHARES, RunHistory, Score

KL = "train/kl_loss"
LOSS = "train/loss"
LENGTHS = {
    "median": "rollout/response_len/p50",
    "90%": "rollout/response_len/p90",
    "99%": "rollout/response_len/p99",
    "longest": "rollout/response_len/max",
}
"""Name of a curve → metric. 99% of the responses are at most as long as the curve `99%`."""
LENGTH_MEAN = "rollout/response_len/mean"
WORK = {"optimizer steps": "train", "scoring": "scoring", "sampling": "rollout"}
"""Name of a curve → work in the names of `perf/` metrics."""
GIB = 2**30
REWARD_ERRORS = "rollout/reward_error_ratio"
ROUNDING = 1e-5
"""Losses below come from rounding in float32."""
CURVES = (
    (PAIR_ACCURACY, "Pairs in order", "share of pairs with the higher reward for the chosen one"),
    (PAIR_MARGIN, "Margin of pairs", "reward of the chosen less the rejected, mean"),
    ("rollout/truncated_ratio", "Truncated", "share of responses that hit the length limit"),
    (
        "rollout/zero_std_fraction",
        "Groups without a signal",
        "share of groups with equal rewards: they train nothing",
    ),
    (
        "rollout/repetition_ratio",
        "Repetition",
        "share of a response's 4-grams of tokens that occurred before, mean",
    ),
    (REWARD_ERRORS, "Failed rewards", "share of samples whose reward function failed"),
    ("train/entropy", "Entropy", "of the policy, mean per token"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    (KL, "KL to the reference", "estimate, mean per token"),
    ("train/clipfrac", "Clipped", "share of tokens whose ratio was clipped"),
    ("perf/rollout_tokens_per_s", "Sampling speed", "response tokens per second"),
    (LOSS, "Loss", "of the last optimizer step"),
)
"""Small charts: metric, title, unit. Charts without data are omitted."""


def training(history: RunHistory) -> str:
    """Return the section of training curves; "" without any."""
    cards = [_other_set(history, name) for name in _other_sets(history)]
    cards += _lines(history, "Response length", "tokens", LENGTHS) or _lines(
        history, "Response length", "tokens", {"mean": LENGTH_MEAN}
    )
    if history.evaluations and (rewards := history.series(REWARD)):
        chart = _small({"reward": rewards}, history, floor=None)
        cards.append(_curve("Reward", "mean of the sampled responses", chart))
    for metric, title, unit in CURVES:
        if metric == KL and not history.has_reference:
            continue
        series = history.series(metric)
        if metric == REWARD_ERRORS and not any(share for _, share in series):
            continue
        if metric == LOSS and series and max(abs(loss) for _, loss in series) < ROUNDING:
            unit += ": 0 but for rounding, because the advantages of a group add up to 0"
        # The loss has both signs; the axes of the other curves include 0.
        floor = None if metric == LOSS else 0.0
        chart = _small({title: series}, history, floor=floor)
        if chart:
            cards.append(_curve(title, unit, chart))
    pass_rates = _pass_rates(history)
    if not cards and not pass_rates:
        return ""
    legend = ""
    if len(history.iterations) > FEW_POINTS:
        legend = "Faint: every iteration. Bold: the moving average over a twentieth of the run."
    if history.reward_changes:
        texts = (f"{k:,} ({escape(text)})" for k, text in history.reward_changes.items())
        legend += f" Dashed: another reward from iteration {', '.join(texts)} on."
    legend = f"<p>{legend.strip()}</p>" if legend else ""
    if errors := history.reward_errors():
        legend += f'<p class="errors">{escape(errors)}.</p>'
    grid = f'<div class="grid2">{"".join(cards)}</div>' if cards else ""
    return f"<h2>Training</h2>{legend}{pass_rates}{grid}"


def _pass_rates(history: RunHistory) -> str:
    """Return the distribution of the pass rate by prompt over training."""
    parts = {name: history.series(f"{PASS_RATES}/{part}") for part, name in PARTS.items()}
    changes = history.reward_changes
    iterations = [iteration for iteration, _ in history.series(REWARD)]
    chart = stacked_chart(parts, last=max(iterations, default=None), changes=changes)
    # Rewards of another scale can be 0 or 1 in some iteration.
    known = [iteration for iteration, _ in parts[PARTS["0"]]]
    bounds = pairwise([-1, *sorted(changes), max(iterations, default=0) + 1])
    if not chart or not any(
        0 < _count(iterations, low, up) <= 2 * _count(known, low, up) for low, up in bounds
    ):
        return ""
    missing = len(iterations) - len(known)
    gaps = (
        f"; {missing:,} iterations have none, because a reward is below 0 or above 1 or none is 1 "
        "(evaluation.datasets.pass_threshold sets the reward of a correct sample)"
        if missing > 0
        else ""
    )
    labels = "".join(
        f'<span><span class="key q{index}"></span>{escape(name)}</span>'
        for index, name in enumerate(parts)
    )
    return (
        f'<figure class="card above"><h3>Pass rate by prompt</h3>{chart}'
        f"<figcaption>share of prompts by the share of their samples that are correct{gaps}"
        f'<div class="keys">{labels}</div></figcaption></figure>'
    )


def _count(iterations: Sequence[int], low: int, up: int) -> int:
    return sum(low <= iteration < up for iteration in iterations)


def _small(
    series: Mapping[str, Series],
    history: RunHistory,
    *,
    floor: float | None,
    percent: bool = False,
) -> str:
    return line_chart(
        series,
        width=320,
        height=190,
        percent=percent,
        floor=floor,
        smooth=True,
        changes=history.reward_changes,
    )


def _lines(
    history: RunHistory,
    title: str,
    unit: str,
    metrics: Mapping[str, str],
    *,
    percent: bool = False,
    scale: float = 1.0,
) -> list[str]:
    """Return a card with the curves of these metrics; [] if the run has none of them."""
    series = {name: history.series(metric) for name, metric in metrics.items()}
    scaled = {name: [(x, y * scale) for x, y in line] for name, line in series.items() if line}
    chart = _small(scaled, history, floor=0.0, percent=percent)
    if not chart:
        return []
    return [_curve(title, unit, chart, scaled if len(scaled) > 1 else ())]


def machines(history: RunHistory) -> str:
    """Return speed and memory of GPUs, and the requests of the engines."""

    def of_work(metric: str) -> dict[str, str]:
        return {name: f"perf/{work}_{metric}" for name, work in WORK.items()}

    cards = [
        *(
            _lines(history, "MFU", "share of the GPU's peak", of_work("mfu"), percent=True)
            or _lines(history, "Model FLOPs", "TFLOP/s of a device", of_work("tflops"))
        ),
        *_lines(
            history,
            "GPU use",
            "share of the time in which a kernel runs, mean",
            of_work("gpu_utilization"),
            percent=True,
        ),
        *_lines(
            history,
            "GPU memory",
            "GiB in use on the fullest GPU",
            of_work("gpu_used_bytes"),
            scale=1 / GIB,
        ),
        *_lines(
            history,
            "Prefix cache",
            "share of the prompt tokens that the engines had computed before",
            {"hits": "engine/prefix_cache_hit_rate"},
            percent=True,
        ),
        *_lines(
            history,
            "KV cache",
            "share in use, mean over engines and readings of a rollout",
            {"in use": "engine/kv_cache_usage"},
            percent=True,
        ),
        *_lines(
            history,
            "Requests of an engine",
            "mean over engines and readings of a rollout",
            {"running": "engine/running_requests", "queued": "engine/queued_requests"},
        ),
        *_lines(
            history,
            "Speculative decoding",
            "tokens of a forward pass, mean",
            {"accepted": "engine/spec_accept_length"},
        ),
    ]
    return f'<h2>Engines and GPUs</h2><div class="grid2">{"".join(cards)}</div>' if cards else ""


def _other_sets(history: RunHistory) -> list[str]:
    """Return the held-out sets with another measure than the first set."""
    datasets = history.datasets
    return [name for name in datasets if history.measure(name) != history.measure(datasets[0])]


def _other_set(history: RunHistory, name: str) -> str:
    measure = history.measure(name)
    curve = {name: points(history.scores(name))}
    chart = line_chart(
        curve, width=320, height=190, percent=measure in SHARES, floor=0.0, dots=True
    )
    return _curve(f"Held-out: {name}", measure, chart)


def _curve(title: str, unit: str, chart: str, names: Iterable[str] = ()) -> str:
    """Return a card. `names`: of the curves, if there are several."""
    named = f'<div class="keys">{keys(names)}</div>' if names else ""
    return (
        f'<figure class="card"><h3>{escape(title)}</h3>{chart}'
        f"<figcaption>{escape(unit)}{named}</figcaption></figure>"
    )


def points(scores: Sequence[Score]) -> list[tuple[int, float]]:
    """Return (iteration, value) of scores."""
    return [(score.iteration, score.value) for score in scores]


def keys(names: Iterable[str]) -> str:
    """Return the names of curves with their colours."""
    return " ".join(
        f'<span><span class="key b{index}"></span>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
