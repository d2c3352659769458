"""Start a real run in a child process, wait for its output, interrupt it, kill its parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.flows.shared_servers import shared_servers

REPOSITORY = Path(__file__).resolve().parents[2]


def run_command(
    home: Path, *words: str, timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run `rlpipe WORDS --home HOME` with the shared servers."""
    return subprocess.run(
        [sys.executable, "-m", "rlpipe", *words, "--home", str(home)],
        cwd=REPOSITORY,
        env={**os.environ, **shared_servers().environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def command(home: Path, *words: str) -> str:
    """Return the output of `run_command`; AssertionError if the command fails."""
    ended = run_command(home, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


class LiveRun:
    """`python -m tools.train ...` with its own process group and log file. Leaving the block
    ends all its processes.
    """

    def __init__(
        self,
        home: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        own_servers: bool = False,
    ) -> None:
        """`own_servers`: the run starts a Prefect server and a template, as a user's does."""
        self.home, self.log = home, home.with_suffix(".log")
        self._shared = None if own_servers else shared_servers()
        shared = {} if self._shared is None else self._shared.environment
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.train", "--home", str(home), *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **shared, **(environment or {})},
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
        """Return processes of the run whose name or command line matches."""
        below = [] if self._shared is None else self._shared.forked()
        with suppress(psutil.NoSuchProcess):
            below += psutil.Process(self.process.pid).children(recursive=True)
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
