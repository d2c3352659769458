"""Every process that this one started, and that those started: found while their parents live, kept
when those are gone.

Each is known by pid and start time, so a later process with its pid is not taken for it. Not here:
which of them to kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

import psutil

END_TIMEOUT_S = 10.0


class Family:
    """The processes below this one. Call `look` often: who loses its parent between two looks
    before it was seen is not found."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """All that run now."""
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
        """Those whose title (command line) has one of these texts, without the watches that they
        fork of themselves."""
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

    def end(self, spared: Collection[int] = ()) -> None:
        """Kill all of them but these pids (and what is below those), as often as new ones turn
        up."""
        for _ in range(5):
            doomed = [process for process in self.look() if not _below(process, spared)]
            if not doomed:
                return
            for process in doomed:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(doomed, timeout=END_TIMEOUT_S)


def runs(process: psutil.Process) -> bool:
    """Is it there, and not merely waiting to be reaped?"""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def title(process: psutil.Process) -> str:
    """Its command line (what a process may rewrite, as Ray's actors do); empty if it is gone."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def kill_now(process: psutil.Process) -> bool:
    """kill -9; was it running when the signal was sent?"""
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
