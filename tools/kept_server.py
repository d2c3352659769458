"""Keep a server of a home's runs for some minutes, so that the next run starts faster.

A start of a Prefect server takes 4 CPU seconds and as long on the clock. All runs of a home at a
time share one, unless their settings of Prefect differ:

    /tmp/rlpipe-<user>/prefect-<home>.json    the server: process, URL, digest of its settings
    /tmp/rlpipe-<user>/prefect-<home>.lock    locked, shared, by each process that uses the server

They are on the machine's own disk: other machines that share the home cannot use the server, and
not every shared disk has locks.

The kernel releases the lock of a process that ends in any way. The server's watch tries to lock the
file for itself. It ends the server once no process has used it for RLPIPE_PREFECT_IDLE_S seconds.
The template of `tools.template` is kept in the same way.

Entry points: `KeptServer` for runs, `make up` and `make down`; `end_when_unused` for the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlpipe.errors import ConfigError
from rlpipe.store.holders import ended, pid_space, state_and_start
from rlpipe.system.leftovers import private_folder

PREFECT = "prefect"
TEMPLATE = "template"
"""Kinds of servers. A template is that of `tools.template`, with the path of its sockets as URL."""
IDLE_VARIABLE = "RLPIPE_PREFECT_IDLE_S"
DEFAULT_IDLE_S = 300.0
END_TIMEOUT_S = 10.0
POLL_S = 2.0


def idle_s() -> float:
    """Return the seconds that a server stays without a run. 0: it ends with its run.

    Raises: ConfigError.
    """
    text = os.environ.get(IDLE_VARIABLE, str(DEFAULT_IDLE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            "the seconds that a Prefect server stays without a run are not a number",
            where=IDLE_VARIABLE,
            found=text,
            expected="a number of seconds, or 0 to end the server with its run",
        )
    return seconds


class KeptServer:
    """The server that the runs of a home share. `path`: of its record and locks, less a suffix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._used: IO[bytes] | None = None

    @classmethod
    def of_home(cls, home: Path, kind: str = PREFECT) -> KeptServer | None:
        """Return the server of a home; None if this user has no private folder for its record."""
        folder = private_folder()
        name = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:16]
        return None if folder is None else cls(folder / f"{kind}-{name}")

    def use(self) -> None:
        """Keep the server from ending until `leave`. Waits for a server that is about to end."""
        self._used = _opened(self.path, "lock")
        fcntl.flock(self._used, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Let the server end. Calling it twice is allowed."""
        if self._used is not None:
            self._used.close()
            self._used = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Let one process at a time find or start the server."""
        with _opened(self.path, "start") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @property
    def running(self) -> bool:
        """True if the recorded server runs."""
        return self._read() is not None

    def find(self, settings: str) -> str | None:
        """Return the URL of the running server; None if it has other settings or does not run."""
        record = self._read()
        return record["url"] if record and record["settings"] == settings else None

    def keep(self, pid: int, url: str, settings: str) -> None:
        """Record a server that runs `end_when_unused`."""
        _, started = state_and_start(pid)
        record = {"pid": pid, "pid_space": pid_space(), "started": started}
        _record(self.path).write_text(json.dumps({**record, "url": url, "settings": settings}))

    def end(self) -> bool:
        """End the server, if it runs. Return False if a process uses it; then it stays."""
        record = self._read()
        if record is None:
            return True
        with _opened(self.path, "lock") as lock:
            if not _locked(lock):
                return False
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(record["pid"])
                end_process(record["pid"], descriptor)
                os.close(descriptor)
            _forget(self.path)
        return True

    def _read(self) -> dict[str, Any] | None:
        """Return the record of the running server."""
        try:
            record = json.loads(_record(self.path).read_text())
            alive = record["pid_space"] == pid_space() and not ended(
                record["pid"], record["started"]
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return record if alive else None


def end_when_unused(path: Path, seconds: float) -> None:
    """Fork a process that ends this one once no process has used it for this time.

    `path`: of its `KeptServer`. Call it first, while the process has one thread. The caller must
    lead its own process group (`start_new_session=True`).
    """
    leader = os.getpid()
    descriptor = os.pidfd_open(leader)
    if os.fork() == 0:
        try:
            _watch(leader, descriptor, path, seconds)
        finally:
            os.killpg(leader, signal.SIGKILL)
    os.close(descriptor)


def _watch(leader: int, descriptor: int, path: Path, seconds: float) -> None:
    """Return when the server has ended, or has been unused for this time and is asked to end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    last_used_s = time.monotonic()
    with _opened(path, "lock") as lock:
        while not poll.poll(1000 * min(POLL_S, seconds)):
            if not _locked(lock):
                last_used_s = time.monotonic()
            elif time.monotonic() - last_used_s < seconds:
                fcntl.flock(lock, fcntl.LOCK_UN)
            else:
                # The lock stays: a run that comes now waits, and then starts another server.
                _forget(path)
                end_process(leader, descriptor)
                return


def end_process(pid: int, descriptor: int) -> None:
    """Send SIGTERM to a process, and SIGKILL after END_TIMEOUT_S. `descriptor`: its pidfd."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        if not poll.poll(1000 * END_TIMEOUT_S):
            os.kill(pid, signal.SIGKILL)
            poll.poll()


def _forget(path: Path) -> None:
    """Remove the record of a server, and its sockets: `PATH-NAME`."""
    _record(path).unlink(missing_ok=True)
    for socket in path.parent.glob(f"{path.name}-*"):
        socket.unlink(missing_ok=True)


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _opened(path: Path, suffix: str) -> IO[bytes]:
    return path.with_suffix(f".{suffix}").open("ab")


def _locked(lock: IO[bytes]) -> bool:
    """Lock a file for this process alone. Return False if another process has a lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
