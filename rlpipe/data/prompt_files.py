"""Read the rows of one prompt file, `.jsonl` or `.parquet`, as objects with names for errors.

`path@[a:b]` is a Python slice of the rows. A single row can be read again without the whole file: a
row of a `.jsonl` file by the offset of its line, a row of a `.parquet` file by its row group (the
last row group stays in memory). Entry points: `FileRows`, `split_slice`, `read_bytes`.
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

from rlpipe.errors import DataError
from rlpipe.system.hub import fetched_file, file_reference
from rlpipe.system.plain_files import open_plain
from rlpipe.system.project import in_project

Row = tuple[str, dict[str, Any]]
"""(name for errors, content)."""
MAX_LINE_BYTES = 64 * 1024**2
"""Limit for a row of a `.jsonl` file. JSON of this size takes a gigabyte as Python objects, in each
process that reads it."""
MAGIC = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"PK\x03\x04": "a zip file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"version https://git-lfs": "a git-lfs pointer; its content was not downloaded",
}
"""First bytes → kind, of files that often have the name of a prompt file."""
SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d{0,15}):(?P<stop>-?\d{0,15})\]")


def split_slice(path: str) -> tuple[str, slice]:
    """Split `path@[a:b]` into (path, slice). Without a slice, the slice is the whole file.

    Raises: DataError for a malformed slice.
    """
    match = SLICE.fullmatch(path)
    if match is None:
        if path.endswith("]") and "@[" in path:
            raise DataError(
                "not a slice of rows",
                where=path,
                found=path[path.index("@[") :],
                expected="@[a:b], @[a:] or @[:b]",
            )
        return path, slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


class FileRows:
    """The rows of a file or of a slice of it, in order. The file is read once at construction."""

    def __init__(self, path: str, key: str = "data.prompts") -> None:
        """Read and index the file. `key`: of the prompt source, for errors.

        Raises: DataError for a file that is missing, empty or unreadable, an empty slice, and a
        line that is not JSON.
        """
        self.path, row_slice = split_slice(path)
        if self.path.endswith(".jsonl"):
            self._reader: _JsonLinesReader | _ParquetReader = _JsonLinesReader(self.path, key)
        elif self.path.endswith(".parquet"):
            self._reader = _ParquetReader(self.path, key)
        else:
            raise DataError(
                "unsupported file type",
                where=path,
                found=self.path,
                expected="a name ending in .jsonl or .parquet",
                do=_conversion(self.path),
            )
        num_rows = len(self._reader)
        self._numbers = range(num_rows)[row_slice]
        if not self._numbers:
            raise DataError(
                "no row of the file is in the slice" if num_rows else "the prompt file is empty",
                where=path,
                found=f"{num_rows} rows in the file",
                expected="at least one row",
                do="correct the slice" if num_rows else "write the prompts into the file",
            )

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def row_range(self) -> tuple[str, range]:
        """(Resolved path or URL, numbers of the rows)."""
        local = _local_path(self.path)
        return (self.path if local is None else os.path.realpath(local)), self._numbers

    def __iter__(self) -> Iterator[Row]:
        return (self._reader.read(number) for number in self._numbers)

    def read(self, index: int) -> Row:
        """Return one row. Raises: DataError if the file has changed."""
        return self._reader.read(self._numbers[index])

    def release(self) -> None:
        """Drop the file's content from memory; later reads open the file again."""
        self._reader.release()


def _conversion(path: str) -> str:
    """Return how to get a supported file from one of another type."""
    if path.endswith(".json"):
        return f"write its rows as lines: jq -c '.[]' {path} > {path}l"
    if path.endswith(".csv"):
        return (
            'convert it: python -c "import pyarrow.csv as csv, pyarrow.parquet as pq; '
            f"pq.write_table(csv.read_csv('{path}'), '{path.removesuffix('.csv')}.parquet')\""
        )
    return 'give the path of a file with an object on each line, such as {"prompt": "1+1="}'


class _JsonLinesReader:
    """The lines of a `.jsonl` file that are not blank."""

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._content = read_bytes(path, key)
        if kind := _kind_by_magic(self._content):
            raise DataError(
                "not a file of JSON lines",
                where=path,
                found=kind,
                expected="one JSON object a line, in UTF-8",
            )
        has_bom = self._content.startswith(codecs.BOM_UTF8)
        begin = len(codecs.BOM_UTF8) if has_bom else 0
        lines = self._content[begin:].split(b"\n")
        starts = list(accumulate((len(line) + 1 for line in lines), initial=begin))
        # The checksum detects a file that changes between indexing and a later read.
        self._lines = [
            (number, starts[number - 1], len(line), zlib.crc32(line))
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Row:
        number, start, length, checksum = self._lines[index]
        where = f"{self._path}:{number}"
        if self._content:
            line = self._content[start : start + length]
        else:
            line = _read_range(self._path, start, length)
        if zlib.crc32(line) != checksum:
            raise _changed_error(where)
        if length > MAX_LINE_BYTES:
            raise DataError(
                "the line is too long for a row",
                where=where,
                found=f"{length} bytes",
                expected=f"at most {MAX_LINE_BYTES} bytes a row",
            )
        return where, _parsed_line(line, where, is_first=index == 0)

    def release(self) -> None:
        self._content = b""


def _parsed_line(line: bytes, where: str, *, is_first: bool) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises: DataError."""
    try:
        content = json.loads(line, object_pairs_hook=partial(_unique_object, where=where))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        advice = 'write an object on each line, such as {"prompt": "1+1=", "label": "2"}'
        if is_first and line.lstrip().startswith(b"["):
            advice = "the file seems to be one JSON array; write its rows as lines: jq -c '.[]'"
        if isinstance(error, UnicodeDecodeError):
            advice = "write the file in UTF-8, such as with `iconv -f LATIN1 -t UTF-8`"
        # Its line is always 1.
        is_syntax = isinstance(error, json.JSONDecodeError)
        problem = f"{error.msg}, column {error.colno}" if is_syntax else str(error)
        raise DataError(
            "the line is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else "the line is not JSON",
            where=where,
            found=f"{excerpt(line)} ({problem})",
            do=advice,
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            "the line is not a JSON object", where=where, found=excerpt(content), expected="{...}"
        )
    return content


class _ParquetReader:
    """The rows of a `.parquet` file, read by row group."""

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._content = read_bytes(path, key)
        self._size_bytes = len(self._content)
        with _open_parquet(path, self._content) as file:
            counts = [
                file.metadata.row_group(number).num_rows
                for number in range(file.metadata.num_row_groups)
            ]
        self._starts = [0, *accumulate(counts)]
        self._group = -1
        self._rows = []

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> Row:
        group = bisect_right(self._starts, index) - 1
        if group != self._group:
            content = self._content or read_bytes(self._path)
            # Only the size is compared: a row group has no checksum of its own.
            if len(content) != self._size_bytes:
                raise _changed_error(self._path)
            with _open_parquet(self._path, content) as file:
                self._rows = file.read_row_group(group).to_pylist()
            self._group = group
        return f"{self._path}:row {index}", self._rows[index - self._starts[group]]

    def release(self) -> None:
        # The rows of a group can be as large as the file.
        self._content = b""
        self._group = -1
        self._rows = []


def _unique_object(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return the object of a row's JSON. Raises: DataError for a repeated key."""
    # Python's json keeps the last of two values of one key without a warning.
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise DataError(
            "a JSON object has the same key twice",
            where=where,
            found=", ".join(map(repr, repeated)),
            do="keep one",
        )
    return content


def _kind_by_magic(content: bytes) -> str | None:
    """Return the kind of a file by its first bytes; None if they are not in `MAGIC`."""
    return next((kind for magic, kind in MAGIC.items() if content.startswith(magic)), None)


@contextmanager
def _open_parquet(path: str, content: bytes) -> Iterator[pq.ParquetFile]:
    """Yield an open file. Raises: DataError for any error of Arrow within the context."""
    try:
        yield pq.ParquetFile(pa.BufferReader(content))
    except (pa.ArrowException, OSError, ValueError) as error:
        text = "text, perhaps JSON lines (.jsonl)" if content.lstrip().startswith(b"{") else None
        found = _kind_by_magic(content.removeprefix(b"PAR1")) or text or str(error)
        raise DataError(
            "the file is not Parquet", where=path, found=found, expected="a whole Parquet file"
        ) from error


def _changed_error(where: str) -> DataError:
    return DataError(
        "the prompt file has changed since the run started",
        where=where,
        do="restore the file, or start a new run",
    )


def read_bytes(path: str, key: str = "data.prompts") -> bytes:
    """Return the content of a file, given by path, fsspec URL or address on the Hub.

    `key`: of the prompt source, for errors.

    Raises: DataError; as `rlpipe.system.hub.fetched_file`.
    """
    return _read_range(path, 0, None, key)


def _local_path(path: str) -> str | None:
    """Return the path of a local file; None for a URL of another protocol.

    A file of the Hugging Face Hub is downloaded into its cache. Raises: as `fetched_file`.
    """
    if (reference := file_reference(path)) is not None:
        return str(fetched_file(reference, path))
    if "://" not in path and "::" not in path:
        return os.path.expanduser(in_project(path))  # noqa: PTH111 - pathlib raises for an unknown "~user"
    protocol, _, rest = path.partition("://")
    return rest if protocol in ("file", "local") else None


def _read_range(path: str, start: int, length: int | None, key: str = "data.prompts") -> bytes:
    local = _local_path(path)
    try:
        with fsspec.open(path, "rb") if local is None else open_plain(local) as stream:
            if start:
                stream.seek(start)  # pyright: ignore[reportAttributeAccessIssue]
            return stream.read() if length is None else stream.read(length)  # pyright: ignore[reportAttributeAccessIssue]
    # fsspec raises TypeError for a protocol that needs more than a URL, ImportError without its
    # package.
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise DataError(
            "the prompt file cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a file, an fsspec URL, or hf://datasets/org/name/path of a file on the Hub",
            do=f"correct the path ({key}.paths); a relative path counts from the recipe's folder, "
            "else from the current folder",
        ) from error


def excerpt(value: object) -> str:
    """Return a value as text of at most 80 characters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
