"""The page about one run that people look at: self-contained HTML, no scripts, nothing fetched.
`report.png` is `figure`'s.

First screen: accuracy before and after, its curve, the run in figures. Then training curves, time
per stage, how far trainer and engine disagree on log-probs, the same prompts before and after, the
configuration. A section without data is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from rlpipe.observe.charts import line_chart, number, shares
from rlpipe.observe.history import REWARD, RunHistory, SampleChange
from rlpipe.observe.progress import duration
from rlpipe.observe.summary import stage_table, write_whole

CURVES = (
    ("rollout/response_len/mean", "Response length", "tokens, mean"),
    ("rollout/truncated_ratio", "Truncated", "share of responses that hit the length limit"),
    ("train/entropy", "Entropy", "of the policy, mean per token"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("train/kl_loss", "KL to the reference", "estimate, mean per token"),
    ("train/clipfrac", "Clipped", "share of tokens whose ratio was clipped"),
    ("perf/rollout_tokens_per_s", "Sampling speed", "response tokens per second"),
    ("train/loss", "Loss", "of the last optimizer step"),
)
"""Small charts: metric, title, unit. Those that the run recorded are shown, in this order."""

SAID = ("iterations", "accuracy_before", "accuracy_after")
"""Totals that the first screen shows in its own way."""


def write_report(history: RunHistory, path: str | Path) -> Path:
    """Write the page (whole or not at all) and return its path."""
    return write_whole(Path(path), render(history))


def render(history: RunHistory) -> str:
    """The page as HTML."""
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    sections = (_header, _hero, _figures, _training, _stages, _agreement, _samples, _setup)
    body = "\n".join(filter(None, (section(history) for section in sections)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(history.run)} · rlpipe</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>Written by rlpipe from the records in the store.</footer>\n</main>\n</body>\n</html>\n"
    )


def _header(history: RunHistory) -> str:
    about = f"<p>{escape(history.description)}</p>" if history.description else ""
    return f'<header><div class="eyebrow">rlpipe run · {escape(history.status)}</div><h1>{escape(history.run)}</h1>{about}</header>'


def _hero(history: RunHistory) -> str:
    """The first set's accuracy before and after in big figures beside the curve of every set."""
    if not history.evaluations:
        return _reward_hero(history)
    first = history.accuracy(history.datasets[0])
    before = first[0]
    after = first[-1]
    gain = round((after.accuracy - before.accuracy) * 100, 1)
    big = f'<span class="to">{after.accuracy:.0%}</span>'
    if len(first) > 1:
        big = f'<span class="from">{before.accuracy:.0%}</span><span class="arrow">→</span>{big}'
        big += f'</div><div class="gain{" down" if gain < 0 else ""}">{gain:+.1f} points'
    when = (
        "before and after training"
        if before.iteration == 0
        else f"from iteration {before.iteration} on"
    )
    what = f"accuracy on {after.n:,} held-out responses ({escape(history.datasets[0])}), {when}"
    curves = {
        name: [(e.iteration, e.accuracy) for e in history.accuracy(name)]
        for name in history.datasets
    }
    chart = line_chart(curves, percent=True, floor=0.0, dots=True)
    keys = "" if len(curves) < 2 else " " + _keys(curves)
    return _hero_card(big, what, chart, f"held-out accuracy over iterations{keys}")


def _reward_hero(history: RunHistory) -> str:
    rewards = history.series(REWARD)
    if not rewards:
        return ""
    first = number(rewards[0][1])
    last = number(rewards[-1][1])
    big = f'<span class="from">{first}</span><span class="arrow">→</span><span class="to">{last}</span>'
    chart = line_chart({"reward": rewards}, smooth=True)
    return _hero_card(
        big, "mean reward of the first and the last iteration", chart, "reward over iterations"
    )


def _hero_card(big: str, what: str, chart: str, caption: str) -> str:
    return (
        f'<section class="card hero"><div><div class="big">{big}</div><p class="what">{what}</p></div>'
        f"<figure>{chart}<figcaption>{caption}</figcaption></figure></section>"
    )


def _figures(history: RunHistory) -> str:
    figures: list[tuple[str, str]] = [(f"{len(history.iterations):,}", "iterations")]
    if history.iteration_seconds is not None:
        figures.append((duration(history.iteration_seconds), "median iteration"))
    figures += [
        (_total(name, value), _words(name))
        for name, value in history.totals.items()
        if isinstance(value, int | float | str) and name not in SAID
    ]
    cells = "".join(
        f"<div><b>{escape(figure)}</b><span>{escape(name)}</span></div>" for figure, name in figures
    )
    return f'<section class="figures">{cells}</section>'


def _total(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith(("seconds", "_s", "_s_per_iteration")) and not name.endswith("_per_s"):
            return duration(value)
        return f"{value:,}" if isinstance(value, int) else number(value)
    return str(value)


def _words(name: str) -> str:
    name = name.replace("_s_per_", "_per_") if name.endswith("_s_per_iteration") else name
    name = f"{name[:-6]}_per_second" if name.endswith("_per_s") else name.removesuffix("_s")
    return "in all" if name == "seconds" else name.replace("_", " ")


def _training(history: RunHistory) -> str:
    cards = []
    if history.evaluations and (rewards := history.series(REWARD)):
        cards.append(
            _curve(
                "Reward",
                "mean of the sampled responses",
                line_chart({"reward": rewards}, width=320, height=190, smooth=True),
            )
        )
    for metric, title, unit in CURVES:
        floor = None if metric == "train/loss" else 0.0
        chart = line_chart(
            {title: history.series(metric)}, width=320, height=190, floor=floor, smooth=True
        )
        if chart:
            cards.append(_curve(title, unit, chart))
    if not cards:
        return ""
    text = "Faint: every iteration. Bold: the moving average over a tenth of the run."
    return f'<h2>Training</h2><p>{text}</p><div class="grid2">{"".join(cards)}</div>'


def _curve(title: str, unit: str, chart: str) -> str:
    return f'<figure class="card"><h3>{escape(title)}</h3>{chart}<figcaption>{escape(unit)}</figcaption></figure>'


def _stages(history: RunHistory) -> str:
    table = stage_table(history)
    if not table:
        return ""
    rows = "".join(
        f'<tr><td><span class="key b{index % 8}"></span>{escape(stage)}</td><td class="n">{_seconds(row["median"])}</td>'
        f'<td class="n">{_seconds(row["total"])}</td><td class="n">{row["share"]:.0%}</td></tr>'
        for index, (stage, row) in enumerate(table.items())
    )
    bar = shares({stage: row["total"] or 0.0 for stage, row in table.items()})
    head = '<tr><th>stage</th><th class="n">an iteration, median</th><th class="n">in all</th><th class="n">share</th></tr>'
    return f'<h2>Where the time went</h2><p>Wall time of each stage.</p><div class="card">{bar}<table>{head}{rows}</table></div>'


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def _agreement(history: RunHistory) -> str:
    series = history.logprob_difference()
    chart = line_chart({"difference": series}, width=970, height=220, logarithmic=True, smooth=True)
    if not chart:
        return ""
    worst = max(value for _, value in series)
    text = (
        "Mean absolute difference between the log-probs that the engine sampled with and those that the trainer computes for the "
        f"same tokens. It is small as long as both hold the same weights. Largest: {number(worst)}."
    )
    return (
        f'<h2>Do trainer and engine agree?</h2><p>{text}</p><figure class="card">{chart}</figure>'
    )


def _samples(history: RunHistory) -> str:
    if not history.samples:
        return ""
    labelled = any(sample.label is not None for sample in history.samples)
    head = (
        "<tr><th>prompt</th>"
        + ("<th>expected</th>" if labelled else "")
        + "<th>before</th><th>after</th></tr>"
    )
    rows = "".join(_sample(sample, labelled) for sample in history.samples)
    text = "Held-out prompts, answered by the weights at the start and at the end."
    return f'<h2>Before and after</h2><p>{text}</p><div class="card scroll"><table>{head}{rows}</table></div>'


def _sample(sample: SampleChange, labelled: bool) -> str:
    cells = [_cell(sample.prompt)] + ([_cell(sample.label or "")] if labelled else [])
    cells += [_cell(sample.before, sample.reward_before), _cell(sample.after, sample.reward_after)]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, reward: float | None = None) -> str:
    if reward is None:
        return f'<td><div class="text">{escape(text)}</div></td>'
    right = reward >= 1
    mark = ("✓" if right else "✗") if reward in (0, 1) else number(reward)
    kind = "right" if right else "wrong"
    return f'<td><div class="text"><span class="mark {kind}">{mark}</span>{escape(text)}</div></td>'


def _setup(history: RunHistory) -> str:
    packages = "\n".join(f"{name} {version}" for name, version in history.packages.items())
    blocks = [("Configuration", history.config_yaml), ("Packages", packages)]
    shown = "".join(
        f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"
        for title, text in blocks
        if text
    )
    return f"<h2>How it was made</h2>{shown}" if shown else ""


def _keys(names: Iterable[str]) -> str:
    return " ".join(
        f'<span class="key b{index}"></span>{escape(name)}' for index, name in enumerate(names)
    )
