"""Processes that hold something in the store, told apart for good, and whether they are known to be
dead.

No clock has a part in it: one that is set, or stands still, makes nobody another process. Not here:
what they hold (`epochs`).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from uuid import uuid4

from pydantic import Field

from rlpipe.types import Record


class Holder(Record):
    """A process that drives a branch."""

    host: str
    """Name of its machine, for people."""
    pid_space: str
    """Where its pid is one: this boot of the machine, this PID namespace."""
    pid: int = Field(gt=0, lt=2**31)
    started: int
    """Clock ticks from boot to its start: tells it from a later process with its pid."""
    attempt: str

    @classmethod
    def here(cls) -> Holder:
        """This process, in a new attempt."""
        pid = os.getpid()
        _, started = state_and_start(pid)
        return cls(
            host=socket.gethostname(),
            pid_space=pid_space(),
            pid=pid,
            started=started,
            attempt=uuid4().hex[:12],
        )

    @property
    def is_local(self) -> bool:
        """Has it this process's clock and PIDs?"""
        return self.pid_space == pid_space()

    @property
    def dead(self) -> bool:
        """Is it known to be? What runs elsewhere never is."""
        return self.is_local and ended(self.pid, self.started)


def pid_space() -> str:
    """What tells the PIDs of this process's machine, since it was booted, and container from all
    others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def ended(pid: int, started: int) -> bool:
    """Has the process ended, waited for or not? One that this user may not look at has not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    try:
        state, start = state_and_start(pid)
    except OSError:
        return False
    return state in "ZX" or start != started


def state_and_start(pid: int) -> tuple[str, int]:
    """A process's state (a letter, proc(5)) and the clock ticks from boot to its start. Raises:
    OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
