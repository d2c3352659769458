"""What a flow run prints under a worker goes into a pipe that the worker reads. If the worker dies,
the next line would end the run: rich, with which Prefect logs, turns a broken pipe into SystemExit.
So another pipe is put in front, whose reader outlives it.

Not here: logs of actors and servers, which are files.
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

UNDER_A_WORKER = "PREFECT__FLOW_RUN_ID"
STDOUT = 1
STDERR = 2
CHUNK_BYTES = 65536
LAST_WORDS_S = 1.0

_done: set[int] = set()


def outlive_the_worker(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a flow that has begun to run. What is printed once nobody reads any more is lost; a
    second call changes nothing."""
    for descriptor in (STDOUT, STDERR):
        if (
            UNDER_A_WORKER in os.environ
            and descriptor not in _done
            and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        ):
            _done.add(descriptor)
            _put_in_front(descriptor)


def _put_in_front(descriptor: int) -> None:
    theirs = os.dup(descriptor)
    ours, end = os.pipe()
    os.dup2(end, descriptor)
    os.close(end)
    threading.Thread(
        target=_forward, args=(ours, theirs), name=f"output {descriptor}", daemon=True
    ).start()
    atexit.register(_wait_for_last_words, ours)


def _forward(ours: int, theirs: int) -> None:
    read = True
    while chunk := os.read(ours, CHUNK_BYTES):
        while read and chunk:
            try:
                chunk = chunk[os.write(theirs, chunk) :]
            except OSError:
                read = False


def _wait_for_last_words(ours: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    end_s = time.monotonic() + LAST_WORDS_S
    waiting = array.array("i", [1])
    while waiting[0] and time.monotonic() < end_s:
        time.sleep(0.02)
        fcntl.ioctl(ours, termios.FIONREAD, waiting)
