"""Rows of the benchmark: values of ours and of a baseline, ratios with spread, table and JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

COLUMNS = ("part", "what", "ours", "baseline", "ratio", "note")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """One measured quantity. Values at the same index were measured one right after the other."""

    part: str
    what: str
    unit: str
    ours: tuple[float, ...]
    baseline: tuple[float, ...] = ()
    against: str = ""
    """Name of the baseline."""
    note: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """ours / baseline for each pair."""
        return tuple(
            mine / other for mine, other in zip(self.ours, self.baseline, strict=False) if other
        )

    def cells(self) -> tuple[str, ...]:
        """Return the cells in the order of COLUMNS."""
        baseline = f"{spread(self.baseline, self.unit)} ({self.against})" if self.baseline else ""
        return (
            self.part,
            self.what,
            spread(self.ours, self.unit),
            baseline,
            spread(self.ratios),
            self.note,
        )

    def as_json(self) -> dict[str, Any]:
        """Return all values with medians and ratios."""
        medians = {
            name: statistics.median(values)
            for name in ("ours", "baseline", "ratios")
            if (values := getattr(self, name))
        }
        return {**asdict(self), "ratios": self.ratios, "median": medians}


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return the median, and in brackets the smallest and largest of several values."""
    if not values:
        return ""
    text = f"{figure(statistics.median(values))}{f' {unit}' if unit else ''}"
    return f"{text} [{figure(min(values))}, {figure(max(values))}]" if len(values) > 1 else text


def figure(value: float) -> str:
    """Return a number with three significant digits and a thousands separator."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned Markdown table."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    shown = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [shown[0], rule, *shown[1:]])


def write(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Write the rows and the description of the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": [row.as_json() for row in rows]}, indent=1))


def alternate(
    sides: Mapping[str, Callable[[], Result]],
    *,
    repeats: int,
    until_s: float,
    say: Callable[[str], None],
) -> dict[str, list[Result]]:
    """Run the sides alternately (A B, B A, A B, ...) and return the results of each.

    There are `repeats` rounds, but at least one; fewer if another round would not end before
    `until_s` (of time.monotonic).
    """
    found: dict[str, list[Result]] = {name: [] for name in sides}
    longest_s = 0.0
    for number in range(repeats):
        started_s = time.monotonic()
        if number and started_s + longest_s > until_s:
            say(f"no time for round {number + 1} of {repeats}")
            break
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            side_s = time.monotonic()
            found[name].append(sides[name]())
            say(f"round {number + 1} of {repeats}: {name} took {time.monotonic() - side_s:.2f} s")
        longest_s = max(longest_s, time.monotonic() - started_s)
    return found
