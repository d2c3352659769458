"""Report the engines of a run to the terminal: which end, come back, join, leave or wait.

Entry point: `EngineReports`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe.config.run import RunConfig
from rlpipe.errors import EngineUnavailable, RlpipeError
from rlpipe.observe.terminal import duration

CHECK_INTERVAL_S = 2.0
SOON_S = 60.0
"""An engine that ends within this time of its start ends soon."""
MOST_SOON_ENDS = 3
"""Times in a row that all engines may end soon without a finished group of samples."""


class EngineReports:
    """Lines in the terminal about engines that end, come back, join and leave."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory`: the folder of the run. `say` prints a line."""
        self._config = config
        self._directory = directory
        self._print = say
        self._clock = clock
        self._checked_s = -math.inf
        self._waiting: dict[int, bool] = {}
        """Engine → True if it waits for room in the Ray cluster."""
        self._down_since: dict[int, float] = {}
        self._up_since: dict[int, float] = {}
        self._soon_ends: dict[int, int] = {}
        self._joining: set[int] = set()

    def is_due(self) -> bool:
        """True if the engines were not looked at for a while; then the caller looks now.

        The time counts for the run: its rollouts may be shorter than the interval.
        """
        now = self._clock()
        due = now > self._checked_s + CHECK_INTERVAL_S
        if due:
            self._checked_s = now
        return due

    def show(self, engines: Sequence[Mapping[str, Any]]) -> None:
        """Print the changes since the last call. `engines`: status of each, as `Fleet.status`."""
        now = self._clock()
        self._show_members(engines, now)
        for engine in engines:
            if engine.get("waiting"):
                continue
            number = engine["number"]
            ends = self._soon_ends.setdefault(number, 0)
            if engine["alive"]:
                if (since := self._down_since.pop(number, None)) is not None:
                    self._up_since[number] = now
                    action = "is up" if number in self._joining else "is back"
                    self._joining.discard(number)
                    self._say(number, f"{action} ({duration(now - since)})")
            elif number not in self._down_since:
                self._down_since[number] = now
                soon = now - self._up_since.get(number, now) <= SOON_S
                self._soon_ends[number] = ends + 1 if soon else 1
                self._say(number, self._action(number))

    def _show_members(self, engines: Sequence[Mapping[str, Any]], now_s: float) -> None:
        """Print the engines that joined, left or wait for room since the last call."""
        before = self._waiting
        now = {engine["number"]: bool(engine.get("waiting")) for engine in engines}
        self._waiting = now
        if not before or before == now:
            return
        members = list(now.values()).count(False)
        size = f"{members} engine{'s' if members > 1 else ''}"
        for number in sorted({*before, *now}):
            say = partial(self._say, number)
            if number not in now:
                for forget in (self._down_since, self._up_since, self._soon_ends):
                    forget.pop(number, None)
                if not before[number]:
                    say(f"has left; {size}")
            elif now[number] and not before.get(number):
                say("waits for room in the Ray cluster")
            elif not now[number] and before.get(number, True):
                is_back = number in self._soon_ends
                if not is_back:
                    self._joining.add(number)
                self._down_since.setdefault(number, now_s)
                say(f"{'has room again' if is_back else 'joins'} and is started; {size}")

    def _say(self, number: int, text: str) -> None:
        self._print(f"{self._config.run}: engine {number} {text}")

    def forget_ends(self) -> None:
        """Count the ends of engines from 0, because a group of samples is finished."""
        self._soon_ends = dict.fromkeys(self._soon_ends, 0)

    def trouble(self) -> RlpipeError | None:
        """Return an error if all engines end soon after each start, else None.

        Such engines can be started, so that their supervisor finds no fault. An example is a kernel
        that fails in the first request.
        """
        is_external = bool(self._config.resources.external_engines)
        if is_external or min(self._soon_ends.values(), default=0) < MOST_SOON_ENDS:
            return None
        return EngineUnavailable(
            "the engines end before a group of samples is finished",
            where=f"{self._config.run}: engines",
            found=f"each ended {MOST_SOON_ENDS} times, at most {SOON_S:g} s after its start",
            expected="a finished group of samples",
            do=f"see the end of {self._log(min(self._soon_ends))}, remove the cause, and start the "
            "same command again",
        )

    def _action(self, number: int) -> str:
        if self._config.resources.external_engines:
            return "does not answer; the run waits for it"
        return f"has ended and is started again; its log is {self._log(number)}"

    def _log(self, number: int) -> Path:
        return self._directory / "logs" / f"engine-{number}.log"
