"""Which process of this user has which GPUs of this machine to itself: a lock on a file for each
GPU.

It is for runs with a Ray of their own, which know nothing of each other. That they wait in one
queue is not enough: for the queue a run is over as soon as it is being cancelled, or is believed to
have crashed, while its processes still have the GPUs. The kernel gives a lock back when the process
that has it ends, however it ends.

Not here: how GPUs are shared out within a Ray (`placement`), or turns within a run (`sharing`).
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

FOLDER = Path("/tmp")
"""One for all runs of a user on this machine: TMPDIR is below a run's home."""
_POLL_S = 0.5
_HELD: dict[str, IO[str]] = {}
_LOG = logging.getLogger(__name__)


def visible(count: int) -> list[str]:
    """The names of so many GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them, else
    their numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in named.split(",") if name.strip()][:count] or [
        str(number) for number in range(count)
    ]


async def hold(gpus: Sequence[str], *, who: str, timeout_s: float) -> None:
    """Have these GPUs until `release` or this process's end; those that it has already are its own.
    `who`: for others to read.

    Raises: ResourceError naming who has one of them after that time; then none is taken.
    """
    end_s = time.monotonic() + timeout_s
    taken = []
    told = set[str]()
    try:
        while missing := sorted(
            set(gpus) - _HELD.keys()
        ):  # another flow of this process may give up one that was there
            gpu = missing[0]
            if (found := _lock(gpu, who)) is None:
                taken.append(gpu)
                continue
            if time.monotonic() > end_s:
                raise ResourceError(
                    f"GPU {gpu} is another run's",
                    where=str(_path(gpu)),
                    found=found,
                    expected=f"free within {timeout_s:g} s (resources.start_timeout_s)",
                    do="wait until that run ends, or end it; CUDA_VISIBLE_DEVICES chooses other GPUs; "
                    "resources.exclusive_gpus=false has both use it at once",
                )
            if gpu not in told:
                _LOG.warning("waiting for GPU %s, which is another run's: %s", gpu, found)
                told.add(gpu)
            await asyncio.sleep(_POLL_S)
    except BaseException:
        release(taken)
        raise


def release(gpus: Sequence[str] | None = None) -> None:
    """Give these back, or all that this process has."""
    for gpu in list(_HELD) if gpus is None else gpus:
        if (file := _HELD.pop(gpu, None)) is not None:
            file.close()


def _lock(gpu: str, who: str) -> str | None:
    """Take it if it is free. Returns: None then, else who has it."""
    path = _path(gpu)
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return path.read_text(encoding="utf-8").strip() or "another process"
    _HELD[gpu] = file
    with suppress(OSError):  # a full disk: the lock is had all the same
        file.truncate(0)
        file.write(f"{who}, PID {os.getpid()}")
        file.flush()
    return None


def _path(gpu: str) -> Path:
    do = "have its owner remove it, or do without locks: resources.exclusive_gpus=false"
    folder = ray_access.private(
        FOLDER / f"rlpipe-gpus-{os.getuid()}", "the folder of the GPUs' locks", do
    )
    return folder / f"{gpu.replace('/', '-')}.lock"
