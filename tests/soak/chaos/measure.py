"""Cost of each hit, and the table of all hits. Pure functions of times.

    recovery_s         commit k+1 − commit k−1 − 2 × undisturbed iteration, ≥ 0; hit in iteration k
    training_again_s   from the kill to the end of the next training − undisturbed training, ≥ 0

Two iterations, because a death is often noticed only when the process is needed next.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Hit:
    """One kill and its effects. Times in seconds since 1970."""

    s: int
    victim: str
    stage: str
    iteration: int
    time: float
    pid: int
    title: str
    recovery_s: float | None = None
    training_again_s: float | None = None
    stuck: bool = False
    flow_restarts: int = 0
    """Restarts of the flow process, without the one of a hit on the flow itself."""
    failures: list[str] = field(default_factory=list)
    """Stages that failed after the kill, with the name of the error."""


def undisturbed_s(commits: Mapping[int, float], quiet: Collection[int]) -> float | None:
    """Return the median seconds of these iterations, from commit to commit; None without any."""
    times = [commits[k] - commits[k - 1] for k in quiet if k in commits and k - 1 in commits]
    return statistics.median(times) if times else None


def recovery_s(commits: Mapping[int, float], iteration: int, undisturbed: float) -> float | None:
    """Return the seconds that a hit in this iteration cost; None without both commits."""
    if not {iteration - 1, iteration + 1} <= set(commits):
        return None
    return max(0.0, commits[iteration + 1] - commits[iteration - 1] - 2 * undisturbed)


def rows(
    hits: Iterable[Hit], lost: Mapping[int, int], twice: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Return a row per S, victim and stage.

    `lost` and `twice` count for a whole run (by S) and belong to no single hit.
    """
    by_pair: dict[tuple[int, str, str], list[Hit]] = {}
    for hit in hits:
        by_pair.setdefault((hit.s, hit.victim, hit.stage), []).append(hit)
    return [
        {
            "s": s,
            "victim": victim,
            "stage": stage,
            "hits": len(found),
            "lost": lost.get(s, 0),
            "twice": twice.get(s, 0),
            "stuck": sum(hit.stuck for hit in found),
            "flow_restarts": sum(hit.flow_restarts for hit in found),
            **_spread("recovery_s", [hit.recovery_s for hit in found]),
            **_spread("training_again_s", [hit.training_again_s for hit in found]),
        }
        for (s, victim, stage), found in sorted(by_pair.items())
    ]


def as_record(hit: Hit) -> dict[str, Any]:
    """Return a hit as JSON."""
    return asdict(hit)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as text for a terminal."""
    if not rows:
        return "no hits"
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {
        f"{name}_median": statistics.median(known) if known else None,
        f"{name}_max": max(known, default=None),
    }


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
