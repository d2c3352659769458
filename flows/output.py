"""Keep a flow run alive when the worker that reads its output dies.

Under a worker, stdout and stderr are pipes that the worker reads. Once the worker dies, the next
line raises: rich, which Prefect logs with, turns a broken pipe into SystemExit. A second pipe, read
by a thread of this process, prevents that.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import stat
import sys
import termios
import threading
import time
from typing import Any

from tasks.cancellation import FLOW_RUN_ID_VARIABLE

STDOUT = 1
STDERR = 2
CHUNK_BYTES = 65536
FLUSH_TIMEOUT_S = 1.0

_replaced: set[int] = set()


def outlive_the_worker(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a flow that starts running: forward output through a pipe of this process.

    Output after the worker's death is lost. A second call has no effect.
    """
    for descriptor in (STDOUT, STDERR):
        if (
            FLOW_RUN_ID_VARIABLE in os.environ
            and descriptor not in _replaced
            # Only pipes break; a terminal or file needs no second pipe.
            and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        ):
            _replaced.add(descriptor)
            _replace(descriptor)


def _replace(descriptor: int) -> None:
    # The worker's pipe keeps a number of its own, and the standard descriptor gets ours.
    worker_pipe = os.dup(descriptor)
    own_pipe, write_end = os.pipe()
    os.dup2(write_end, descriptor)
    os.close(write_end)
    threading.Thread(
        target=_forward, args=(own_pipe, worker_pipe), name=f"output {descriptor}", daemon=True
    ).start()
    # The thread is a daemon: without a wait the last lines would be lost at exit.
    atexit.register(_wait_until_empty, own_pipe)


def _forward(own_pipe: int, worker_pipe: int) -> None:
    worker_reads = True
    # Read on after the worker's death: a full pipe would block the run.
    while chunk := os.read(own_pipe, CHUNK_BYTES):
        while worker_reads and chunk:
            try:
                chunk = chunk[os.write(worker_pipe, chunk) :]
            except OSError:
                worker_reads = False


def _wait_until_empty(own_pipe: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    end_s = time.monotonic() + FLUSH_TIMEOUT_S
    unread_bytes = array.array("i", [1])
    while unread_bytes[0] and time.monotonic() < end_s:
        time.sleep(0.02)
        # FIONREAD: number of bytes in the pipe.
        fcntl.ioctl(own_pipe, termios.FIONREAD, unread_bytes)
