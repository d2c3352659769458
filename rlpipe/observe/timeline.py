"""A run as a timeline that https://ui.perfetto.dev and chrome://tracing open: stages, turns of
shared GPUs, every response.

The format is Chrome's Trace Event Format (JSON, times in microseconds). Two processes: the stages,
a row for each (an iteration that overlaps another one's same stage has a row of its own), and the
engines, a row for each with as many responses beside each other as it sampled at once; over them
curves of responses in flight.

Not here: where events (`trace`) and samples (`run_rollouts`) come from. Source: "Trace Event
Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlpipe.observe.trace import Work

STAGES, ENGINES = 1, 2
"""Process numbers in the timeline."""
ORDER = ("rollout", "reward", "advantage", "train", "sync", "checkpoint", "eval")


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
    """The events of the timeline."""
    yield _name("process_name", STAGES, 0, "stages")
    stages = sorted(
        {work.stage for work in works},
        key=lambda s: (ORDER.index(s) if s in ORDER else len(ORDER), s),
    )
    for row, work, beside in _rows(
        {stage: [w for w in works if w.stage == stage] for stage in stages}
    ):
        if beside is not None:
            yield from (_name("thread_name", STAGES, row, beside), _sorted(STAGES, row))
        label = work.stage if work.iteration is None else f"{work.stage} {work.iteration}"
        extra = {"error": work.error} if work.error else {}
        yield _span(label, STAGES, row, work.begin, work.end, iteration=work.iteration, **extra)
    if not responses:
        return
    yield _name("process_name", ENGINES, 0, "engines")
    names = sorted({response.engine for response in responses})
    of_engine = {
        name or "engine": sorted(r for r in responses if r.engine == name) for name in names
    }
    for row, response, beside in _rows(
        {name: sorted(rows, key=lambda r: r.begin) for name, rows in of_engine.items()}
    ):
        if beside is not None:
            yield from (_name("thread_name", ENGINES, row, beside), _sorted(ENGINES, row))
        said = {
            "tokens": response.tokens,
            "status": response.status,
            "reward": response.reward,
            "iteration": response.iteration,
        }
        label = f"{response.group_id} #{response.index}"
        yield _span(label, ENGINES, row, response.begin, response.end, **said)
    for name, rows in of_engine.items():
        yield from _in_flight(name, rows)


def write_timeline(path: Path, works: Sequence[Work], responses: Sequence[Response]) -> int:
    """Write it gzipped, as Perfetto reads it; the number of events."""
    events = list(timeline(works, responses))
    unfinished = path.with_name(f".{path.name}")
    with gzip.open(unfinished, "wt") as out:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, out)
    unfinished.replace(path)
    return len(events)


def _rows(groups: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, Any, str | None]]:
    """Each item of each group (in order of its beginning) on the first row of its group that is
    free by then; and with the first item of a row, the row's name."""
    first = 1
    for name, items in groups.items():
        free_s: list[float] = []
        for item in items:
            row = next(
                (n for n, until_s in enumerate(free_s) if until_s <= item.begin), len(free_s)
            )
            new = row == len(free_s)
            if new:
                free_s.append(0.0)
            free_s[row] = item.end
            yield first + row, item, name if new else None
        first += len(free_s)


def _in_flight(engine: str, responses: Iterable[Response]) -> Iterator[dict[str, Any]]:
    """How many responses an engine was at, over time."""
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
    name: str, pid: int, tid: int, begin_s: float, end_s: float, **about: Any
) -> dict[str, Any]:
    duration = max(0, round((end_s - begin_s) * 1e6))
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(begin_s * 1e6),
        "dur": duration,
        "args": about,
    }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": pid,
        "tid": tid,
        "args": {"sort_index": tid},
    }
