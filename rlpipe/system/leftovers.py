"""Remove files of our processes that have ended: shared memory, sockets, folders of Ray.

    leftovers.record(pid, folder, "/dev/shm/torch_4711_*")  # a process leaves these files
    leftovers.remove(pid)                                   # after its end
    leftovers.sweep()                                       # of all processes that have ended

Servers and Ray's actors end by SIGKILL, so they cannot remove their files themselves. Each has a
record of its files in a folder of this user and machine, and every start removes the files of
processes that have ended. Files without a record are not touched: other programs leave files of the
same names.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = f"/tmp/rlpipe-{os.getuid()}"
"""Folder of the records. Local to the machine, like the files."""
SHARED_MEMORY = "/dev/shm/"


def record(pid: int, *paths: str | Path) -> None:
    """Record what a running process of ours may leave: files and folders, or globs as strings."""
    started = _started(pid)
    folder = private_folder()
    if started is None or folder is None:
        return
    path = folder / f"{_namespace()}-{pid}-{started}.json"
    known = _read(path)
    patterns = (path if isinstance(path, str) else glob.escape(str(path)) for path in paths)
    wanted = sorted({*known, *patterns})
    if wanted != known:
        # Replaced as a whole, because another process may read it.
        descriptor, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(wanted, file)
        Path(temporary).replace(path)


def record_shared_memory(pids: list[int]) -> None:
    """Record the shared memory that running processes of ours have mapped."""
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            files = {line.split(maxsplit=5)[5] for line in maps if SHARED_MEMORY in line}
            record(pid, *(Path(file) for file in files if not file.endswith(" (deleted)")))


def sweep() -> None:
    """Remove the files of all recorded processes that have ended."""
    for path, pid, started in _records():
        if _started(pid) != started:
            _remove(path)


def remove(*pids: int) -> None:
    """Remove the files of processes that have just ended."""
    for path, pid, _ in _records():
        if pid in pids:
            _remove(path)


def _records() -> Iterator[tuple[Path, int, int]]:
    """Yield (record, PID, start time) of the processes of this PID namespace."""
    folder = private_folder()
    for path in sorted(folder.glob(f"{_namespace()}-*-*.json")) if folder else ():
        _, pid, started = path.stem.split("-")
        yield path, int(pid), int(started)


def _remove(path: Path) -> None:
    for pattern in _read(path):
        for found in Path("/").glob(pattern.lstrip("/")):
            with suppress(OSError):
                if found.is_dir() and not found.is_symlink():
                    shutil.rmtree(found)
                else:
                    found.unlink()
    path.unlink(missing_ok=True)


def _read(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def private_folder() -> Path | None:
    """Return this user's folder on this machine; None if another user can write to it.

    A record that another user wrote could name any file of ours.
    """
    folder = Path(FOLDER)
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if private and status.st_uid == os.getuid():
            return folder
    return None


def _namespace() -> int:
    """Return the PID namespace: in another container, equal PIDs are other processes."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended.

    Another process that gets the same PID has another start time.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
