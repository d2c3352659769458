"""Follow the trace of a run: running stages, their usual seconds, and times of commits."""

from __future__ import annotations

import statistics
from pathlib import Path

import psutil

from rlpipe.observe.trace import Event, read_trace

FIRST_GUESS_S = 0.05


class Watch:
    """A follower of one trace file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []
        self._running: dict[tuple[str, int | None, int], Event] = {}
        self._seconds: dict[str, list[float]] = {}
        self._commits: dict[int, float] = {}

    def poll(self) -> list[Event]:
        """Read and return the new events."""
        fresh, self._offset = read_trace(self._path, self._offset)
        for event in fresh:
            self._take(event)
        self.events += fresh
        return fresh

    def running(self, stage: str) -> list[Event]:
        """Return the `begin` events of unfinished runs of a stage, in processes that live."""
        return [
            event
            for (name, _, pid), event in self._running.items()
            if name == stage and psutil.pid_exists(pid)
        ]

    def ended(self, begun: Event) -> float | None:
        """Return the end of the work that began with this event; None if it has not ended."""
        key = begun[1:3], begun.pid
        later = (
            e.time
            for e in self.events
            if (e[1:3], e.pid) == key and e.event != "begin" and e.time >= begun.time
        )
        return next(later, None)

    def typical_s(self, stage: str) -> float:
        """Return the median seconds of a stage's finished runs."""
        return statistics.median(self._seconds.get(stage) or [FIRST_GUESS_S])

    @property
    def commits(self) -> dict[int, float]:
        """Iteration → time of its commit.

        This is the end of its checkpoint stage or, without that, the start of the next advantage.
        """
        return self._commits

    @property
    def newest(self) -> int:
        """Newest committed iteration; -1 without one."""
        return max(self._commits, default=-1)

    def trained_after(self, time_s: float) -> float | None:
        """Return the end of the first training after this time."""
        return next(
            (
                e.time
                for e in self.events
                if e.stage == "train" and e.event == "end" and e.time > time_s
            ),
            None,
        )

    def failures(self, start_s: float, end_s: float) -> list[str]:
        """Return the stages that failed between two times, with the name of the error."""
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
