"""End this process's group the moment its parent goes away, however the parent went (kill -9
included).

Linux only (pidfd). The watch is a small forked process, because the router keeps Python's lock
while it serves, and not `PR_SET_PDEATHSIG`, because that fires when the parent's *thread* ends, and
a Ray actor's calls come on threads that end. Not a supervisor: it restarts nothing.
"""

from __future__ import annotations

import os
import select
import signal

FLAG = "--rlpipe-parent"


def take_parent(argv: list[str]) -> tuple[int | None, list[str]]:
    """Split `--rlpipe-parent PID` off a command line. Returns the PID (None if absent) and the
    other arguments."""
    if FLAG not in argv:
        return None, argv
    at = argv.index(FLAG)
    return int(argv[at + 1]), argv[:at] + argv[at + 2 :]


def end_with(parent: int) -> None:
    """Fork a watch that kills this process's group with SIGKILL when process `parent` ends, or this
    process does.

    Call it first, while there is one thread. The caller must lead its own process group
    (`start_new_session=True`).
    """
    leader = os.getpid()
    assert os.getpgid(0) == leader, (
        "start this process with start_new_session=True: its group is killed with it"
    )
    ends = [os.pidfd_open(leader)]
    try:
        ends.append(os.pidfd_open(parent))
    except ProcessLookupError:
        _end_group()
    if os.getppid() != parent:
        _end_group()
    if os.fork() == 0:
        _watch(ends)
    for descriptor in ends:
        os.close(descriptor)


def _watch(ends: list[int]) -> None:
    """Runs in the forked process and never returns."""
    poll = select.poll()
    for descriptor in ends:
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    _end_group()


def _end_group() -> None:
    """Kill everyone in this group, the caller too."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
