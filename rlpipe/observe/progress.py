"""A run in the terminal: a live line for the stage that runs, one line for every iteration that is
done.

    with Progress("spell_backward", total_iterations=300) as progress:
        progress.stage("rollout", done=96, total=256, tokens=12_000, reward=0.41)
        progress.stage("train")
        progress.iteration({"reward": 0.43, "accuracy": 0.52})

Calls return at once (drawing happens in a thread of its own), so it is safe to use from async code.
Where the output is not a terminal it is quiet: one plain line an iteration. Not here: logging, or
anything that a program should read.
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
    """The progress of one run. Made by the process that drives it, used as a context, for one run
    only.

    `first_iteration` is where a resumed run begins; where that is found out later, `begin` says it.
    `stream` is standard error unless given; `clock` counts seconds.
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
        self._begun = clock()
        self._iteration = _Iteration(self._begun)
        self._finished = 0
        self._stage: _Stage | None = None
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=5,
            transient=True,
            auto_refresh=True,
        )

    def __enter__(self) -> Progress:
        self._begun = self._iteration.started = self._clock()
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
        """Iterations begin now, with this one: what came before (starting processes, loading
        weights) counts for no iteration."""
        self.first = first_iteration
        self._begun = self._clock()
        self._stage, self._finished, self._iteration = None, 0, _Iteration(self._begun)

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
        """The stage that runs now, and how far it is. Another name than before ends the stage
        before.

        `tokens` are those since the stage began, `reward` the mean so far. What is not given is not
        shown.
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
        """An iteration is done: one line with these figures in their order, its stages' seconds,
        and the time left."""
        self._end_stage()
        self._finished += 1
        now = self._clock()
        line = self._line(summary, now)
        self._iteration = _Iteration(now)
        self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line between the others, such as where the report was written."""
        self._console.print(Text(text), soft_wrap=True)

    def _end_stage(self) -> None:
        if self._stage is not None:
            spent = (
                self._iteration.seconds.get(self._stage.name, 0.0)
                + self._clock()
                - self._stage.started
            )
            self._iteration.seconds[self._stage.name] = spent
            self._stage = None

    @property
    def _done(self) -> int:
        """Iterations done, those of earlier processes too."""
        return self.first + self._finished

    def _line(self, summary: Mapping[str, float | int | str], now: float) -> Text:
        width = len(str(self.total))
        line = Text(f"{self.run} ", style="dim")
        line.append(f"{self._done:>{width}}/{self.total}", style="bold")
        for name, value in summary.items():
            line.append(f"  {name} ", style="dim").append(_figure(value))
        line.append(f"  {duration(now - self._iteration.started)}")
        if self._iteration.seconds:
            stages = " ".join(
                f"{name} {seconds:.1f}" for name, seconds in self._iteration.seconds.items()
            )
            line.append(f" ({stages})", style="dim")
        left = self._left(now)
        return line.append(f"  {duration(left)} left", style="dim") if left else line

    def _left(self, now: float) -> float | None:
        """Seconds until the last iteration, at the speed so far; None before the first or after the
        last."""
        if not self._finished or self._done >= self.total:
            return None
        return (now - self._begun) / self._finished * (self.total - self._done)

    def _picture(self) -> Group:
        now = self._clock()
        stage = self._stage
        left = self._left(now)
        parts = [
            f"iteration {min(self._done + 1, self.total)}/{self.total}",
            duration(now - self._begun),
        ]
        if left:
            parts.append(f"{duration(left)} left")
        rows = [_row(self.run, self._done, self.total, parts)]
        if stage is not None:
            rows.append(
                _row(
                    f"  {stage.name}",
                    stage.done,
                    stage.total,
                    _stage_figures(stage, now - stage.started),
                )
            )
        return Group(*rows)


def _row(name: str, done: float | None, total: float | None, figures: list[str]) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=18, no_wrap=True)
    row.add_column(width=24)
    row.add_column(no_wrap=True)
    bar = ProgressBar(
        total=total or 1, completed=done or 0, width=24, pulse=done is None or not total
    )
    row.add_row(Text(name, style="bold", overflow="ellipsis"), bar, Text("  ".join(figures)))
    return row


def _stage_figures(stage: _Stage, seconds: float) -> list[str]:
    figures = []
    if stage.done is not None and stage.total:
        figures.append(f"{stage.done:,.0f}/{stage.total:,.0f}")
    if stage.tokens is not None and seconds > 0:
        figures.append(f"{stage.tokens / seconds:,.0f} tokens/s")
    if stage.reward is not None:
        figures.append(f"reward {_figure(stage.reward)}")
    if stage.note:
        figures.append(stage.note)
    figures.append(duration(seconds))
    if stage.done and stage.total and stage.done < stage.total:
        figures.append(f"{duration(seconds / stage.done * (stage.total - stage.done))} left")
    return figures


def _figure(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"
    return f"{value:,}" if isinstance(value, int) else value


def duration(seconds: float) -> str:
    """Seconds as people say them: `0.03 s`, `4.2 s`, `1:05`, `2:03:09`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
