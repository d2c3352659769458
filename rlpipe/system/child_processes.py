"""Wait for child processes and kill their process groups.

Entry points: `exit_status`, `end_group`, `ended_how`. The child must lead its own process group
(`start_new_session=True`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress

LOOK_INTERVAL_S = 0.02


async def exit_status(process: Process) -> int:
    """Wait until the child has ended. A negative status is the signal that killed it."""
    # Before Python 3.12 `Process.wait()` returns only when every pipe of the child is closed. A
    # grandchild that inherited a pipe keeps it open, and the wait never ends.
    while process.returncode is None:  # noqa: ASYNC110 - asyncio has no event for this
        await asyncio.sleep(LOOK_INTERVAL_S)
    return process.returncode


async def end_group(process: Process) -> int:
    """Kill the child and its process group with SIGKILL, and wait until the child has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return await exit_status(process)


def ended_how(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-status}"
    return f"killed by {name}"
