"""Open files that users name, and refuse anything but regular files.

Opening a FIFO blocks until another process writes, and reading a device such as /dev/zero never
ends. The errors are `OSError`, so that callers handle them like a missing file.
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
    """Open a regular file for reading.

    Raises: OSError, also for another kind of file; ValueError for an impossible name.
    """
    require_plain(path)
    return Path(path).open("rb")


def read_plain(path: str | os.PathLike[str], *, at_most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises: as `open_plain`; OSError for a file larger than `at_most_bytes`.
    """
    with open_plain(path) as file:
        content = file.read(at_most_bytes + 1)
        if len(content) > at_most_bytes:
            size_bytes = os.fstat(file.fileno()).st_size
            raise OSError(
                errno.EFBIG,
                f"the file has {size_bytes} bytes; at most {at_most_bytes} are allowed",
                str(path),
            )
    return content


def require_plain(path: str | os.PathLike[str]) -> None:
    """Raises: OSError if the path is no regular file."""
    mode = os.stat(path).st_mode  # noqa: PTH116 - pathlib would make "" the current folder
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
