"""End a child process together with everything it started, and wait for its end alone.

Before Python 3.12 `asyncio.subprocess.Process.wait()` returns only once every pipe of the child is
closed. A grandchild that inherited one of them keeps it open, and the wait never ends. The
functions here look at the child's exit status instead.

For children that lead a process group of their own (`start_new_session=True`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress

LOOK_INTERVAL_S = 0.02


async def exit_status(process: Process) -> int:
    """Wait until the child itself has ended, whoever holds its pipes. Negative: the signal that
    killed it."""
    while process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for the end of the process alone
        await asyncio.sleep(LOOK_INTERVAL_S)
    return process.returncode


async def end_group(process: Process) -> int:
    """Kill the child and its process group with SIGKILL, and wait until the child has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return await exit_status(process)


def ended_how(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-status}"
    return f"killed by {name}"
