"""Compare rewards and advantages of the same samples before and after a change.

`figures`, `agreement` and `summary` compute the numbers, `write_page` and `write_picture` show
them. `rlpipe.reprocess` reads the columns. Legend: N samples of all iterations, NaN where one side
has no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.observe.charts import histogram, line_chart, number
from rlpipe.observe.pages import html_page, write_whole
from rlpipe.observe.pictures import write_comparison_picture

SIDES = ("before", "after")
ABOUT = (
    "The same stored responses, scored and estimated twice. Nothing was sampled, and the stored "
    "data of the first run is unchanged. Advantages are means over a response's tokens."
)
AGREEMENT = {
    "reward_changed": "samples with another reward",
    "correlation": "correlation of the rewards",
    "pairs_kept": "pairs in the same order",
    "pairs_tied": "pairs with equal rewards now",
    "pairs_turned": "pairs in the opposite order",
}
"""Measure → label on the page and in the terminal."""
AGREEMENT_LEGEND = (
    "A pair is two responses to one prompt that had different rewards before. In the same "
    "order, training still prefers the same response. A correlation of 1 means equal rewards up to "
    "scale and offset, 0 unrelated rewards, −1 opposite ones."
)


@dataclass(slots=True)
class Example:
    """A response with a large change of its reward."""

    group_id: str
    prompt: str
    response: str
    before: float | None
    after: float | None


@dataclass(slots=True)
class IterationRow:
    """One iteration, each pair (before, after).

    `reward` is the mean reward, None without any; `groups` the accepted groups; `errors` the rows
    with an error.
    """

    iteration: int
    reward: tuple[float | None, float | None]
    groups: tuple[int, int]
    errors: tuple[int, int]
    without: str = ""
    """Reason for the absence of new advantages."""


@dataclass(slots=True)
class Comparison:
    """Two versions of the columns of a run. `of` is the original run, `run` the new one."""

    run: str
    of: str
    group: np.ndarray
    """[N] int64, equal for the samples of one drawn prompt."""
    rewards: tuple[np.ndarray, np.ndarray]
    """[N] float64 each, NaN without a reward."""
    advantages: tuple[np.ndarray, np.ndarray]
    """[N] float64 each: mean over the tokens of a sample, NaN if it is not in the batch."""
    iterations: list[IterationRow]
    examples: list[Example] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    """Dotted key of the configuration → `old → new`."""


def figures(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows of the table, `{"what", "before", "after"}`; None where no value exists."""
    iterations = comparison.iterations

    def count(column: np.ndarray) -> int:
        return int(np.isfinite(column).sum())

    rows = [_row("samples with a reward", *map(count, comparison.rewards))]
    for name, measure in (
        ("mean", np.mean),
        ("deviation", np.std),
        ("smallest", np.min),
        ("median", np.median),
        ("largest", np.max),
    ):
        before, after = (_measured(column, measure) for column in comparison.rewards)
        rows.append(_row(f"reward: {name}", before, after))
    errors = (sum(row.errors[side] for row in iterations) for side in (0, 1))
    groups = (sum(row.groups[side] for row in iterations) for side in (0, 1))
    equal = (_equal_share(comparison.group, column) for column in comparison.rewards)
    rows.append(_row("rows with an error", *errors))
    rows.append(_row("groups in batches", *groups))
    rows.append(_row("share of groups whose rewards are equal", *equal))
    rows.append(_row("samples with advantages", *map(count, comparison.advantages)))
    for name, measure in (("mean", np.mean), ("deviation", np.std)):
        before, after = (_measured(column, measure) for column in comparison.advantages)
        rows.append(_row(f"advantage: {name}", before, after))
    return rows


def agreement(comparison: Comparison) -> dict[str, float]:
    """Return measures of agreement of the rewards before and after; empty without common samples.

    `reward_changed`: share of samples with another reward. `correlation` of the rewards.
    `pairs_kept`, `pairs_tied`, `pairs_turned`: shares of pairs that have the same order, are equal
    now, or have the opposite order. A pair is two samples of a group with different rewards before.
    """
    before, after = comparison.rewards
    both = np.isfinite(before) & np.isfinite(after)
    if not both.any():
        return {}
    measures = {"reward_changed": float((before[both] != after[both]).mean())}
    # The correlation of a constant column is undefined.
    if before[both].std() > 0 and after[both].std() > 0:
        measures["correlation"] = float(np.corrcoef(before[both], after[both])[0, 1])
    groups = _group_positions(comparison.group, both)
    signs = np.concatenate([_pair_signs(before[rows], after[rows]) for rows in groups])
    if len(signs):
        measures |= {
            f"pairs_{name}": float((signs == sign).mean())
            for name, sign in (("kept", 1), ("tied", 0), ("turned", -1))
        }
    return measures


def summary(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers as a JSON-able object, without samples."""
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
    """Draw both distributions and the rewards by iteration (PNG); return the path."""
    before, after = (_mean_rewards(comparison, side) for side in (0, 1))
    return write_comparison_picture(
        f"{comparison.of} → {comparison.run}",
        SIDES,
        comparison.rewards,
        comparison.advantages,
        (before, after),
        path,
    )


def write_page(comparison: Comparison, path: Path) -> Path:
    """Write the page as self-contained HTML, atomically; return the path."""
    sections = (_header, _tables, _charts, _iteration_table, _example_table)
    body = "\n".join(section(comparison) for section in sections)
    return write_whole(path, html_page(f"{comparison.run} · rlpipe", body))


def _header(comparison: Comparison) -> str:
    source = f"{len(comparison.iterations):,} iterations of {escape(comparison.of)}"
    return (
        f'<header><div class="eyebrow">rlpipe reprocessed · {source}</div>'
        f"<h1>{escape(comparison.run)}</h1><p>{ABOUT}</p></header>"
    )


def _tables(comparison: Comparison) -> str:
    rows = "".join(
        f"<tr><td>{escape(row['what'])}</td>{_number_cell(row['before'])}"
        f"{_number_cell(row['after'])}</tr>"
        for row in figures(comparison)
    )
    measures = "".join(
        f"<div><b>{_measure(name, value)}</b><span>{AGREEMENT[name]}</span></div>"
        for name, value in agreement(comparison).items()
    )
    changes = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(change)}</td></tr>"
        for key, change in comparison.changed.items()
    )
    head = '<tr><th></th><th class="n">before</th><th class="n">after</th></tr>'
    parts = [
        f'<section class="figures">{measures}</section><p class="note">{AGREEMENT_LEGEND}</p>'
        if measures
        else "",
        f"<h2>What was changed</h2>{_scrolling_table(changes)}" if changes else "",
        f'<h2>Figures</h2><div class="card"><table>{head}{rows}</table></div>',
    ]
    return "".join(parts)


def _measure(name: str, value: float) -> str:
    return f"{value:.3f}" if name == "correlation" else f"{value:.1%}"


def _charts(comparison: Comparison) -> str:
    keys = " ".join(f'<span class="key b{index}"></span>{name}' for index, name in enumerate(SIDES))
    cards = [
        f'<figure class="card"><h3>{title}</h3>{chart}'
        f"<figcaption>share of samples {keys}</figcaption></figure>"
        for title, columns in (
            ("Rewards", comparison.rewards),
            ("Advantages", comparison.advantages),
        )
        if (chart := histogram(dict(zip(SIDES, columns, strict=True))))
    ]
    series = {name: _mean_rewards(comparison, side) for side, name in enumerate(SIDES)}
    curve = ""
    if chart := line_chart(series, width=970, height=220):
        curve = (
            '<figure class="card" style="margin-top: 14px"><h3>Mean reward by iteration</h3>'
            f"{chart}<figcaption>{keys}</figcaption></figure>"
        )
    return f'<h2>Distributions</h2><div class="grid2">{"".join(cards)}</div>{curve}'


def _iteration_table(comparison: Comparison) -> str:
    rows = []
    for row in comparison.iterations:
        values = (row.iteration, *row.reward, *row.groups, row.errors[1])
        cells = "".join(map(_number_cell, values))
        rows.append(f"<tr>{cells}<td>{escape(row.without)}</td></tr>")
    names = ("iteration", "reward before", "after", "groups before", "after", "errors")
    heads = "".join(f'<th class="n">{name}</th>' for name in names)
    head = f"<tr>{heads}<th>reason for no advantages</th></tr>"
    return f"<h2>By iteration</h2>{_scrolling_table(head + ''.join(rows))}"


def _example_table(comparison: Comparison) -> str:
    if not comparison.examples:
        return ""
    rows = "".join(
        f"<tr>{_number_cell(example.before)}{_number_cell(example.after)}"
        f'<td><div class="text">{escape(example.prompt)}</div></td>'
        f'<td><div class="text">{escape(example.response)}</div></td></tr>'
        for example in comparison.examples
    )
    head = (
        '<tr><th class="n">before</th><th class="n">after</th><th>prompt</th><th>response</th></tr>'
    )
    return f"<h2>Largest changes of reward</h2>{_scrolling_table(head + rows)}"


def _scrolling_table(rows: str) -> str:
    return f'<div class="card scroll"><table>{rows}</table></div>'


def _number_cell(value: float | int | None) -> str:
    if value is None:
        return '<td class="n">–</td>'
    text = f"{value:,}" if isinstance(value, int) else number(value)
    return f'<td class="n">{text}</td>'


def _mean_rewards(comparison: Comparison, side: int) -> list[tuple[float, float]]:
    return [
        (row.iteration, value)
        for row in comparison.iterations
        if (value := row.reward[side]) is not None
    ]


def _row(what: str, before: float | int | None, after: float | int | None) -> dict[str, Any]:
    return {"what": what, "before": before, "after": after}


def _measured(column: np.ndarray, measure: Callable[[np.ndarray], Any]) -> float | None:
    finite = column[np.isfinite(column)]
    return float(measure(finite)) if len(finite) else None


def _equal_share(group: np.ndarray, column: np.ndarray) -> float | None:
    """Return the share of groups whose finite values are all equal."""
    groups = [column[rows] for rows in _group_positions(group, np.isfinite(column))]
    return float(np.mean([np.ptp(values) == 0 for values in groups])) if groups else None


def _group_positions(group: np.ndarray, selected: np.ndarray) -> list[np.ndarray]:
    """Return the positions of the selected samples, one array per group."""
    positions = np.flatnonzero(selected)
    order = positions[np.argsort(group[positions], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []


def _pair_signs(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return 1 (kept), 0 (tied) or -1 (turned) for each pair with different values before."""
    first, second = np.triu_indices(len(before), 1)
    sign_before = np.sign(before[first] - before[second])
    sign_after = np.sign(after[first] - after[second])
    return (sign_before * sign_after)[sign_before != 0]
