"""Which process of this user has which GPUs of this machine to itself: a lock on a file for each GPU.

It is for runs with a Ray of their own, which know nothing of each other. That they wait in one queue is not enough: for the queue
a run is over as soon as it is being cancelled, or is believed to have crashed, while its processes still have the GPUs. The
kernel gives a lock back when the process that has it ends, however it ends.

Not here: how GPUs are shared out within a Ray (`placement`), or turns within a run (`sharing`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rlpipe.actors import ray_access
from rlpipe.errors import ResourceError

_POLL_S = 0.5
_HELD: dict[str, IO[str]] = {}
_LOG = logging.getLogger(__name__)


def visible(count: int) -> list[str]:
    """The names of so many GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them, else their numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in named.split(",") if name.strip()][:count] or [str(number) for number in range(count)]


async def hold(gpus: Sequence[str], *, who: str, timeout_s: float) -> None:
    """Have these GPUs until `release` or this process's end; those that it has already are its own. `who`: for others to read.

    Raises: ResourceError naming who has one of them after that time; then none is taken.
    """
    end_s, taken = time.monotonic() + timeout_s, []
    try:
        for gpu in sorted(set(gpus) - _HELD.keys()):
            taken.append(gpu)
            _HELD[gpu] = await _locked(gpu, end_s, timeout_s)
            _write(_HELD[gpu], f"{who}, PID {os.getpid()}")
    except BaseException:
        release(taken)
        raise


def release(gpus: Sequence[str] | None = None) -> None:
    """Give these back, or all that this process has."""
    for gpu in list(_HELD) if gpus is None else gpus:
        if (file := _HELD.pop(gpu, None)) is not None:
            file.close()


async def _locked(gpu: str, end_s: float, timeout_s: float) -> IO[str]:
    path = _folder() / f"{gpu.replace('/', '-')}.lock"
    file = path.open("a+", encoding="utf-8")
    try:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError as error:
                found = path.read_text(encoding="utf-8").strip() or "another process"
                if time.monotonic() > end_s:
                    raise ResourceError(
                        f"GPU {gpu} is another run's",
                        where=str(path),
                        found=found,
                        expected=f"free within {timeout_s:g} s (resources.start_timeout_s)",
                        do="wait until that run ends, or end it; CUDA_VISIBLE_DEVICES chooses other GPUs; "
                        "resources.exclusive_gpus=false has both use it at once",
                    ) from error
                if not told:
                    _LOG.warning("waiting for GPU %s, which is another run's: %s", gpu, found)
                    told = True
            await asyncio.sleep(_POLL_S)
    except BaseException:
        file.close()
        raise


def _write(file: IO[str], who: str) -> None:
    file.truncate(0)
    file.write(who)
    file.flush()


def _folder() -> Path:
    """One for all runs of this user, whatever their home."""
    return ray_access.private(Path(tempfile.gettempdir()) / f"rlpipe-gpus-{os.getuid()}")
