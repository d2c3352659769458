"""A real run in a process of its own, as a person starts it: wait for what it says, interrupt it,
kill its parts.

Not here: what a run must do (the tests).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]


class LiveRun:
    """`python -m tools.train …` with its own process group and log file. Ends everything it started
    on the way out."""

    def __init__(
        self, home: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.home, self.log = home, home.with_suffix(".log")
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.train", "--home", str(home), *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.parts(lambda _: True):
            process.kill()
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        """What it has printed since it was started."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def wait_until(self, reached: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Poll until `reached`; an assertion error with the output if the run ends before or time
        is up."""
        end_s = time.monotonic() + timeout_s
        while not reached():
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode}:\n{self.said}"
            )
            assert time.monotonic() < end_s, f"not reached in {timeout_s:g} s:\n{self.said}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 240.0) -> int:
        """Wait for its end; its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished in {timeout_s:g} s:\n{self.said}") from None

    def interrupt(self) -> int:
        """What Ctrl-C does: SIGINT to the whole process group; the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.finish(60.0)

    def parts(self, chosen: Callable[[str], bool]) -> list[psutil.Process]:
        """Processes below the run whose name or command line is chosen."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if chosen(_line(process))]

    def kill_part(self, text: str) -> None:
        """kill -9 the processes whose name or command line has this text; an assertion error if
        there is none."""
        found = self.parts(lambda line: text in line)
        assert found, f"no process {text!r} below the run"
        for process in found:
            process.kill()


def _line(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""
