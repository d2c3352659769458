"""The rows of one prompt file, `.jsonl` or `.parquet`, as objects with the names of where they
stand.

`path@[a:b]` is Python's slice of its rows. A row can be read again by its number without the rest
of the file: of a `.jsonl` by where its line begins, of a `.parquet` by its row group, the last of
which is kept.

Not here: what a row must hold (`rows`).
"""

from __future__ import annotations

import codecs
import json
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.data.rows import short
from rlpipe.errors import DataError
from rlpipe.system.plain_files import open_plain

Row = tuple[str, dict[str, Any]]
LONGEST_LINE_BYTES = 64 * 1024**2
"""Of a row of a `.jsonl` file. JSON of this size takes a gigabyte as Python objects, in each
process that reads it."""
MAGIC = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"PK\x03\x04": "a zip file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"version https://git-lfs": "a pointer of git-lfs, whose contents were not downloaded",
}
"""First bytes of what is often found under the name of a prompt file."""
SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d{0,15}):(?P<stop>-?\d{0,15})\]")


def split_slice(path: str) -> tuple[str, slice]:
    """`path@[a:b]` as (path, slice); the whole file without one. Raises: DataError for a slice that
    is none."""
    found = SLICE.fullmatch(path)
    if found is None:
        if path.endswith("]") and "@[" in path:
            raise DataError(
                "not a slice of rows",
                where=path,
                found=path[path.index("@[") :],
                expected="@[a:b], @[a:] or @[:b]",
            )
        return path, slice(None)
    start, stop = (int(text) if text else None for text in found.group("start", "stop"))
    return found["path"], slice(start, stop)


class FileRows:
    """The rows of a file, or of a slice of it, in order. It is read once when this is made."""

    def __init__(self, path: str) -> None:
        """Raises: DataError for a file that is missing, empty or not readable, an empty slice, and
        a line that is not JSON."""
        self.path, chosen = split_slice(path)
        if self.path.endswith(".jsonl"):
            self._open: _Lines | _Groups = _Lines(self.path)
        elif self.path.endswith(".parquet"):
            self._open = _Groups(self.path)
        else:
            expected = "a name ending in .jsonl or .parquet"
            raise DataError(
                "not a file type that is read", where=path, found=self.path, expected=expected
            )
        self._numbers = range(len(self._open))[chosen]
        if not self._numbers:
            problem = (
                "no row of the file is in the slice"
                if len(self._open)
                else "the prompt file is empty"
            )
            raise DataError(
                problem, where=path, found=f"{len(self._open)} rows", expected="at least one"
            )

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def place(self) -> tuple[str, range]:
        """Which file, however its path is spelled, and the numbers of its rows."""
        local = _local(self.path)
        return (self.path if local is None else os.path.realpath(local)), self._numbers

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
        if found := _other_kind(self._held):
            raise DataError(
                "not a file of JSON lines",
                where=path,
                found=found,
                expected="one JSON object a line, in UTF-8",
            )
        begin = len(codecs.BOM_UTF8) if self._held.startswith(codecs.BOM_UTF8) else 0
        lines = self._held[begin:].split(b"\n")
        starts = list(accumulate((len(line) + 1 for line in lines), initial=begin))
        self._lines = [
            (number, starts[number - 1], len(line), zlib.crc32(line))
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Row:
        number, start, length, checksum = self._lines[index]
        line = (
            self._held[start : start + length]
            if self._held
            else _part_of(self._path, start, length)
        )
        where = f"{self._path}:{number}"
        if zlib.crc32(line) != checksum:
            raise _changed(where)
        if length > LONGEST_LINE_BYTES:
            expected = f"at most {LONGEST_LINE_BYTES} bytes a row"
            raise DataError(
                "the line is too long for a row",
                where=where,
                found=f"{length} bytes",
                expected=expected,
            )
        try:
            content = json.loads(line, object_pairs_hook=partial(_object, where=where))
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            array = index == 0 and line.lstrip().startswith(b"[")
            do = (
                "the file seems to be one JSON array; write its rows as lines: jq -c '.[]'"
                if array
                else None
            )
            raise DataError(
                "the line is not JSON", where=where, found=f"{short(line)} ({error})", do=do
            ) from error
        if not isinstance(content, dict):
            raise DataError(
                "the line is not a JSON object", where=where, found=short(content), expected="{...}"
            )
        return where, content

    def forget(self) -> None:
        self._held = b""


class _Groups:
    """The rows of a `.parquet` file, by its row groups."""

    def __init__(self, path: str) -> None:
        self._path, self._held = path, bytes_of(path)
        with _parquet_of(path, self._held) as file:
            counts = [
                file.metadata.row_group(number).num_rows
                for number in range(file.metadata.num_row_groups)
            ]
        self._starts, self._size_bytes = [0, *accumulate(counts)], len(self._held)
        self._group = -1
        self._rows = []

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
        self._held = b""
        self._group = -1
        self._rows = []


def _object(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """The object of a row's JSON. Python would keep the last of two values of one key, in silence.
    Raises: DataError."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(
            "a key is written twice in one object",
            where=where,
            found=", ".join(map(repr, twice)),
            do="keep one",
        )
    return made


def _other_kind(content: bytes) -> str | None:
    """What a file is that is no text of JSON lines; None if its first bytes say nothing."""
    return next((kind for magic, kind in MAGIC.items() if content.startswith(magic)), None)


@contextmanager
def _parquet_of(path: str, content: bytes) -> Iterator[pq.ParquetFile]:
    """To be read within. Raises: DataError for what Arrow cannot read."""
    try:
        yield pq.ParquetFile(pa.BufferReader(content))
    except (pa.ArrowException, OSError, ValueError) as error:
        text = "text, perhaps JSON lines (.jsonl)" if content.lstrip().startswith(b"{") else None
        found = _other_kind(content.removeprefix(b"PAR1")) or text or str(error)
        raise DataError(
            "the file is not Parquet", where=path, found=found, expected="a whole Parquet file"
        ) from error


def _changed(where: str) -> DataError:
    return DataError(
        "the prompt file is another one than when the run began",
        where=where,
        do="bring it back, or start a new run",
    )


def bytes_of(path: str) -> bytes:
    """All of a file, given by path or fsspec URL. Raises: DataError."""
    return _part_of(path, 0, None)


def _local(path: str) -> str | None:
    """The path of a local file; None for a URL of another protocol."""
    if "://" not in path and "::" not in path:
        return os.path.expanduser(path)  # noqa: PTH111 - leaves "~somebody" as it is where pathlib raises
    protocol, _, rest = path.partition("://")
    return rest if protocol in ("file", "local") else None


def _part_of(path: str, start: int, length: int | None) -> bytes:
    try:
        local = _local(path)
        with fsspec.open(path, "rb") if local is None else open_plain(local) as stream:
            if start:
                stream.seek(start)  # pyright: ignore[reportAttributeAccessIssue]
            return stream.read() if length is None else stream.read(length)  # pyright: ignore[reportAttributeAccessIssue]
    except (
        OSError,
        ValueError,
        TypeError,
        ImportError,
    ) as error:  # TypeError: a protocol that needs more than a URL
        raise DataError(
            "the prompt file cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a file, or an fsspec URL",
            do="a relative path counts from the folder the run is started in",
        ) from error
