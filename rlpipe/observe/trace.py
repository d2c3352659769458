"""The trace of a run: start and end of each stage, as JSON lines in `{home}/{run}/trace.jsonl`.

A line is one small write to a file opened for appending. Several processes can therefore write at
the same time, while others read. A killed process leaves a `begin` without an end. A reused stage
does no work and has no lines. Entry points: `traced`, `read_trace`, `works`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from rlpipe.errors import ObjectCorrupt

FILE = "trace.jsonl"


class Event(NamedTuple):
    """Start or end of a stage's work.

    `time` is in seconds since the epoch; `failed` is the end by an error.
    """

    time: float
    iteration: int | None
    stage: str
    event: Literal["begin", "end", "failed"]
    pid: int
    error: str | None = None


class Work(NamedTuple):
    """Finished work of a stage, in seconds since the epoch. `error` is the type of its error."""

    stage: str
    iteration: int | None
    begin: float
    end: float
    error: str | None = None


@contextmanager
def traced(folder: Path, stage: str, iteration: int | None) -> Iterator[None]:
    """Write start and end of the context to the trace in `folder`."""

    def write(event: Literal["begin", "end", "failed"], error: str | None = None) -> None:
        fields = Event(time.time(), iteration, stage, event, os.getpid(), error)._asdict()
        line = json.dumps(fields) + "\n"
        # A full disk must not fail the stage here; the stage reports it by its own error.
        with suppress(OSError):
            # One write with O_APPEND: lines of several processes never mix.
            descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    write("begin")
    try:
        yield
    except BaseException as error:
        write("failed", type(error).__name__)
        raise
    write("end")


def read_trace(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events from byte `offset` on, and the offset of the next ones.

    A missing file has no events. Raises: ObjectCorrupt naming a malformed line.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as trace:
        trace.seek(offset)
        # The last line can be incomplete while another process writes it.
        complete = trace.read().rpartition(b"\n")[0]
    events = list[Event]()
    end = offset
    for line in complete.split(b"\n") if complete else ():
        events.append(_event(line, path, end))
        end += len(line) + 1
    return events, end


def _event(line: bytes, path: Path, offset: int) -> Event:
    try:
        event = Event(**json.loads(line))
        if event.event in ("begin", "end", "failed"):
            return event
        problem = f"unknown event {event.event!r}"
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    raise ObjectCorrupt(
        "not an event of the trace",
        where=f"{path}, byte {offset}",
        found=f"{line[:80]!r}: {problem}",
        do="delete the line; only the timeline and the idle times use it",
    )


def works(events: Iterable[Event]) -> list[Work]:
    """Return finished work, in order of its start.

    Each finished attempt of retried work is included; work without an end is not.
    """
    started: dict[tuple[int, str, int | None], float] = {}
    finished: list[Work] = []
    for event in events:
        key = event.pid, event.stage, event.iteration
        if event.event == "begin":
            started[key] = event.time
        elif (begin := started.pop(key, None)) is not None:
            # An end without a begin is omitted: reading can start in the middle of the file.
            finished.append(Work(event.stage, event.iteration, begin, event.time, event.error))
    return sorted(finished, key=lambda work: work.begin)
