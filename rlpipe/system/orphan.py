"""Kill this process's group when its parent ends, also after `kill -9` of the parent.

Entry points: `take_parent` reads the parent's PID from the command line, `end_with` and
`end_with_descriptor` start the watch. Linux only (pidfd).
"""

from __future__ import annotations

import os
import select
import signal
from typing import NoReturn

FLAG = "--rlpipe-parent"


def take_parent(argv: list[str]) -> tuple[int | None, list[str]]:
    """Return the PID of `--rlpipe-parent PID` (None without it) and the other arguments."""
    if FLAG not in argv:
        return None, argv
    index = argv.index(FLAG)
    return int(argv[index + 1]), argv[:index] + argv[index + 2 :]


def end_with(parent: int) -> None:
    """Fork a process that kills this process's group with SIGKILL when `parent` or this one ends.

    Call it first, while the process has one thread. The caller must lead its own process group
    (`start_new_session=True`).
    """
    _require_leader()
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        _end_group()
    # The parent may have ended before `pidfd_open`, and its PID may belong to another process.
    if os.getppid() != parent:
        _end_group()
    end_with_descriptor(descriptor)
    os.close(descriptor)


def end_with_descriptor(parent: int) -> None:
    """Do as `end_with`. `parent`: a pidfd, which stays open."""
    _require_leader()
    # A thread would not run: the router holds the GIL while it serves. `PR_SET_PDEATHSIG` fires
    # when the parent's *thread* ends, and Ray runs an actor's calls on threads that end.
    descriptor = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        _watch([descriptor, parent])
    os.close(descriptor)


def _require_leader() -> None:
    assert os.getpgid(0) == os.getpid(), (
        "start this process with start_new_session=True: its group is killed with it"
    )


def _watch(descriptors: list[int]) -> None:
    """Wait for either process to end, in the forked process. Never returns."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    _end_group()


def _end_group() -> NoReturn:
    """Kill all processes of this group, including this one."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
    raise AssertionError("SIGKILL ends this process")
