"""Start a real run in a child process, wait for its output, interrupt it, kill its parts."""

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
    """`python -m tools.train ...` with its own process group and log file. Leaving the block
    ends all its processes.
    """

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
    def output(self) -> str:
        """Return the output since the start."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def wait_until(self, reached: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Poll until `reached`. AssertionError with the output if the run ends first or on a
        timeout.
        """
        end_s = time.monotonic() + timeout_s
        while not reached():
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode}:\n{self.output}"
            )
            assert time.monotonic() < end_s, f"not reached in {timeout_s:g} s:\n{self.output}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 240.0) -> int:
        """Wait for the end of the run; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished in {timeout_s:g} s:\n{self.output}") from None

    def interrupt(self) -> int:
        """Send SIGINT to the process group, as Ctrl-C does; return the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.finish(60.0)

    def parts(self, chosen: Callable[[str], bool]) -> list[psutil.Process]:
        """Return child processes whose name or command line matches."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if chosen(_line(process))]

    def kill_first(self, text: str) -> None:
        """Kill (-9) the first process whose command line has this text, once there is one.

        The listing of processes is not atomic and may miss a running process.
        """
        found: list[psutil.Process] = []

        def is_listed() -> bool:
            found[:] = self.parts(lambda line: text in line)
            return bool(found)

        self.wait_until(is_listed)
        found[0].kill()

    def kill_part(self, text: str) -> None:
        """Kill (-9) the processes whose command line has this text. AssertionError if none has
        it.
        """
        found = self.parts(lambda line: text in line)
        assert found, f"no process {text!r} below the run"
        for process in found:
            process.kill()


def _line(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""
