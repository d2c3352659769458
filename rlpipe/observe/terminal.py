"""Draw a live block at the bottom of the terminal, with all other output above it.

    with Screen() as screen:                # a command opens it once; Progress joins it
        with waiting_for("SGLang engine"):  # a row: seconds now, and the last time
            ...

The block has one row for each wait and the rows of each `Screen.add`. Lines that any code writes to
stdout or stderr appear above it, also those of C++ libraries and of log handlers. Without a
terminal (or with TERM=dumb) there is no block: a wait is a plain line once it has taken two
seconds.

Entry points: `Screen`, `waiting_for` (any thread), `ReportedWaits` (of another process), `current`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlpipe.observe.captured_output import CapturedOutput

PLAIN_AFTER_S = 2.0
"""Without a terminal, a wait is printed after this many seconds."""
REFRESHES_PER_S = 4
LAST_WAITS_FILE = ".waits.json"
"""File in the home of the runs: name of a wait → the seconds that it took last time."""


class Screen:
    """The terminal of a command, as a context. Inside another open screen it does nothing itself.

    `quiet`: no block and no lines of waits. `stream`: default is standard error. `clock`: returns
    seconds.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quiet = quiet
        self.clock = clock
        self.console = _TerminalConsole(file=stream or sys.stderr, highlight=False)
        self._captures = stream is None
        self._captured: CapturedOutput | None = None
        self._entered = 0
        self._blocks: list[Callable[[], RenderableType]] = []
        # Transient: the block vanishes at the end, and the lines above it stay.
        self._live = Live(
            get_renderable=self._drawn,
            console=self.console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    @property
    def is_live(self) -> bool:
        """True if the screen can draw a block: on a terminal, and not quiet."""
        return self.console.is_terminal and not self.console.is_dumb_terminal and not self.quiet

    def __enter__(self) -> Screen:
        global _current
        if _current is not None and _current is not self:
            return _current
        _current = self
        self._entered += 1
        if self._entered == 1 and self.is_live:
            if self._captures:
                self._captured = CapturedOutput(self._print_lines)
                self.console.file = self._captured.start()
            self._live.start()
            # A process that is killed leaves a terminal with a cursor.
            self.console.show_cursor(True)
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        self._entered = max(self._entered - 1, 0)
        if self._entered or _current is not self:
            return
        _current = None
        with suppress(OSError):  # the terminal may be gone
            self._live.stop()
        if self._captured is not None:
            self.console.file = sys.stderr
            self._captured.stop()
            self._captured = None

    def add(self, block: Callable[[], RenderableType]) -> None:
        """Draw the result of `block` at every refresh, below the earlier blocks."""
        self._blocks.append(block)

    def remove(self, block: Callable[[], RenderableType]) -> None:
        """Stop drawing this block."""
        with suppress(ValueError):
            self._blocks.remove(block)

    def say(self, text: str | Text) -> None:
        """Print text above the block. A terminal that is gone does not stop the run."""
        with suppress(OSError):
            self.console.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the block now."""
        self._live.refresh()

    def _drawn(self) -> RenderableType:
        rows = [block() for block in list(self._blocks)]
        if self._captured is not None and (line := self._captured.unfinished):
            rows.append(Text.from_ansi(line, no_wrap=True, overflow="ellipsis"))
        return Group(*rows)

    def _print_lines(self, lines: list[str]) -> None:
        self.say(Text("\n").join(Text.from_ansi(line) for line in lines))


_current: Screen | None = None


def current() -> Screen | None:
    """Return the open screen of this process, if there is one."""
    return _current


class _TerminalConsole(Console):
    """A console of the size of its own file, that ignores a reader that has gone."""

    @property
    def size(self) -> ConsoleDimensions:
        """The terminal's size. rich reads it from descriptors 0 to 2, which can be pipes here."""
        with suppress(OSError, ValueError, AttributeError):
            columns, lines = os.get_terminal_size(self.file.fileno())
            if columns and lines:
                return ConsoleDimensions(columns, lines)
        return super().size

    def on_broken_pipe(self) -> None:
        """Do nothing. rich would end the process."""


@dataclass(slots=True)
class _Wait:
    """A wait as a row of the block."""

    name: str
    last_s: float | None
    screen: Screen
    started: float
    spinner: Spinner
    announced: bool = False

    @property
    def seconds(self) -> float:
        return self.screen.clock() - self.started

    def row(self) -> RenderableType:
        """Return the row of the block."""
        row = Table.grid(padding=(0, 1))
        row.add_column(width=1)
        row.add_column(no_wrap=True)
        text = Text(f"waiting for {self.name}  {duration(self.seconds)}")
        row.add_row(self.spinner, text.append(self._last_time(), style="dim"))
        return row

    def announce(self) -> None:
        """Print the wait as a plain line."""
        self.announced = True
        self.screen.say(f"waiting for {self.name}{self._last_time()}")

    def _last_time(self) -> str:
        return "" if self.last_s is None else f"  (last time {duration(self.last_s)})"


@contextmanager
def waiting_for(name: str) -> Iterator[None]:
    """Show that the process waits for `name`, since when, and how long it took the last time.

    Several waits may run at once, in any thread. A wait that ends without an error is the last one
    of its name. A wait below PLAIN_AFTER_S does not replace a longer wait: that start used
    processes of an earlier run, and the next start may have to start its own.
    """
    # rlpipe.config.load imports all settings, which a screen alone does not need.
    from rlpipe.config.load import home

    screen = current() or Screen()
    path = home() / LAST_WAITS_FILE
    wait = _Wait(name, _last_waits(path).get(name), screen, screen.clock(), Spinner("dots"))
    timer = threading.Timer(PLAIN_AFTER_S, wait.announce)
    timer.daemon = True
    if screen.is_live and current() is screen:
        screen.add(wait.row)
    elif not screen.quiet:
        timer.start()
    try:
        yield
        _keep_last_wait(path, name, wait.seconds)
        if wait.announced:
            screen.say(f"{name}: {duration(wait.seconds)}")
    finally:
        timer.cancel()
        screen.remove(wait.row)


class ReportedWaits:
    """Waits of another process, which reports their names. A context that ends all of them."""

    def __init__(self) -> None:
        self._open: dict[str, AbstractContextManager[None]] = {}

    def __enter__(self) -> ReportedWaits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for wait in self._open.values():
            wait.__exit__(kind, error, trace)
        self._open.clear()

    def show(self, names: Collection[str]) -> None:
        """Show exactly these waits. Those that are no longer in the list have ended well."""
        for name in [name for name in self._open if name not in names]:
            self._open.pop(name).__exit__(None, None, None)
        for name in names:
            if name not in self._open:
                self._open[name] = waiting_for(name)
                self._open[name].__enter__()


def _last_waits(path: Path) -> dict[str, float]:
    """Return the last seconds of each wait. They are a hint: a damaged file counts as empty."""
    try:
        waits = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(waits, dict):
        return {}
    return {name: seconds for name, seconds in waits.items() if isinstance(seconds, int | float)}


_writing = threading.Lock()


def _keep_last_wait(path: Path, name: str, seconds: float) -> None:
    with _writing, suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        waits = _last_waits(path)
        if seconds < PLAIN_AFTER_S <= waits.get(name, 0.0):
            return
        waits[name] = round(seconds, 2)
        temporary.write_text(json.dumps(waits, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)


def duration(seconds: float) -> str:
    """Return seconds as text: `0.03 s`, `4.2 s`, `1:05`, `2:03:09`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
