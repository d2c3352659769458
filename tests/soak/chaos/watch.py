"""What a run is doing now and did before, from its trace: stages that run, how long they take, when
iterations were committed.

Not here: the store's own word on what happened (`verify`).
"""

from __future__ import annotations

import statistics
from pathlib import Path

import psutil

from rlpipe.observe.trace import Event, read_trace

FIRST_GUESS_S = 0.05


class Watch:
    """Follows one trace file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []
        self._running: dict[tuple[str, int | None, int], Event] = {}
        self._seconds: dict[str, list[float]] = {}
        self._commits: dict[int, float] = {}

    def poll(self) -> list[Event]:
        """Read on; the new events."""
        fresh, self._offset = read_trace(self._path, self._offset)
        for event in fresh:
            self._take(event)
        self.events += fresh
        return fresh

    def running(self, stage: str) -> list[Event]:
        """The `begin` events of a stage that has not ended, in processes that live."""
        return [
            event
            for (name, _, pid), event in self._running.items()
            if name == stage and psutil.pid_exists(pid)
        ]

    def ended(self, begun: Event) -> float | None:
        """When the work that began with this event ended, as far as read; None if it did not."""
        key = begun[1:3], begun.pid
        later = (
            e.time
            for e in self.events
            if (e[1:3], e.pid) == key and e.event != "begin" and e.time >= begun.time
        )
        return next(later, None)

    def typical_s(self, stage: str) -> float:
        """Median seconds of a stage's finished work."""
        return statistics.median(self._seconds.get(stage) or [FIRST_GUESS_S])

    @property
    def commits(self) -> dict[int, float]:
        """Iteration → when it was committed: its checkpoint stage ended or, if that was not
        written, the next advantage began."""
        return self._commits

    @property
    def newest(self) -> int:
        """The newest iteration that is committed; -1 without one."""
        return max(self._commits, default=-1)

    def trained_after(self, time_s: float) -> float | None:
        """When the first training after this moment ended."""
        return next(
            (
                e.time
                for e in self.events
                if e.stage == "train" and e.event == "end" and e.time > time_s
            ),
            None,
        )

    def failures(self, start_s: float, end_s: float) -> list[str]:
        """Stages that ended with an error between two moments, with the error's name."""
        found = [e for e in self.events if e.event == "failed" and start_s <= e.time <= end_s]
        return [f"{event.stage} {event.iteration}: {event.error}" for event in found]

    def _take(self, event: Event) -> None:
        key = event.stage, event.iteration, event.pid
        if event.event == "begin":
            self._running[key] = event
            if event.stage == "advantage" and event.iteration:
                self._commits.setdefault(event.iteration - 1, event.time)
            return
        begun = self._running.pop(key, None)
        if event.event == "end":
            if begun is not None:
                self._seconds.setdefault(event.stage, []).append(event.time - begun.time)
            if event.stage == "checkpoint" and event.iteration is not None:
                self._commits.setdefault(event.iteration, event.time)
