"""The rows of one prompt file, `.jsonl` or `.parquet`, as objects with the names of where they stand.

`path@[a:b]` is Python's slice of its rows. A row can be read again by its number without the rest of the file: of a `.jsonl` by
where its line begins, of a `.parquet` by its row group, the last of which is kept.

Not here: what a row must hold (`rows`).
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.data.rows import short
from rlpipe.errors import DataError

Row = tuple[str, dict[str, Any]]
SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d{0,15}):(?P<stop>-?\d{0,15})\]")


def split_slice(path: str) -> tuple[str, slice]:
    """`path@[a:b]` as (path, slice); the whole file without one. Raises: DataError for a slice that is none."""
    found = SLICE.fullmatch(path)
    if found is None:
        if path.endswith("]") and "@[" in path:
            raise DataError("not a slice of rows", where=path, found=path[path.index("@[") :], expected="@[a:b], @[a:] or @[:b]")
        return path, slice(None)
    start, stop = (int(text) if text else None for text in found.group("start", "stop"))
    return found["path"], slice(start, stop)


class FileRows:
    """The rows of a file, or of a slice of it, in order. It is read once when this is made."""

    def __init__(self, path: str) -> None:
        """Raises: DataError for a file that is missing, empty or not readable, an empty slice, and a line that is not JSON."""
        self.path, chosen = split_slice(path)
        if self.path.endswith(".jsonl"):
            self._open: _Lines | _Groups = _Lines(self.path)
        elif self.path.endswith(".parquet"):
            self._open = _Groups(self.path)
        else:
            expected = "a name ending in .jsonl or .parquet"
            raise DataError("not a file type that is read", where=path, found=self.path, expected=expected)
        self._numbers = range(len(self._open))[chosen]
        if not self._numbers:
            problem = "no row of the file is in the slice" if len(self._open) else "the prompt file is empty"
            raise DataError(problem, where=path, found=f"{len(self._open)} rows", expected="at least one")

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Row]:
        return (self._open.read(number) for number in self._numbers)

    def read(self, index: int) -> Row:
        """One row. Raises: DataError if the file is another one by now."""
        return self._open.read(self._numbers[index])

    def forget(self) -> None:
        """Let go of the file's contents; a row is read from the file when it is asked for."""
        self._open.forget()


class _Lines:
    """The lines of a `.jsonl` file that are not blank."""

    def __init__(self, path: str) -> None:
        self._path, self._held = path, bytes_of(path)
        lines = self._held.split(b"\n")
        starts = [0, *accumulate(len(line) + 1 for line in lines)]
        self._lines = [
            (number, starts[number - 1], len(line), zlib.crc32(line))
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Row:
        number, start, length, checksum = self._lines[index]
        line = self._held[start : start + length] if self._held else _part_of(self._path, start, length)
        where = f"{self._path}:{number}"
        if zlib.crc32(line) != checksum:
            raise _changed(where)
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError("the line is not JSON", where=where, found=f"{short(line)} ({error})") from error
        if not isinstance(content, dict):
            raise DataError("the line is not a JSON object", where=where, found=short(content), expected="{...}")
        return where, content

    def forget(self) -> None:
        self._held = b""


class _Groups:
    """The rows of a `.parquet` file, by its row groups."""

    def __init__(self, path: str) -> None:
        self._path, self._held = path, bytes_of(path)
        with _parquet_of(path, self._held) as file:
            counts = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        self._starts, self._size_bytes = [0, *accumulate(counts)], len(self._held)
        self._group, self._rows = -1, []

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> Row:
        group = bisect_right(self._starts, index) - 1
        if group != self._group:
            content = self._held or bytes_of(self._path)
            if len(content) != self._size_bytes:
                raise _changed(self._path)
            with _parquet_of(self._path, content) as file:
                self._group, self._rows = group, file.read_row_group(group).to_pylist()
        return f"{self._path}:row {index}", self._rows[index - self._starts[group]]

    def forget(self) -> None:
        self._held, self._group, self._rows = b"", -1, []


@contextmanager
def _parquet_of(path: str, content: bytes) -> Iterator[pq.ParquetFile]:
    """To be read within. Raises: DataError for what Arrow cannot read."""
    try:
        yield pq.ParquetFile(pa.BufferReader(content))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError("the file is not Parquet", where=path, found=str(error)) from error


def _changed(where: str) -> DataError:
    return DataError(
        "the prompt file is another one than when the run began", where=where, do="bring it back, or start a new run"
    )


def bytes_of(path: str) -> bytes:
    """All of a file, given by path or fsspec URL. Raises: DataError."""
    return _part_of(path, 0, None)


def _part_of(path: str, start: int, length: int | None) -> bytes:
    try:
        with fsspec.open(path, "rb") as stream:
            if start:
                stream.seek(start)  # pyright: ignore[reportAttributeAccessIssue]
            return stream.read() if length is None else stream.read(length)  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, ValueError, TypeError, ImportError) as error:  # TypeError: a protocol that needs more than a URL
        raise DataError(
            "the prompt file cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a file, or an fsspec URL",
            do="a relative path counts from the folder the run is started in",
        ) from error
