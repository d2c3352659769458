"""Fork a process of a program from a template process, which has imported the program's packages.

    process = fork("engine", "rlpipe.engines.sglang.cpu_launch", arguments, ...)
    if process is None:     # no template, or it does not fit: start the program as usual
        process = subprocess.Popen(...)

The variable RLPIPE_TEMPLATE has the path of the templates' sockets, without the name of the
template. `rlpipe.system.template` is the other side. Here are only light imports: each of Ray's
workers begins with this module.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "RLPIPE_TEMPLATE"
ANSWER_TIMEOUT_S = 20.0
"""A template answers once it has imported its packages. Ray waits 60 s for a worker."""
STATUS_TIMEOUT_S = 5.0
NUM_LIMITS = 16
"""Resource limits of Linux: 0 to RLIMIT_RTTIME."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals that a parent may have ignored (`nohup`, a job of a script in the background)."""
MAX_REQUEST_BYTES = 150_000
"""Less than the kernel's default limit of a message. Longer requests are not sent."""


class ForkedProcess:
    """A process of a template: `pid`, `poll` and `wait` as of `subprocess.Popen`."""

    def __init__(self, pid: int, descriptor: int, connection: socket.socket) -> None:
        """`descriptor`: pidfd of the process. `connection`: the template sends the status there."""
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = descriptor
        self._connection = connection
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, else None."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process; return as `poll`. `timeout` None: without limit."""
        return self._status(None if timeout is None else 1000 * timeout)

    def _status(self, timeout_ms: float | None) -> int | None:
        ended = select.poll()
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            ended.register(self._descriptor, select.POLLIN)
        if not ended.poll(timeout_ms):
            return None
        with self._lock:
            if self.returncode is None:
                self.returncode = self._received()
                self._connection.close()
                os.close(self._descriptor)
            return self.returncode

    def _received(self) -> int:
        """Return the status that the template sends. A killed template sends none."""
        self._connection.settimeout(STATUS_TIMEOUT_S)
        with suppress(OSError, ValueError):
            return int(self._connection.recv(64))
        return -signal.SIGKILL


def fork(
    template: str,
    module: str,
    arguments: list[str],
    *,
    environment: dict[str, str],
    streams: tuple[int, int, int],
    leads_session: bool,
) -> ForkedProcess | None:
    """Call `module.main(arguments)` in a process of a template; None if there is no such process.

    `streams`: descriptors of standard input, output and error. `leads_session`: the process leads
    a session, as with `start_new_session`, and its group is killed when this process ends.
    Otherwise it leads a process group only.
    """
    prefix = os.environ.get(VARIABLE)
    if not prefix or not Path(f"{prefix}-{template}").exists():
        return None
    request = {
        "module": module,
        "arguments": arguments,
        "environment": environment,
        "leads_session": leads_session,
        **_inherited(),
    }
    message = json.dumps(request).encode()
    if len(message) > MAX_REQUEST_BYTES:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.pidfd_open(os.getpid())
    try:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(f"{prefix}-{template}")
        socket.send_fds(connection, [message], [*streams, own])
        pid, descriptor = _answer(connection)
    except (OSError, ValueError):
        connection.close()
        return None
    finally:
        os.close(own)
    return ForkedProcess(pid, descriptor, connection)


def _answer(connection: socket.socket) -> tuple[int, int]:
    """Return PID and pidfd of the forked process. Raises: OSError, ValueError if there is none."""
    try:
        answer, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
    except TimeoutError:
        # From here on the template's answer fails, and it ends the process. It may have answered.
        connection.shutdown(socket.SHUT_RD)
        answer, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
    (descriptor,) = descriptors
    return int(answer), descriptor


def _inherited() -> dict[str, Any]:
    """Return what a child process of this one would inherit besides its environment."""
    # Not from `os.umask`, which would change the mask for a moment, also for other threads.
    status = Path("/proc/self/status").read_text()
    return {
        "folder": str(Path.cwd()),
        "path": [str(path) for path in sys.path],
        "umask": int(status.partition("Umask:")[2].split()[0], 8),
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "limits": [resource.getrlimit(number) for number in range(NUM_LIMITS)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "ignored": [name for name in SIGNALS if signal.getsignal(name) == signal.SIG_IGN],
    }
