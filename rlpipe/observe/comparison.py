"""Rewards and advantages of the same samples, before and after something was changed: figures, a
picture, a page.

N samples of all iterations, NaN where one side has no value. Not here: where the columns come from
(`rlpipe.reprocess.report`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlpipe.observe.charts import line_chart, number
from rlpipe.observe.figure import COLOURS, INK, RULE, SOFT
from rlpipe.observe.summary import write_whole

BINS = 30
SIDES = ("before", "after")
ABOUT = (
    "The same stored responses, scored and estimated twice. Nothing was sampled, and what was there before is as it was. "
    "Advantages are means over a response's tokens."
)


@dataclass(slots=True)
class Example:
    """A response whose reward changed much."""

    group_id: str
    prompt: str
    response: str
    before: float | None
    after: float | None


@dataclass(slots=True)
class IterationRow:
    """One iteration, before and after: mean rewards (None without any), accepted groups, rows with
    an error."""

    iteration: int
    reward: tuple[float | None, float | None]
    groups: tuple[int, int]
    errors: tuple[int, int]
    without: str = ""
    """Why it has no new advantages."""


@dataclass(slots=True)
class Comparison:
    """Two versions of a run's columns."""

    run: str
    of: str
    group: np.ndarray
    """[N] int64, any numbers: samples of one prompt draw."""
    rewards: tuple[np.ndarray, np.ndarray]
    """[N] float64 each, NaN without a reward."""
    advantages: tuple[np.ndarray, np.ndarray]
    """[N] float64 each: mean over the tokens of a sample, NaN where it is not in the batch."""
    iterations: list[IterationRow]
    examples: list[Example] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    """Dotted key → `old → new`, of the configuration."""


def figures(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows `{"what", "before", "after"}` of the table; numbers, or None where there is nothing to
    measure."""
    rows = [
        _row(
            "samples with a reward", *(int(np.isfinite(side).sum()) for side in comparison.rewards)
        )
    ]
    for name, measure in (
        ("mean", np.mean),
        ("deviation", np.std),
        ("smallest", np.min),
        ("median", np.median),
        ("largest", np.max),
    ):
        rows.append(_row(f"reward: {name}", *(_of(side, measure) for side in comparison.rewards)))
    rows.append(
        _row(
            "rows with an error",
            *(sum(row.errors[side] for row in comparison.iterations) for side in (0, 1)),
        )
    )
    rows.append(
        _row(
            "groups in batches",
            *(sum(row.groups[side] for row in comparison.iterations) for side in (0, 1)),
        )
    )
    rows.append(
        _row(
            "share of groups whose rewards are equal",
            *(_equal_share(comparison.group, side) for side in comparison.rewards),
        )
    )
    rows.append(
        _row(
            "samples with advantages",
            *(int(np.isfinite(side).sum()) for side in comparison.advantages),
        )
    )
    for name, measure in (("mean", np.mean), ("deviation", np.std)):
        rows.append(
            _row(f"advantage: {name}", *(_of(side, measure) for side in comparison.advantages))
        )
    return rows


def agreement(comparison: Comparison) -> dict[str, float]:
    """How alike the two are, as far as that can be said. Pairs are two samples of a group whose
    rewards differed before.

    `reward_changed`: share of samples with another reward; `correlation` of the rewards;
    `pairs_kept`, `pairs_tied`, `pairs_turned`: shares of pairs that are still in that order, are
    equal now, are the other way round.
    """
    before, after = comparison.rewards
    both = np.isfinite(before) & np.isfinite(after)
    if not both.any():
        return {}
    found = {"reward_changed": float((before[both] != after[both]).mean())}
    if before[both].std() > 0 and after[both].std() > 0:
        found["correlation"] = float(np.corrcoef(before[both], after[both])[0, 1])
    signs = np.concatenate(
        [_pair_signs(before[rows], after[rows]) for rows in _by_group(comparison.group, both)]
    )
    if len(signs):
        found |= {
            f"pairs_{name}": float((signs == sign).mean())
            for name, sign in (("kept", 1), ("tied", 0), ("turned", -1))
        }
    return found


def summary(comparison: Comparison) -> dict[str, Any]:
    """JSON-able: everything but the samples themselves."""
    return {
        "run": comparison.run,
        "of": comparison.of,
        "iterations": len(comparison.iterations),
        "changed": comparison.changed,
        "figures": figures(comparison),
        "agreement": agreement(comparison),
        "without_advantages": {
            str(row.iteration): row.without for row in comparison.iterations if row.without
        },
    }


def write_picture(comparison: Comparison, path: Path) -> Path:
    """Draw both distributions and the rewards by iteration (PNG, 1920 x 610 pixels); the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 3.8), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    first, second, third = figure.subplots(1, 3)
    _histogram(first, "rewards", comparison.rewards)
    _histogram(second, "advantages", comparison.advantages)
    _style(third, "mean reward by iteration")
    for side, name in enumerate(SIDES):
        points = [
            (row.iteration, value)
            for row in comparison.iterations
            if (value := row.reward[side]) is not None
        ]
        if points:
            third.plot(
                *zip(*points, strict=True),
                color=COLOURS[side],
                linewidth=1.8,
                label=name,
                marker="o",
                markersize=2.5,
            )
    third.xaxis.set_major_locator(MaxNLocator(integer=True))
    third.set_xlabel("iteration", fontsize=9, color=SOFT)
    first.legend(frameon=False, fontsize=9, labelcolor=INK)
    title = f"{comparison.of} → {comparison.run}"
    figure.suptitle(title, x=0.045, y=0.965, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.subplots_adjust(left=0.045, right=0.99, top=0.78, bottom=0.13, wspace=0.16)
    figure.savefig(path)
    return path


def write_page(comparison: Comparison, path: Path) -> Path:
    """Write the page (self-contained HTML, whole or not at all); the path."""
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    body = "\n".join(
        (
            _header(comparison),
            _tables(comparison),
            _charts(comparison),
            _by_iteration(comparison),
            _examples(comparison),
        )
    )
    return write_whole(
        path,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(comparison.run)} · rlpipe</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>Written by rlpipe from the records in the store.</footer>\n</main>\n</body>\n</html>\n",
    )


def _header(comparison: Comparison) -> str:
    said = f"{len(comparison.iterations):,} iterations of {escape(comparison.of)}"
    return f'<header><div class="eyebrow">rlpipe reprocessed · {said}</div><h1>{escape(comparison.run)}</h1><p>{ABOUT}</p></header>'


def _tables(comparison: Comparison) -> str:
    rows = "".join(
        _cells(row["what"], _said(row["before"]), _said(row["after"]))
        for row in figures(comparison)
    )
    alike = "".join(
        f"<div><b>{value:.3f}</b><span>{escape(name.replace('_', ' '))}</span></div>"
        for name, value in agreement(comparison).items()
    )
    changed = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(said)}</td></tr>"
        for key, said in comparison.changed.items()
    )
    what = (
        f'<h2>What was changed</h2><div class="card scroll"><table>{changed}</table></div>'
        if changed
        else ""
    )
    alike = f'<section class="figures">{alike}</section>' if alike else ""
    head = '<tr><th></th><th class="n">before</th><th class="n">after</th></tr>'
    return f'{alike}{what}<h2>Figures</h2><div class="card"><table>{head}{rows}</table></div>'


def _charts(comparison: Comparison) -> str:
    keys = " ".join(f'<span class="key b{index}"></span>{name}' for index, name in enumerate(SIDES))
    cards = [
        f'<figure class="card"><h3>{title}</h3>{chart}<figcaption>share of samples {keys}</figcaption></figure>'
        for title, sides in (("Rewards", comparison.rewards), ("Advantages", comparison.advantages))
        if (chart := _bars(sides))
    ]
    series = {
        name: [
            (row.iteration, value)
            for row in comparison.iterations
            if (value := row.reward[side]) is not None
        ]
        for side, name in enumerate(SIDES)
    }
    chart = line_chart(series, width=970, height=220)
    inside = f"<h3>Mean reward by iteration</h3>{chart}<figcaption>{keys}</figcaption>"
    curve = f'<figure class="card" style="margin-top: 14px">{inside}</figure>' if chart else ""
    return f'<h2>Distributions</h2><div class="grid2">{"".join(cards)}</div>{curve}'


def _by_iteration(comparison: Comparison) -> str:
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{_said(value)}</td>'
            for value in (row.iteration, *row.reward, *row.groups, row.errors[1])
        )
        + f"<td>{escape(row.without)}</td></tr>"
        for row in comparison.iterations
    )
    names = ("iteration", "reward before", "after", "groups before", "after", "errors")
    head = (
        "".join(f'<th class="n">{name}</th>' for name in names) + "<th>no advantages because</th>"
    )
    return (
        f'<h2>By iteration</h2><div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'
    )


def _examples(comparison: Comparison) -> str:
    if not comparison.examples:
        return ""
    rows = "".join(
        f'<tr><td class="n">{_said(one.before)}</td><td class="n">{_said(one.after)}</td>'
        f'<td><div class="text">{escape(one.prompt)}</div></td><td><div class="text">{escape(one.response)}</div></td></tr>'
        for one in comparison.examples
    )
    head = (
        '<tr><th class="n">before</th><th class="n">after</th><th>prompt</th><th>response</th></tr>'
    )
    return f'<h2>Rewards that changed most</h2><div class="card scroll"><table>{head}{rows}</table></div>'


def _bars(sides: tuple[np.ndarray, np.ndarray], width: int = 460, height: int = 190) -> str:
    """Two histograms over one axis as SVG; an empty string if there is nothing."""
    shares, edges = _shares(sides)
    if not len(edges):
        return ""
    top = max(float(share.max()) for share in shares) or 1.0
    step = (width - 20) / BINS
    room = height - 24
    parts = []
    for side, share in enumerate(shares):
        for index, value in enumerate(share.tolist()):
            x = 10 + index * step + side * step / 2
            tall = value / top * room
            title = f"<title>{SIDES[side]}: {value:.1%} in {number(edges[index])} … {number(edges[index + 1])}</title>"
            place = f'x="{x:.1f}" y="{room - tall:.1f}" width="{step / 2:.1f}" height="{tall:.1f}"'
            parts.append(f'<rect class="f{side}" {place}>{title}</rect>')
    for at, anchor in ((0, "start"), (BINS // 2, "middle"), (BINS, "end")):
        x = 10 + at * step
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 6}" text-anchor="{anchor}">{number(edges[at])}</text>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{", ".join(SIDES)}">{"".join(parts)}</svg>'


def _shares(sides: tuple[np.ndarray, np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Share of the values in each of BINS bins, of both sides, and the edges they have in common
    (none without values)."""
    finite = [side[np.isfinite(side)] for side in sides]
    everything = np.concatenate(finite)
    if not len(everything):
        return [], np.zeros(0)
    edges = np.histogram_bin_edges(everything, bins=BINS)
    return [np.histogram(side, bins=edges)[0] / max(len(side), 1) for side in finite], edges


def _histogram(axes: Axes, title: str, sides: tuple[np.ndarray, np.ndarray]) -> None:
    _style(axes, f"{title}, share of samples")
    shares, edges = _shares(sides)
    for side, share in enumerate(shares):
        axes.stairs(
            share,
            edges,
            color=COLOURS[side],
            linewidth=1.8,
            fill=side == 1,
            alpha=0.55 if side else 1,
            label=SIDES[side],
        )


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=SOFT, pad=10)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)


def _row(what: str, before: float | int | None, after: float | int | None) -> dict[str, Any]:
    return {"what": what, "before": before, "after": after}


def _of(side: np.ndarray, measure: Any) -> float | None:
    finite = side[np.isfinite(side)]
    return float(measure(finite)) if len(finite) else None


def _equal_share(group: np.ndarray, side: np.ndarray) -> float | None:
    sets = [side[rows] for rows in _by_group(group, np.isfinite(side))]
    return float(np.mean([np.ptp(values) == 0 for values in sets])) if sets else None


def _by_group(group: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """Positions of the wanted samples, one array for each group that has any."""
    at = np.flatnonzero(wanted)
    order = at[np.argsort(group[at], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []


def _pair_signs(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """1, 0, -1 of each pair with different values before: kept, tied, turned."""
    first, second = np.triu_indices(len(before), 1)
    was = np.sign(before[first] - before[second])
    now = np.sign(after[first] - after[second])
    return (was * now)[was != 0]


def _cells(what: str, before: str, after: str) -> str:
    return f'<tr><td>{escape(what)}</td><td class="n">{before}</td><td class="n">{after}</td></tr>'


def _said(value: float | int | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else number(value)
