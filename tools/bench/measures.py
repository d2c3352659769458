"""What a part of the benchmark found, and how it is shown: rows of a table, ratios with their
spread, a JSON file.

Not here: measuring.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

COLUMNS = ("part", "what", "ours", "baseline", "ratio", "note")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Row:
    """One figure, measured one or more times. Values of the same place were measured one right
    after the other."""

    part: str
    what: str
    unit: str
    ours: tuple[float, ...]
    baseline: tuple[float, ...] = ()
    against: str = ""
    """What the baseline is."""
    note: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """ours / baseline, pair by pair."""
        return tuple(
            mine / other for mine, other in zip(self.ours, self.baseline, strict=False) if other
        )

    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
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
        """All of it, with medians and ratios."""
        medians = {
            name: statistics.median(values)
            for name in ("ours", "baseline", "ratios")
            if (values := getattr(self, name))
        }
        return {**asdict(self), "ratios": self.ratios, "median": medians}


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median, and in brackets smallest and largest if there is more than one value."""
    if not values:
        return ""
    text = f"{figure(statistics.median(values))}{f' {unit}' if unit else ''}"
    return f"{text} [{figure(min(values))}, {figure(max(values))}]" if len(values) > 1 else text


def figure(value: float) -> str:
    """Three digits that count, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def table(rows: Sequence[Row]) -> str:
    """As Markdown, in columns that line up."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    shown = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [shown[0], rule, *shown[1:]])


def write(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """The rows, and what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": [row.as_json() for row in rows]}, indent=1))


def alternate(
    sides: Mapping[str, Callable[[], Answer]],
    *,
    repeats: int,
    until_s: float,
    say: Callable[[str], None],
) -> dict[str, list[Answer]]:
    """Each side's answers, the sides taking turns: A B, B A, A B … `repeats` rounds, or fewer if
    `until_s` (of time.monotonic) would come before the end of another; at least one."""
    found: dict[str, list[Answer]] = {name: [] for name in sides}
    longest_s = 0.0
    for number in range(repeats):
        begun_s = time.monotonic()
        if number and begun_s + longest_s > until_s:
            say(f"no time for round {number + 1} of {repeats}")
            break
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            turn_s = time.monotonic()
            found[name].append(sides[name]())
            say(f"round {number + 1} of {repeats}: {name} took {time.monotonic() - turn_s:.2f} s")
        longest_s = max(longest_s, time.monotonic() - begun_s)
    return found
