"""Find every process below this one, and keep those whose parents are gone.

A process is identified by pid and start time, so a later process with the same pid is another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

import psutil

END_TIMEOUT_S = 10.0


class Family:
    """The processes below this one.

    Call `look` often: a process that loses its parent before the first look is never found.
    """

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """Return all processes that run now."""
        parents = {process.pid: process for process in self._known.values() if runs(process)}
        found = {os.getpid(), *parents}
        by_parent: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            by_parent.setdefault(process.info["ppid"], []).append(process)
        left = list(found)
        while left:
            for child in by_parent.get(left.pop(), ()):
                if child.pid not in found and runs(child):
                    found.add(child.pid)
                    parents[child.pid] = child
                    left.append(child.pid)
        self._known = parents
        return list(parents.values())

    def named(self, texts: Collection[str]) -> list[psutil.Process]:
        """Return the processes whose command line has one of these texts.

        Copies that such a process forks of itself to watch it are left out.
        """
        found = {
            process.pid: name
            for process in self.look()
            if any(text in (name := title(process)) for text in texts)
        }
        return [
            self._known[pid]
            for pid, name in found.items()
            if found.get(_parent(self._known[pid])) != name
        ]

    def end(self, kept: Collection[int] = ()) -> None:
        """Kill all but these pids and the processes below them, until no new ones appear."""
        for _ in range(5):
            victims = [process for process in self.look() if not _below(process, kept)]
            if not victims:
                return
            for process in victims:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(victims, timeout=END_TIMEOUT_S)


def runs(process: psutil.Process) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def title(process: psutil.Process) -> str:
    """Return the command line, which Ray actors rewrite; empty if the process is gone."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def kill_now(process: psutil.Process) -> bool:
    """Send SIGKILL. Return True if the process was running."""
    if not runs(process):
        return False
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        return False
    return True


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _below(process: psutil.Process, pids: Collection[int]) -> bool:
    try:
        return process.pid in pids or any(parent.pid in pids for parent in process.parents())
    except psutil.Error:
        return False
