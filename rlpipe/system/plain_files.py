"""Open what a person named, if it is a regular file.

A FIFO blocks whoever opens it until somebody writes, and a device such as /dev/zero never ends.
Both errors here are `OSError`s, so that callers name them as they name a file that is missing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading. Raises: OSError, also for any other kind of file;
    ValueError for an impossible name."""
    require_plain(path)
    return Path(path).open("rb")


def read_plain(path: str | os.PathLike[str], *, at_most_bytes: int) -> bytes:
    """All of a regular file. Raises: as `open_plain`; OSError for a larger file."""
    with open_plain(path) as file:
        content = file.read(at_most_bytes + 1)
        if len(content) > at_most_bytes:
            size_bytes = os.fstat(file.fileno()).st_size
            raise OSError(
                errno.EFBIG,
                f"it has {size_bytes} bytes, and at most {at_most_bytes} are read",
                str(path),
            )
    return content


def require_plain(path: str | os.PathLike[str]) -> None:
    """Raises: OSError if there is no such regular file."""
    mode = os.stat(path).st_mode  # noqa: PTH116 - pathlib would make "" the current folder
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
