"""The trace of a run: when each stage's own work began and how it ended, a JSON line each in
`{home}/{run}/trace.jsonl`.

A line is one small write to a file that is open for appending, so several processes may write at
once, also to one that somebody reads. A process that is killed leaves a `begin` without an end.
Work that is not done (a stage that is reused) is not in it. What cannot be written (the disk is
full) is left out: the stage itself says what is wrong, by its own error.

Not here: what happened (the store), or seconds by stage (`progress`, the nodes).
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
    """Something that began or ended. `time` is in seconds since the epoch; `failed` is an end by an
    error."""

    time: float
    iteration: int | None
    stage: str
    event: Literal["begin", "end", "failed"]
    pid: int
    error: str | None = None


class Work(NamedTuple):
    """A stage's own work, in seconds since the epoch. `error`: how it failed, if it did."""

    stage: str
    iteration: int | None
    begin: float
    end: float
    error: str | None = None


@contextmanager
def traced(folder: Path, stage: str, iteration: int | None) -> Iterator[None]:
    """Write when this block begins, and when and how it ends, to the trace in `folder`."""

    def write(event: Literal["begin", "end", "failed"], error: str | None = None) -> None:
        line = (
            json.dumps(Event(time.time(), iteration, stage, event, os.getpid(), error)._asdict())
            + "\n"
        )
        with suppress(OSError):
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
    """The events from byte `offset` on, and where the next ones will begin. A file that is not
    there yet has none.

    Raises: ObjectCorrupt naming a line that is none.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as trace:
        trace.seek(offset)
        whole = trace.read().rpartition(b"\n")[0]
    events = list[Event]()
    end = offset
    for line in whole.split(b"\n") if whole else ():
        events.append(_event(line, path, end))
        end += len(line) + 1
    return events, end


def _event(line: bytes, path: Path, at: int) -> Event:
    try:
        event = Event(**json.loads(line))
        if event.event in ("begin", "end", "failed"):
            return event
        found = event.event
    except (ValueError, TypeError, RecursionError) as error:
        found = error
    do = "take the line out of the file: what it says is said nowhere else, but nothing is decided by it"
    raise ObjectCorrupt(
        "not an event", where=f"{path}, byte {at}", found=f"{line[:80]!r}: {found}", do=do
    )


def works(events: Iterable[Event]) -> list[Work]:
    """What ended, in order of its beginning. Work that was retried is there as often as it ended;
    what never ended is not."""
    open_at: dict[tuple[int, str, int | None], float] = {}
    found: list[Work] = []
    for event in events:
        key = event.pid, event.stage, event.iteration
        if event.event == "begin":
            open_at[key] = event.time
        elif (begin := open_at.pop(key, None)) is not None:
            found.append(Work(event.stage, event.iteration, begin, event.time, event.error))
    return sorted(found, key=lambda work: work.begin)
