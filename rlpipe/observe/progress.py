"""Show a run in the terminal: a live block for the run and its stages.

    with Progress("spell_backward", total_iterations=300) as progress:
        progress.stage("rollout", 0, done=96, total=256, tokens=12_000, reward=0.41)
        progress.stage("train", 0)
        progress.iteration({"reward": 0.43, "accuracy": 0.52}, 0)

Iterations in flight run their stages at the same time, so each stage belongs to an iteration and
has a clock of its own. On a terminal, the block has a bar for the run, the values of the last
iteration with the curve of the reward, and a bar for each running stage. Without a terminal there
is one plain line per iteration.
A stage that says what it waits for shows this once nothing has changed for some seconds: in its row
of the block, or as plain lines.
`terminal.Screen` draws, so every call returns at once and async code can call it. Programs should
read the store, not this output.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlpipe.observe.terminal import Screen, current, duration

CURVE_LABEL = "reward"
"""Label of the value whose curve the block shows."""
LEVELS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = (8, 40)
"""Smallest and largest width in columns, as for bars and names."""
BAR_WIDTH = (8, 40)
NAME_WIDTH = (16, 28)
VALUES_WIDTH = 40
"""Columns that are kept for the values behind a bar, so that the bar does not jump."""
GAP = 2
"""Columns between two values."""
SMALLEST_REST_S = 0.1
"""Shortest time between stages that the line of an iteration shows."""
WAIT_SHOWN_AFTER_S = 10.0
"""The row of a stage shows its wait after this time without a change."""
PLAIN_WAIT_S = (30.0, 600.0)
"""Without a block, the first line of a long stage comes after the first time. Each next one comes
after twice the time of the one before, at most the second time later."""
CHECK_S = 5.0
"""Time between two looks at the stages, without a block."""


@dataclass(slots=True)
class _Stage:
    name: str
    started: float
    done: float | None = None
    total: float | None = None
    tokens: int | None = None
    reward: float | None = None
    note: str = ""
    waits_for: str = ""
    unit: str = ""
    changed: float = 0.0
    """Time of the last change of `done`, `total` and `tokens`."""
    line_after_s: float = PLAIN_WAIT_S[0]
    """Time since the start after which the next plain line is due."""

    def advance(
        self, now: float, done: float | None, total: float | None, tokens: int | None
    ) -> None:
        """Set the counts."""
        if (done, total, tokens) != (self.done, self.total, self.tokens):
            self.changed = now
        self.done = done
        self.total = total
        self.tokens = tokens

    def wait_text(self, now: float) -> str:
        """Return how long nothing has changed, what is waited for, and how much is open."""
        return f"{self._open_text()}waiting {duration(now - self.changed)} for {self.waits_for}"

    def plain_text(self, now: float) -> str:
        """Return how long the stage has run, what it waits for, and how much is open."""
        running = f"running for {duration(now - self.started)}"
        return f"{self._open_text()}{running}, waiting for {self.waits_for}"

    def _open_text(self) -> str:
        if self.done is None or not self.total:
            return ""
        return f"{self.total - self.done:,.0f} of {self.total:,.0f} {self.unit} open, "


@dataclass(slots=True)
class _Busy:
    """Time in which at least one stage of a name ran, since the end of the last iteration."""

    running: int = 0
    since: float = 0.0
    seconds: float = 0.0

    def start(self, now: float) -> None:
        """Count a stage that starts."""
        if not self.running:
            self.since = now
        self.running += 1

    def end(self, now: float) -> None:
        """Count a stage that ends."""
        self.running -= 1
        if not self.running:
            self.seconds += now - self.since

    def until(self, now: float) -> float:
        """Return the seconds until now."""
        return self.seconds + (now - self.since if self.running else 0.0)

    def restart(self, now: float) -> None:
        """Count from now on."""
        self.since = now
        self.seconds = 0.0


class Progress:
    """The progress of one run, used as a context by the driver.

    It draws on the open `Screen` of the process, else on one of its own. `first_iteration`: the
    iteration at which a resumed run starts; `begin` sets it later. `may_end_early`: the time left
    is an upper bound. `stream`: default is standard error. `clock`: returns seconds.
    """

    def __init__(
        self,
        run: str,
        total_iterations: int,
        first_iteration: int = 0,
        *,
        may_end_early: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.total = total_iterations
        self.first = first_iteration
        self._at_most = "at most " if may_end_early else ""
        self._clock = clock
        opened = current() if stream is None else None
        self._screen = opened or Screen(stream=stream, clock=clock)
        self._contexts = ExitStack()
        self._drawn = False
        self._started = clock()
        self._last_end = self._started
        self._finished = 0
        self._stages: dict[int | None, _Stage] = {}
        self._seconds: dict[int | None, dict[str, float]] = {}
        self._busy: dict[str, _Busy] = {}
        self._curve: list[float] = []
        self._summary: Mapping[str, float | int | str] = {}
        self._last_line: Text | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        self._started = self._last_end = self._clock()
        self._contexts.enter_context(self._screen)
        self._drawn = self._screen.is_live and current() is self._screen
        if self._drawn:
            self._screen.add(self._block)
        elif not self._screen.quiet:
            threading.Thread(target=self._say_waits_until_the_end, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._screen.remove(self._block)
        self._contexts.close()
        # The block is gone, and its last values stay as a line.
        if self._drawn and self._last_line is not None:
            self._screen.say(self._last_line)
        self._drawn = False

    def begin(self, first_iteration: int) -> None:
        """Start timing with this iteration.

        Time before (starting processes, loading weights) counts for no iteration.
        """
        self.first = first_iteration
        self._started = self._last_end = self._clock()
        self._stages.clear()
        self._seconds.clear()
        self._busy.clear()
        self._finished = 0

    def stage(
        self,
        name: str,
        iteration: int | None = None,
        *,
        done: float | None = None,
        total: float | None = None,
        tokens: int | None = None,
        reward: float | None = None,
        note: str = "",
        waits_for: str = "",
        unit: str = "samples",
    ) -> None:
        """Show the running stage of an iteration and its progress.

        A new name ends the previous stage of the iteration. `iteration`: None for work of no single
        iteration. `tokens`: since the stage started. `reward`: mean so far. Values of None are not
        shown. `waits_for`: what the stage waits for, with the key of the deadline; shown if nothing
        changes. `unit`: of `done` and `total`.
        """
        stage = self._stages.get(iteration)
        if stage is None or stage.name != name:
            self.end_stage(iteration)
            now = self._clock()
            stage = self._stages[iteration] = _Stage(name, now, changed=now)
            self._busy.setdefault(name, _Busy()).start(now)
        stage.advance(self._clock(), done, total, tokens)
        stage.reward = reward
        stage.note = note
        stage.waits_for = waits_for
        stage.unit = unit

    def end_stage(self, iteration: int | None = None) -> None:
        """End the running stage of an iteration, if there is one."""
        stage = self._stages.pop(iteration, None)
        if stage is None:
            return
        now = self._clock()
        self._busy[stage.name].end(now)
        # A stage can run several times in an iteration; its times add up.
        seconds = self._seconds.setdefault(iteration, {})
        seconds[stage.name] = seconds.get(stage.name, 0.0) + now - stage.started

    @contextmanager
    def running(
        self, name: str, iteration: int | None = None, *, note: str = "", waits_for: str = ""
    ) -> Iterator[None]:
        """Show a stage for the length of a block. Arguments: as for `stage`."""
        self.stage(name, iteration, note=note, waits_for=waits_for)
        try:
            yield
        finally:
            self.end_stage(iteration)

    def busy_seconds(self, name: str) -> float:
        """Return the time in which at least one stage of this name ran, since the last line."""
        busy = self._busy.get(name)
        return busy.until(self._clock()) if busy else 0.0

    def iteration(
        self,
        summary: Mapping[str, float | int | str],
        iteration: int | None = None,
        work_s: Mapping[str, float] | None = None,
    ) -> str:
        """End an iteration with these values. Returns its plain line.

        The line also has the seconds by stage and the time left. `work_s`: seconds by stage
        of an iteration that another process ran; None: those of this process.
        """
        seconds: dict[str, float] = {}
        for ended in dict.fromkeys((None, iteration)):
            self.end_stage(ended)
            for name, spent in self._seconds.pop(ended, {}).items():
                seconds[name] = seconds.get(name, 0.0) + spent
        self._finished += 1
        now = self._clock()
        self._last_line = self._iteration_line(summary, work_s or seconds, now)
        self._last_end = now
        for busy in self._busy.values():
            busy.restart(now)
        self._summary = dict(summary)
        reward = summary.get(CURVE_LABEL)
        if isinstance(reward, int | float) and math.isfinite(reward):
            self._curve.append(reward)
        if not self._drawn and not self._screen.quiet:
            self._screen.say(self._last_line)
        return self._last_line.plain

    def explain(self, text: str) -> None:
        """Print a line that explains values of the iterations. A quiet run prints none."""
        if not self._screen.quiet:
            self._screen.say(text)

    def say(self, text: str) -> None:
        """Print a line of text."""
        self._screen.say(text)

    def say_waits(self) -> None:
        """Print a line for each stage that has run for long, ever less often.

        A stage in which single calls reach their deadline has changes, but it may hang as well.
        """
        now = self._clock()
        # A copy: another thread may start or end a stage meanwhile.
        for iteration, stage in self._stages.copy().items():
            ran_s = now - stage.started
            if not stage.waits_for or ran_s < stage.line_after_s:
                continue
            stage.line_after_s = ran_s + min(ran_s, PLAIN_WAIT_S[1])
            of_iteration = "" if iteration is None else f"iteration {iteration}: "
            self._screen.say(f"{self.run}: {of_iteration}{stage.name}: {stage.plain_text(now)}")

    def _say_waits_until_the_end(self) -> None:
        # A thread: a user's function may block the event loop.
        while not self._ended.wait(CHECK_S):
            self.say_waits()

    @property
    def _done(self) -> int:
        """Number of finished iterations, including those of earlier processes."""
        return self.first + self._finished

    def _iteration_line(
        self, summary: Mapping[str, float | int | str], seconds: Mapping[str, float], now: float
    ) -> Text:
        width = len(str(self.total))
        line = Text(f"{self.run} ", style="dim")
        line.append(f"{self._done:>{width}}/{self.total}", style="bold")
        for name, value in summary.items():
            line.append("  ").append_text(_labelled(name, value))
        line.append(f"  {duration(now - self._last_end)}")
        if seconds:
            rest = now - self._last_end - sum(seconds.values())
            # Stages of overlapping iterations leave no such rest.
            timed = {**seconds, "between stages": rest} if rest >= SMALLEST_REST_S else seconds
            stages = " ".join(f"{name} {spent:.1f}" for name, spent in timed.items())
            line.append(f" ({stages})", style="dim")
        left = self._seconds_left(now)
        return line.append(f"  {self._left_text(left)}", style="dim") if left else line

    def _left_text(self, seconds: float) -> str:
        return f"{self._at_most}{duration(seconds)} left"

    def _seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last iteration at the mean speed so far.

        None before the first and after the last iteration.
        """
        if not self._finished or self._done >= self.total:
            return None
        return (now - self._started) / self._finished * (self.total - self._done)

    def _block(self) -> Progress:
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rows of the block."""
        now = self._clock()
        rows = [_Bar(self.run, self._done, self.total, self._run_values(now))]
        # A copy: another thread may start or end a stage meanwhile.
        stages = sorted(self._stages.copy().items(), key=lambda item: (item[0] is None, item[0]))
        in_flight = sum(iteration is not None for iteration, _ in stages) > 1
        for iteration, stage in stages:
            suffix = f" {iteration}" if in_flight and iteration is not None else ""
            name = f"  {stage.name}{suffix}"
            rows.append(_Bar(name, stage.done, stage.total, _stage_values(stage, now)))
        run_bar, *stage_bars = _bars(rows, options.max_width)
        yield run_bar
        curve = [] if options.ascii_only else self._curve
        yield from _value_rows(self._summary, curve, options.max_width)
        yield from stage_bars

    def _run_values(self, now: float) -> str:
        left = self._seconds_left(now)
        values = [f"{self._done}/{self.total}", duration(now - self._started)]
        return "  ".join([*values, self._left_text(left)] if left else values)


@dataclass(frozen=True, slots=True)
class _Bar:
    """A row of the block: name, bar, values. A bar without `done` or `total` pulses."""

    name: str
    done: float | None
    total: float | None
    values: str


def _bars(bars: Sequence[_Bar], width: int) -> list[Table]:
    """Return the rows, with bars of equal width."""
    name_width = _within(NAME_WIDTH, max(cell_len(bar.name) for bar in bars))
    values_width = max(VALUES_WIDTH, *(cell_len(bar.values) for bar in bars))
    bar_width = _within(BAR_WIDTH, width - name_width - values_width - 2 * GAP)
    rows = []
    for bar in bars:
        row = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        row.add_column(width=name_width, no_wrap=True)
        row.add_column(width=bar_width)
        row.add_column(no_wrap=True)
        drawn = ProgressBar(
            total=bar.total or 1,
            completed=bar.done or 0,
            width=bar_width,
            pulse=bar.done is None or not bar.total,
        )
        row.add_row(Text(bar.name, style="bold", overflow="ellipsis"), drawn, Text(bar.values))
        rows.append(row)
    return rows


def _value_rows(
    summary: Mapping[str, float | int | str], curve: list[float], width: int
) -> list[Text]:
    """Return the values of the last iteration as rows of at most `width` columns."""
    parts = [_labelled(name, value) for name, value in summary.items()]
    room = width - sum(part.cell_len + GAP for part in parts) - 1
    for index, name in enumerate(summary):
        if name == CURVE_LABEL and len(curve) > 1:
            parts[index].append(" ").append(
                sparkline(curve, _within(CURVE_WIDTH, room)), style="green"
            )
    rows: list[Text] = []
    for part in parts:
        if not rows or rows[-1].cell_len + GAP + part.cell_len > width:
            rows.append(Text(" " * GAP, no_wrap=True, overflow="ellipsis"))
        else:
            rows[-1].append(" " * GAP)
        rows[-1].append_text(part)
    return rows


def _within(limits: tuple[int, int], width: int) -> int:
    return max(limits[0], min(limits[1], width))


def sparkline(values: list[float], width: int) -> str:
    """Return the curve of the values in at most `width` characters: means of equal parts."""
    parts = min(width, len(values))
    edges = [index * len(values) // parts for index in range(parts + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    lowest = min(means)
    spread = max(means) - lowest
    if not spread:
        return LEVELS[0] * parts
    return "".join(LEVELS[round((mean - lowest) / spread * (len(LEVELS) - 1))] for mean in means)


def _stage_values(stage: _Stage, now: float) -> str:
    seconds = now - stage.started
    values = []
    if stage.done is not None and stage.total:
        values.append(f"{stage.done:,.0f}/{stage.total:,.0f}")
    if stage.tokens is not None and seconds > 0:
        values.append(f"{stage.tokens / seconds:,.0f} tokens/s")
    if stage.reward is not None:
        values.append(f"reward {value_text(stage.reward)}")
    if stage.note:
        values.append(stage.note)
    if stage.waits_for and now - stage.changed >= WAIT_SHOWN_AFTER_S:
        values.append(stage.wait_text(now))
    values.append(duration(seconds))
    if stage.done and stage.total and stage.done < stage.total:
        values.append(f"{duration(seconds / stage.done * (stage.total - stage.done))} left")
    return "  ".join(values)


def _labelled(name: str, value: float | int | str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value_text(value))


def value_text(value: float | int | str) -> str:
    """Return a number in fixed notation: three decimals for a float, no `-0.000`."""
    if isinstance(value, float):
        return f"{value:z,.3f}"
    return f"{value:,}" if isinstance(value, int) else value
