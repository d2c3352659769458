"""Show a run in the terminal: live lines for the run and its stage, one line per iteration.

    with Progress("spell_backward", total_iterations=300) as progress:
        progress.stage("rollout", done=96, total=256, tokens=12_000, reward=0.41)
        progress.stage("train")
        progress.iteration({"reward": 0.43, "accuracy": 0.52})

A thread draws, so every call returns at once and async code can call it. Without a terminal, only
one plain line per iteration is written. Programs should read the store, not this output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class _Stage:
    name: str
    started: float
    done: float | None = None
    total: float | None = None
    tokens: int | None = None
    reward: float | None = None
    note: str = ""


@dataclass(slots=True)
class _Iteration:
    started: float
    seconds: dict[str, float] = field(default_factory=dict)


class Progress:
    """The progress of one run, used as a context by the driver.

    `first_iteration`: the iteration at which a resumed run starts; `begin` sets it later. `stream`:
    default is standard error. `clock`: returns seconds.
    """

    def __init__(
        self,
        run: str,
        total_iterations: int,
        first_iteration: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.total = total_iterations
        self.first = first_iteration
        self._clock = clock
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._started = clock()
        self._iteration = _Iteration(self._started)
        self._finished = 0
        self._stage: _Stage | None = None
        # Transient: the live lines vanish at the end, and the lines of iterations stay.
        self._live = Live(
            get_renderable=self._live_lines,
            console=self._console,
            refresh_per_second=5,
            transient=True,
            auto_refresh=True,
        )

    def __enter__(self) -> Progress:
        self._started = self._iteration.started = self._clock()
        # Without a terminal (a log file), redrawn lines would fill the log.
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def begin(self, first_iteration: int) -> None:
        """Start timing with this iteration.

        Time before (starting processes, loading weights) counts for no iteration.
        """
        self.first = first_iteration
        self._started = self._clock()
        self._stage = None
        self._finished = 0
        self._iteration = _Iteration(self._started)

    def stage(
        self,
        name: str,
        *,
        done: float | None = None,
        total: float | None = None,
        tokens: int | None = None,
        reward: float | None = None,
        note: str = "",
    ) -> None:
        """Show the running stage and its progress. A new name ends the previous stage.

        `tokens`: since the stage started. `reward`: mean so far. Values of None are not shown.
        """
        if self._stage is None or self._stage.name != name:
            self._end_stage()
            self._stage = _Stage(name, self._clock())
        stage = self._stage
        stage.done = done
        stage.total = total
        stage.tokens = tokens
        stage.reward = reward
        stage.note = note

    def iteration(self, summary: Mapping[str, float | int | str]) -> None:
        """End an iteration: print a line with these values, seconds by stage, and time left."""
        self._end_stage()
        self._finished += 1
        now = self._clock()
        line = self._iteration_line(summary, now)
        self._iteration = _Iteration(now)
        self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line of text."""
        self._console.print(Text(text), soft_wrap=True)

    def _end_stage(self) -> None:
        if self._stage is not None:
            # A stage can run several times in an iteration; its times add up.
            name = self._stage.name
            before = self._iteration.seconds.get(name, 0.0)
            self._iteration.seconds[name] = before + self._clock() - self._stage.started
            self._stage = None

    @property
    def _done(self) -> int:
        """Number of finished iterations, including those of earlier processes."""
        return self.first + self._finished

    def _iteration_line(self, summary: Mapping[str, float | int | str], now: float) -> Text:
        width = len(str(self.total))
        line = Text(f"{self.run} ", style="dim")
        line.append(f"{self._done:>{width}}/{self.total}", style="bold")
        for name, value in summary.items():
            line.append(f"  {name} ", style="dim").append(_value_text(value))
        line.append(f"  {duration(now - self._iteration.started)}")
        if self._iteration.seconds:
            stages = " ".join(
                f"{name} {seconds:.1f}" for name, seconds in self._iteration.seconds.items()
            )
            line.append(f" ({stages})", style="dim")
        left = self._seconds_left(now)
        return line.append(f"  {duration(left)} left", style="dim") if left else line

    def _seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last iteration at the mean speed so far.

        None before the first and after the last iteration.
        """
        if not self._finished or self._done >= self.total:
            return None
        return (now - self._started) / self._finished * (self.total - self._done)

    def _live_lines(self) -> Group:
        now = self._clock()
        stage = self._stage
        left = self._seconds_left(now)
        parts = [
            f"iteration {min(self._done + 1, self.total)}/{self.total}",
            duration(now - self._started),
        ]
        if left:
            parts.append(f"{duration(left)} left")
        rows = [_row(self.run, self._done, self.total, parts)]
        if stage is not None:
            values = _stage_values(stage, now - stage.started)
            rows.append(_row(f"  {stage.name}", stage.done, stage.total, values))
        return Group(*rows)


def _row(name: str, done: float | None, total: float | None, values: list[str]) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=18, no_wrap=True)
    row.add_column(width=24)
    row.add_column(no_wrap=True)
    bar = ProgressBar(
        total=total or 1, completed=done or 0, width=24, pulse=done is None or not total
    )
    row.add_row(Text(name, style="bold", overflow="ellipsis"), bar, Text("  ".join(values)))
    return row


def _stage_values(stage: _Stage, seconds: float) -> list[str]:
    values = []
    if stage.done is not None and stage.total:
        values.append(f"{stage.done:,.0f}/{stage.total:,.0f}")
    if stage.tokens is not None and seconds > 0:
        values.append(f"{stage.tokens / seconds:,.0f} tokens/s")
    if stage.reward is not None:
        values.append(f"reward {_value_text(stage.reward)}")
    if stage.note:
        values.append(stage.note)
    values.append(duration(seconds))
    if stage.done and stage.total and stage.done < stage.total:
        values.append(f"{duration(seconds / stage.done * (stage.total - stage.done))} left")
    return values


def _value_text(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"
    return f"{value:,}" if isinstance(value, int) else value


def duration(seconds: float) -> str:
    """Return seconds as text: `0.03 s`, `4.2 s`, `1:05`, `2:03:09`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
