"""Write the HTML report of one run: `report.html`.

The first screen shows the held-out score before and after, its curve, and the totals. The score is
an accuracy if all rewards are 0 or 1, else a mean reward. Further sections: training curves, time
per stage, engines and GPUs, log-prob difference of trainer and engine, samples before and after,
and the configuration. A section without data is omitted. Entry points: `write_report`, `render`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlpipe.observe.charts import FEW_POINTS, line_chart, number, shares, stacked_chart
from rlpipe.observe.pages import html_page, navigation, write_whole
from rlpipe.observe.pass_rates import PARTS
from rlpipe.observe.pass_rates import PASS_RATE as PASS_RATES
from rlpipe.observe.run_history import (
    PAIR_ACCURACY,
    PASS_RATE,
    REWARD,
    SHARES,
    RunHistory,
    SampleChange,
    Score,
    score_text,
)
from rlpipe.observe.summary import stage_table
from rlpipe.observe.terminal import duration

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
    ("train/rewards/margins", "Margin of pairs", "reward of the chosen less the rejected, mean"),
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

SHOWN_ELSEWHERE = ("iterations", "accuracy_before", "accuracy_after", "held_out_measure")
"""Totals that another part of the first screen shows."""
LABELS = {
    "seconds": "in all, with the start",
    "rollout_tokens_per_s": "tokens sampled per second",
    "train_tokens_per_s": "tokens trained per second",
    "orchestration_s_per_iteration": "between stages, per iteration",
    "max_logprob_difference": "largest log-prob difference of one token",
}
"""Total → label. Other totals have their name in words."""


def write_report(history: RunHistory, path: str | Path) -> Path:
    """Write the page atomically and return its path."""
    return write_whole(Path(path), render(history))


def render(history: RunHistory) -> str:
    """Return the page as HTML."""
    sections = (
        _header,
        _hero,
        _totals,
        _training,
        _stages,
        _machines,
        _agreement,
        _samples,
        _setup,
    )
    body = "\n".join(filter(None, (section(history) for section in sections)))
    return html_page(f"{history.run} · rlpipe", body)


def _header(history: RunHistory) -> str:
    description = f"<p>{escape(history.description)}</p>" if history.description else ""
    return (
        f'<header><div class="eyebrow">rlpipe run · {escape(history.status)}</div>'
        f"<h1>{escape(history.run)}</h1>{description}{navigation(history.links)}</header>"
    )


def _hero(history: RunHistory) -> str:
    """Return the score of the first held-out set before and after, and curves of all sets like it.

    Other sets are among the training curves.
    """
    if not history.evaluations:
        return _reward_hero(history)
    dataset = history.datasets[0]
    measure = history.measure(dataset)
    scores = history.scores(dataset)
    period = "before and after training"
    if scores[0].iteration != 0:
        period = f"from iteration {scores[0].iteration} on"
    elif len(scores) == 1:
        period = "before training" if history.iterations else "of these weights"
    explained = (
        f"{measure} (rewards of at least pass_threshold)" if measure == PASS_RATE else measure
    )
    meaning = f"{explained} on {scores[-1].n:,} held-out responses ({escape(dataset)}), {period}"
    curves = {
        name: _points(history.scores(name))
        for name in history.datasets
        if history.measure(name) == measure
    }
    chart = line_chart(curves, percent=measure in SHARES, floor=0.0, dots=True)
    keys = "" if len(curves) < 2 else " " + _keys(curves)
    caption = f"held-out {measure} over iterations{keys}"
    return _hero_card(_change(scores, measure), meaning, chart, caption)


def _points(scores: Sequence[Score]) -> list[tuple[int, float]]:
    return [(score.iteration, score.value) for score in scores]


def _change(scores: Sequence[Score], measure: str) -> str:
    """Return the large figures: first and last score, and their difference."""
    before = scores[0].value
    after = scores[-1].value
    text = score_text(after, measure)
    if len(scores) == 1:
        return f'<div class="big"><span class="to">{text}</span></div>'
    if measure in SHARES:
        gain = round((after - before) * 100, 1)
        gained = f"{gain:+.1f} points" if gain else "no change"
    else:
        gain = after - before
        gained = f"{'+' if gain > 0 else ''}{number(gain)}" if gain else "no change"
    return _from_to(score_text(before, measure), text, gain) + _gain(gained, gain)


def _from_to(before: str, after: str, gain: float) -> str:
    worse = " worse" if gain < 0 else " same" if gain == 0 else ""
    # Long figures are drawn smaller, so that they do not cover the chart.
    characters = len(f"{before}→{after}")
    return (
        f'<div class="big" style="--characters: {characters}">'
        f'<span class="from">{before}</span><span class="arrow">→</span>'
        f'<span class="to{worse}">{after}</span></div>'
    )


def _gain(text: str, gain: float) -> str:
    kind = " down" if gain < 0 else " same" if gain == 0 else ""
    return f'<div class="gain{kind}">{text}</div>'


def _reward_hero(history: RunHistory) -> str:
    rewards = history.series(REWARD)
    if not rewards:
        return ""
    first = rewards[0][1]
    last = rewards[-1][1]
    chart = line_chart({"reward": rewards}, smooth=True)
    if len(rewards) == 1:
        big = f'<div class="big"><span class="to">{number(last)}</span></div>'
        return _hero_card(big, "mean reward of the only iteration", chart, "reward over iterations")
    big = _from_to(number(first), number(last), last - first)
    meaning = "mean reward of the first and the last iteration"
    return _hero_card(big, meaning, chart, "reward over iterations")


def _hero_card(big: str, meaning: str, chart: str, caption: str) -> str:
    return (
        f'<section class="card hero"><div>{big}'
        f'<p class="what">{meaning}</p></div>'
        f"<figure>{chart}<figcaption>{caption}</figcaption></figure></section>"
    )


def _totals(history: RunHistory) -> str:
    totals: list[tuple[str, str]] = [(f"{len(history.iterations):,}", "iterations")]
    if history.iteration_seconds is not None:
        totals.append((duration(history.iteration_seconds), "an iteration, median"))
    totals += [
        (_total_text(name, value), _total_label(name))
        for name, value in history.totals.items()
        if isinstance(value, int | float | str) and name not in SHOWN_ELSEWHERE
    ]
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in totals
    )
    return f'<section class="figures">{cells}</section>'


def _total_text(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith(("seconds", "_s", "_s_per_iteration")) and not name.endswith("_per_s"):
            return duration(value)
        return f"{value:,}" if isinstance(value, int) else number(value)
    return str(value)


def _total_label(name: str) -> str:
    """Return a total's label: from `LABELS`, else its name in words without its unit."""
    if name in LABELS:
        return LABELS[name]
    name = name.replace("_s_per_", "_per_") if name.endswith("_s_per_iteration") else name
    name = f"{name[:-6]}_per_second" if name.endswith("_per_s") else name.removesuffix("_s")
    return name.replace("_", " ")


def _training(history: RunHistory) -> str:
    cards = [_other_set(history, name) for name in _other_sets(history)]
    cards += _lines(history, "Response length", "tokens", LENGTHS) or _lines(
        history, "Response length", "tokens", {"mean": LENGTH_MEAN}
    )
    if history.evaluations and (rewards := history.series(REWARD)):
        chart = line_chart({"reward": rewards}, width=320, height=190, smooth=True)
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
        chart = line_chart({title: series}, width=320, height=190, floor=floor, smooth=True)
        if chart:
            cards.append(_curve(title, unit, chart))
    pass_rates = _pass_rates(history)
    if not cards and not pass_rates:
        return ""
    legend = ""
    if len(history.iterations) > FEW_POINTS:
        legend = "<p>Faint: every iteration. Bold: the moving average over a twentieth of the run."
        legend += "</p>"
    grid = f'<div class="grid2">{"".join(cards)}</div>' if cards else ""
    return f"<h2>Training</h2>{legend}{pass_rates}{grid}"


def _pass_rates(history: RunHistory) -> str:
    """Return the distribution of the pass rate by prompt over training."""
    parts = {name: history.series(f"{PASS_RATES}/{part}") for part, name in PARTS.items()}
    chart = stacked_chart(parts)
    # Rewards of another scale can be 0 or 1 in some iteration.
    if not chart or 2 * len(parts[PARTS["0"]]) < len(history.series(REWARD)):
        return ""
    keys = "".join(
        f'<span><span class="key q{index}"></span>{escape(name)}</span>'
        for index, name in enumerate(parts)
    )
    return (
        f'<figure class="card above"><h3>Pass rate by prompt</h3>{chart}'
        f"<figcaption>share of prompts by the share of their samples that are correct"
        f'<div class="keys">{keys}</div></figcaption></figure>'
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
    scaled = {
        name: [(x, y * scale) for x, y in points] for name, points in series.items() if points
    }
    chart = line_chart(scaled, width=320, height=190, percent=percent, floor=0.0, smooth=True)
    if not chart:
        return []
    return [_curve(title, unit, chart, scaled if len(scaled) > 1 else ())]


def _machines(history: RunHistory) -> str:
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
    curve = {name: _points(history.scores(name))}
    chart = line_chart(
        curve, width=320, height=190, percent=measure in SHARES, floor=0.0, dots=True
    )
    return _curve(f"Held-out: {name}", measure, chart)


def _curve(title: str, unit: str, chart: str, names: Iterable[str] = ()) -> str:
    """Return a card. `names`: of the curves, if there are several."""
    keys = f'<div class="keys">{_keys(names)}</div>' if names else ""
    return (
        f'<figure class="card"><h3>{escape(title)}</h3>{chart}'
        f"<figcaption>{escape(unit)}{keys}</figcaption></figure>"
    )


def _stages(history: RunHistory) -> str:
    table = stage_table(history)
    if not table:
        return ""
    rows = "".join(
        f'<tr><td><span class="key b{index % 8}"></span>{escape(stage)}</td>'
        f'<td class="n">{_seconds(row["median"])}</td><td class="n">{_seconds(row["total"])}</td>'
        f'<td class="n">{_share(row["share"] or 0.0)}</td></tr>'
        for index, (stage, row) in enumerate(table.items())
    )
    bar = shares({stage: row["total"] or 0.0 for stage, row in table.items()})
    heads = ("an iteration, median", "in all", "share")
    cells = "".join(f'<th class="n">{name}</th>' for name in heads)
    return (
        "<h2>Where the time went</h2><p>Wall time of each stage.</p>"
        f'<div class="card">{bar}<table><tr><th>stage</th>{cells}</tr>{rows}</table></div>'
    )


def _share(value: float) -> str:
    return "&lt;1%" if 0 < value < 0.005 else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _agreement(history: RunHistory) -> str:
    series = history.logprob_difference()
    # Logarithmic: healthy values differ by orders of magnitude between float32 and bf16.
    chart = line_chart({"difference": series}, width=970, height=220, logarithmic=True, smooth=True)
    if not chart:
        return ""
    largest = max(value for _, value in series)
    explanation = (
        "Mean absolute difference between the rollout log-probs of the engine and the log-probs "
        "of the trainer for the same tokens. It is small while both have the same weights. "
        f'Largest mean of an iteration: <span class="figure">{number(largest)}</span>.'
    )
    return (
        f"<h2>Do trainer and engine agree?</h2><p>{explanation}</p>"
        f'<figure class="card">{chart}</figure>'
    )


def _samples(history: RunHistory) -> str:
    if not history.samples:
        return ""
    labelled = any(sample.label is not None for sample in history.samples)
    heads = ["prompt", *(["expected"] if labelled else []), "before", "after"]
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(_sample(sample, labelled) for sample in history.samples)
    return (
        "<h2>Before and after</h2>"
        "<p>Held-out prompts, answered by the weights at the start and at the end.</p>"
        f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )


def _sample(sample: SampleChange, labelled: bool) -> str:
    cells = [_cell(sample.prompt)] + ([_cell(sample.label or "")] if labelled else [])
    cells += [_cell(sample.before, sample.reward_before), _cell(sample.after, sample.reward_after)]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, reward: float | None = None) -> str:
    if reward is None:
        return f'<td><div class="text">{escape(text)}</div></td>'
    correct = reward >= 1
    mark = ("✓" if correct else "✗") if reward in (0, 1) else number(reward)
    kind = "right" if correct else "wrong" if reward <= 0 else "partly"
    return f'<td><div class="text"><span class="mark {kind}">{mark}</span>{escape(text)}</div></td>'


def _setup(history: RunHistory) -> str:
    packages = "\n".join(f"{name} {version}" for name, version in history.packages.items())
    blocks = [("Configuration", history.config_yaml), ("Packages", packages)]
    details = "".join(
        f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
        for title, text in blocks
        if text
    )
    return f"<h2>How it was made</h2>{details}" if details else ""


def _keys(names: Iterable[str]) -> str:
    return " ".join(
        f'<span><span class="key b{index}"></span>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
