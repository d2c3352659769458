"""Exclusive use of GPUs among the processes of one user on one machine.

Each GPU has one lock file. The locks are for runs with a Ray of their own, which do not know about
each other. A queue of runs is not enough: a queue considers a run ended as soon as it is cancelled
or believed crashed, while its processes still hold GPU memory. The kernel releases a lock when the
process ends, for whatever reason.

Entry points: `hold`, `release`, `visible`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rlpipe.actors.ray import access as ray_access
from rlpipe.errors import ResourceError

# TMPDIR is inside a run's home, so it would give each run its own locks.
FOLDER = Path("/tmp")
"""Common to all runs of a user on this machine."""
_POLL_S = 0.5
_HELD: dict[str, IO[str]] = {}
"""Open lock files of this process, by GPU."""
_LOG = logging.getLogger(__name__)


def visible(count: int) -> list[str]:
    """Return names of the first `count` GPUs of this process.

    Names are those of CUDA_VISIBLE_DEVICES, or the numbers from 0 if it is not set.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in names.split(",") if name.strip()][:count] or [
        str(number) for number in range(count)
    ]


async def hold(gpus: Sequence[str], *, owner: str, timeout_s: float) -> None:
    """Lock these GPUs until `release` or the end of this process.

    GPUs that this process already holds count as locked. `owner` is written into the lock file for
    other runs to read. Raises: ResourceError with the owner of a GPU that stays locked for
    `timeout_s`; then no GPU is locked.
    """
    end_s = time.monotonic() + timeout_s
    taken = []
    warned = set[str]()
    try:
        # Compared each time: another flow of this process may release a GPU during the wait.
        while missing := sorted(set(gpus) - _HELD.keys()):
            # in sorted order, so that two processes never wait for each other
            gpu = missing[0]
            if (other_owner := _lock(gpu, owner)) is None:
                taken.append(gpu)
                continue
            if time.monotonic() > end_s:
                raise ResourceError(
                    f"GPU {gpu} is another run's",
                    where=str(_path(gpu)),
                    found=other_owner,
                    expected=f"free within {timeout_s:g} s (resources.start_timeout_s)",
                    do="wait until that run ends, or end it; choose other GPUs with "
                    "CUDA_VISIBLE_DEVICES; resources.exclusive_gpus=false lets both runs use it",
                )
            if gpu not in warned:
                _LOG.warning("waiting for GPU %s, which is another run's: %s", gpu, other_owner)
                warned.add(gpu)
            await asyncio.sleep(_POLL_S)
    except BaseException:  # also a cancelled wait
        release(taken)
        raise


def release(gpus: Sequence[str] | None = None) -> None:
    """Unlock these GPUs; None: all that this process holds."""
    for gpu in list(_HELD) if gpus is None else gpus:
        if (file := _HELD.pop(gpu, None)) is not None:
            file.close()


def _lock(gpu: str, owner: str) -> str | None:
    """Lock a GPU if it is free. Return None on success, else its owner."""
    path = _path(gpu)
    # "a+" does not truncate: the file may have the name of the current owner
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return path.read_text(encoding="utf-8").strip() or "another process"
    _HELD[gpu] = file
    with suppress(OSError):  # on a full disk the lock is valid without the owner's name
        file.truncate(0)
        file.write(f"{owner}, PID {os.getpid()}")
        file.flush()
    return None


def _path(gpu: str) -> Path:
    do = "have its owner remove it, or run without locks: resources.exclusive_gpus=false"
    folder = ray_access.private_folder(
        FOLDER / f"rlpipe-gpus-{os.getuid()}", "the folder of GPU locks", do
    )
    return folder / f"{gpu.replace('/', '-')}.lock"
