"""Export a run as a timeline for https://ui.perfetto.dev and chrome://tracing.

The format is Chrome's Trace Event Format (JSON, times in microseconds). The timeline has two
processes:

- stages, with one row per stage, and more rows if iterations of a stage overlap;
- engines, with as many rows per engine as concurrent responses, and a curve of responses in flight.

Entry points: `timeline`, `write_timeline`. Source: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlpipe.observe.trace import Work

STAGES = 1
ENGINES = 2
"""Process numbers in the timeline."""
STAGE_ORDER = ("rollout", "reward", "advantage", "train", "sync", "checkpoint", "eval")


class Response(NamedTuple):
    """One sampled response."""

    iteration: int
    group_id: str
    index: int
    engine: str
    begin: float
    """Seconds since the epoch."""
    end: float
    tokens: int
    status: str
    reward: float | None


def timeline(works: Sequence[Work], responses: Sequence[Response]) -> Iterator[dict[str, Any]]:
    """Yield the events of the timeline."""
    yield _name("process_name", STAGES, 0, "stages")
    stages = sorted(
        {work.stage for work in works},
        key=lambda stage: (
            STAGE_ORDER.index(stage) if stage in STAGE_ORDER else len(STAGE_ORDER),
            stage,
        ),
    )
    by_stage = {stage: [work for work in works if work.stage == stage] for stage in stages}
    for row, work, row_name in _rows(by_stage):
        if row_name is not None:
            yield from (_name("thread_name", STAGES, row, row_name), _sort_index(STAGES, row))
        label = work.stage if work.iteration is None else f"{work.stage} {work.iteration}"
        extra = {"error": work.error} if work.error else {}
        yield _span(label, STAGES, row, work.begin, work.end, iteration=work.iteration, **extra)
    if not responses:
        return
    yield _name("process_name", ENGINES, 0, "engines")
    names = sorted({response.engine for response in responses})
    by_engine = {
        name or "engine": sorted(
            (response for response in responses if response.engine == name),
            key=lambda response: (response.begin, response),
        )
        for name in names
    }
    for row, response, row_name in _rows(by_engine):
        if row_name is not None:
            yield from (_name("thread_name", ENGINES, row, row_name), _sort_index(ENGINES, row))
        arguments = {
            "tokens": response.tokens,
            "status": response.status,
            "reward": response.reward,
            "iteration": response.iteration,
        }
        label = f"{response.group_id} #{response.index}"
        yield _span(label, ENGINES, row, response.begin, response.end, **arguments)
    for name, rows in by_engine.items():
        yield from _in_flight(name, rows)


def write_timeline(path: Path, works: Sequence[Work], responses: Sequence[Response]) -> int:
    """Write the timeline as gzipped JSON and return the number of events."""
    events = list(timeline(works, responses))
    # Renamed when complete: readers never open a part of the file.
    unfinished = path.with_name(f".{path.name}")
    with gzip.open(unfinished, "wt") as out:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, out)
    unfinished.replace(path)
    return len(events)


def _rows(groups: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, Any, str | None]]:
    """Yield (row, item, name of the row if the item is its first) for each item of each group.

    An item is on the first row of its group that is free at its start. Items are in order of start.
    """
    first_row = 1
    for name, items in groups.items():
        busy_until_s: list[float] = []
        for item in items:
            free_rows = (row for row, end_s in enumerate(busy_until_s) if end_s <= item.begin)
            row = next(free_rows, len(busy_until_s))
            is_new = row == len(busy_until_s)
            if is_new:
                busy_until_s.append(0.0)
            busy_until_s[row] = item.end
            yield first_row + row, item, name if is_new else None
        first_row += len(busy_until_s)


def _in_flight(engine: str, responses: Iterable[Response]) -> Iterator[dict[str, Any]]:
    """Yield the number of responses in flight on an engine, at each change."""
    changes = sorted([(r.begin, 1) for r in responses] + [(r.end, -1) for r in responses])
    number = 0
    for time_s, change in changes:
        number += change
        name = f"{engine}: responses in flight"
        yield {
            "ph": "C",
            "name": name,
            "pid": ENGINES,
            "tid": 0,
            "ts": round(time_s * 1e6),
            "args": {"responses": number},
        }


def _span(
    name: str, pid: int, tid: int, begin_s: float, end_s: float, **arguments: Any
) -> dict[str, Any]:
    # A clock that was set back can end work before its start.
    duration = max(0, round((end_s - begin_s) * 1e6))
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(begin_s * 1e6),
        "dur": duration,
        "args": arguments,
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _sort_index(pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": pid,
        "tid": tid,
        "args": {"sort_index": tid},
    }
