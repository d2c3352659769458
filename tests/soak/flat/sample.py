"""Sample a running stack: memory by process, and the cost of the listings of a resume.

`look` takes a sample, `summarise` and `table` compare the first with the last.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from tests.soak.chaos.processes import Family, title

MIB = 2**20
S3 = "s3 server"
"""The store usually runs elsewhere, and its memory grows with its content."""
NAMES = {
    "tools.prefect_server": "prefect server",
    "weed": S3,
    "ray::": "",
    "sglang::": "",
    "rlpipe.engines.sglang": "engine",
    "tools.train": "flow",
    "gcs_server": "ray gcs",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "ray dashboard",
    "log_monitor.py": "ray log monitor",
}
"""Part of a command line → name in the table; empty: the first word of the title."""


@dataclass(frozen=True)
class Look:
    """One sample. `pss` and `rss`: process → MiB."""

    iteration: int
    time: float
    pss: dict[str, float]
    rss: dict[str, float]
    listing_s: float
    objects: int


def look(family: Family, files: Files, run: str, iteration: int) -> Look:
    """Take a sample."""
    pss: dict[str, float] = {}
    rss: dict[str, float] = {}
    for name, process in named(family.look()):
        try:
            memory = process.memory_full_info()
        except psutil.Error:
            continue
        pss[name] = memory.pss / MIB
        rss[name] = memory.rss / MIB
    start = time.perf_counter()
    Branches(files).newest(run)
    Epochs(files).newest(run)
    spent = time.perf_counter() - start
    return Look(iteration, time.time(), pss, rss, spent, len(files.list(f"branches/{run}")))


def named(processes: Sequence[psutil.Process]) -> list[tuple[str, psutil.Process]]:
    """Return processes by name, oldest first; a second of a name is `name #2`."""
    seen: Counter[str] = Counter()
    found = []
    for process in sorted(processes, key=lambda process: (process.create_time(), process.pid)):
        if (name := label(title(process))) is not None:
            seen[name] += 1
            found.append((name if seen[name] == 1 else f"{name} #{seen[name]}", process))
    return found


def label(command: str) -> str | None:
    """Return the name of a process; None for helpers that take no part in an iteration."""
    for text, name in NAMES.items():
        if text in command:
            return name or command.split()[0].removeprefix("ray::").split(".")[0]
    return None


def compare(first: Sequence[float], last: Sequence[float]) -> dict[str, float] | None:
    """Return both medians and the change; None if one side is empty."""
    if not first or not last:
        return None
    before = statistics.median(first)
    after = statistics.median(last)
    return {
        "first": before,
        "last": after,
        "change": after - before,
        "change_fraction": (after - before) / before if before else 0.0,
    }


def summarise(
    looks: Sequence[Look], timing: Sequence[dict[str, Any]], *, window: int
) -> dict[str, Any]:
    """Compare the first `window` iterations with the last.

    `timing`: the lines of timing.jsonl, in order. The very first iteration warms up and does not
    count.
    """
    end = max((look.iteration for look in looks), default=0)
    early = [look for look in looks if 1 <= look.iteration <= window]
    late = [look for look in looks if look.iteration > end - window]
    names = sorted({name for look in late for name in look.pss})
    rows = {
        f"{name} PSS MiB": (
            [a.pss[name] for a in early if name in a.pss],
            [b.pss[name] for b in late],
        )
        for name in names
    }
    total = [
        [sum(mib for name, mib in look.pss.items() if name != S3) for look in looks]
        for looks in (early, late)
    ]
    rows["all without the store PSS MiB"] = total[0], total[1]
    iterations = [entry for entry in timing if "iteration_s" in entry][1:]
    for what, figure in (
        ("iteration s", lambda entry: entry["iteration_s"]),
        ("orchestration s", lambda entry: entry["iteration_s"] - entry["work_s"]),
    ):
        values = [figure(entry) for entry in iterations]
        rows[what] = values[:window], values[-window:]
    rows["listing of a resume s"] = (
        [look.listing_s for look in early],
        [look.listing_s for look in late],
    )
    return {name: found for name, (a, b) in rows.items() if (found := compare(a, b))}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the comparison as text for a terminal."""
    width = max(map(len, rows), default=0)
    lines = [f"{'':{width}}  {'first':>9}  {'last':>9}  {'change':>9}"]
    lines += [
        f"{name:{width}}  {row['first']:9.3f}  {row['last']:9.3f}  {row['change']:+9.3f} "
        f"({row['change_fraction']:+.1%})"
        for name, row in rows.items()
    ]
    return "\n".join(lines)
