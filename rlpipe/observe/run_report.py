"""Write the HTML report of one run: `report.html`.

The first screen shows the held-out score before and after, its curve, and the totals. The score is
an accuracy if all rewards are 0 or 1, else a mean reward. Further sections: training curves, time
per stage, engines and GPUs, log-prob difference of trainer and engine, samples before and after,
and the configuration. A section without data is omitted. Entry points: `write_report`, `render`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlpipe.observe.charts import line_chart, number, shares
from rlpipe.observe.pages import html_page, navigation, write_whole
from rlpipe.observe.run_curves import keys, machines, points, training
from rlpipe.observe.run_history import (
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
        training,
        _stages,
        machines,
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
        name: points(history.scores(name))
        for name in history.datasets
        if history.measure(name) == measure
    }
    chart = line_chart(curves, percent=measure in SHARES, floor=0.0, dots=True)
    named = "" if len(curves) < 2 else " " + keys(curves)
    caption = f"held-out {measure} over iterations{named}"
    return _hero_card(_change(scores, measure), meaning, chart, caption)


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
    chart = line_chart({"reward": rewards}, smooth=True, changes=history.reward_changes)
    if history.reward_changes:
        newest = max(history.reward_changes)
        rewards = [point for point in rewards if point[0] >= newest]
        first = rewards[0][1] if rewards else first
    if len(rewards) == 1:
        big = f'<div class="big"><span class="to">{number(last)}</span></div>'
        return _hero_card(big, "mean reward of one iteration", chart, "reward over iterations")
    big = _from_to(number(first), number(last), last - first)
    since = " with the newest reward" if history.reward_changes else ""
    meaning = f"mean reward of the first and the last iteration{since}"
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
    cells = [_cell(sample.prompt, pictures=sample.pictures)] + (
        [_cell(sample.label or "")] if labelled else []
    )
    cells += [_cell(sample.before, sample.reward_before), _cell(sample.after, sample.reward_after)]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, reward: float | None = None, pictures: Sequence[str] = ()) -> str:
    if reward is None:
        images = "".join(f'<img src="{escape(uri)}" alt="image of the prompt">' for uri in pictures)
        return f'<td>{images}<div class="text">{escape(text)}</div></td>'
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
