"""Identity of a process that holds a lease, and whether that process has ended.

No clock is involved, so a clock that is set or stopped never makes a process another one.

Entry points: `Holder`, `ended`.
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
    """Host name, for people."""
    pid_space: str
    """Scope in which the pid is unique: a boot of the machine and a PID namespace."""
    pid: int = Field(gt=0, lt=2**31)
    started: int
    """Clock ticks from boot to the start of the process. Distinguishes processes that reuse a
    pid."""
    attempt: str

    @classmethod
    def here(cls) -> Holder:
        """Return this process with a new attempt."""
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
        """True if the process shares clock and PIDs with this one."""
        return self.pid_space == pid_space()

    @property
    def dead(self) -> bool:
        """True if the process is known to have ended. Never true for another machine."""
        return self.is_local and ended(self.pid, self.started)


def pid_space() -> str:
    """Return an identifier of this boot of the machine and this PID namespace."""
    # Containers of one machine share the boot id, but not the PID namespace.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def ended(pid: int, started: int) -> bool:
    """True if the process has ended, reaped or not. False if this user may not look at it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # The process exists and belongs to another user. /proc is readable all the same.
        pass
    try:
        state, start = state_and_start(pid)
    except OSError:
        return False
    # Z and X are a zombie and a dead process. Another start means that the pid was reused.
    return state in "ZX" or start != started


def state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state (a letter, proc(5)) and the clock ticks from boot to its start.

    Raises: OSError.
    """
    # The second field is the command in brackets, and may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
