"""Tables as files whose names carry their checksum, and the groups of a rollout that is under way.

A group (all samples of one prompt draw) is never split over shards. While a rollout runs, finished
groups are flushed to `plans/<digest>/groups/<attempt>-<number>-<sha256[:16]>.parquet`; whoever
retries it adopts what is there. Two attempts may both have finished a group: the first shard (by
name, then as recorded in the node) that holds it counts, everywhere.

Not here: which groups are wanted (`plans`), or what a stage makes of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import PurePosixPath
from uuid import uuid4

import numpy as np
import pyarrow as pa

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.rules import repeated_keys
from rlpipe.store.parquet.schema import SAMPLES, decode, encode
from rlpipe.types import FileRecord, Sample

READERS = 8


def data_folder(stage: str, digest: str) -> str:
    """Where the data files of a node live."""
    return f"data/{stage}/{digest}"


def write_data(
    files: Files, folder: str, name: str, data: bytes, rows: int | None = None
) -> FileRecord:
    """Write bytes as `<folder>/<stem>-<sha256[:16]><suffix>`: other content gets another name, so
    attempts never collide.

    Raises: StoreFull, StoreError.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    pure = PurePosixPath(name)
    path = f"{folder.rstrip('/')}/{pure.stem}-{sha256[:16]}{pure.suffix}"
    files.create(path, data)
    return FileRecord(path=path, size_bytes=len(data), sha256=sha256, rows=rows)


def write_table(files: Files, folder: str, name: str, table: pa.Table) -> FileRecord:
    """Write a table of the store as `<folder>/<name>-<sha256[:16]>.parquet`. Raises: StoreFull,
    StoreError."""
    return write_data(files, folder, f"{name}.parquet", encode(table), table.num_rows)


class ShardWriter:
    """Flushes finished groups of one attempt at one rollout. Not thread-safe: one attempt has one
    writer."""

    def __init__(
        self, files: Files, prefix: str, iteration: int, attempt: str | None = None
    ) -> None:
        self._files = files
        self._prefix = prefix
        self._iteration = iteration
        self._attempt = attempt or uuid4().hex[:12]
        self._written = 0

    def write(
        self, groups: Sequence[Sequence[Sample]], dropped: Mapping[str, str] | None = None
    ) -> FileRecord:
        """One shard of whole groups; durable when this returns. `dropped`: group id → why it will
        not be trained.

        Raises: DataError naming the sample that breaks a rule; StoreFull; StoreError.
        """
        name = f"{self._attempt}-{self._written:05d}"
        for group in groups:
            if len({sample.group_id for sample in group}) != 1:
                found = sorted({sample.group_id for sample in group})
                raise DataError(
                    "the samples of a group have one group_id", where=f"shard {name}", found=found
                )
        samples = list(chain.from_iterable(groups))
        table = samples_to_table(samples, self._iteration, dropped, where=f"shard {name}")
        record = write_table(self._files, self._prefix, name, table)
        self._written += 1
        return record


def adopt(files: Files, prefix: str, *, every: bool = False) -> list[tuple[FileRecord, list[str]]]:
    """The shards under a prefix, by name, each with the groups that count from it; shards that add
    none are left out.

    `every`: each with all of its groups.

    Raises: ObjectCorrupt if a shard is not what its name says, or breaks a rule.
    """
    paths = files.list(prefix)
    adopted: list[tuple[FileRecord, list[str]]] = []
    seen: set[str] = set()
    with ThreadPoolExecutor(READERS) as pool:
        for record, table in pool.map(lambda path: _read_named(files, path), paths):
            groups = [
                group
                for group in dict.fromkeys(table["group_id"].to_pylist())
                if every or group not in seen
            ]
            seen.update(groups)
            if groups:
                adopted.append((record, groups))
    return adopted


def read_rows(
    files: Files, records: Sequence[FileRecord], columns: Sequence[str] | None = None
) -> pa.Table:
    """All rows of the data files of one node, in order, or some of their columns.

    Of a group of samples that is in several shards, the rows of the first. Raises: ObjectMissing;
    ObjectCorrupt (a file's checksum or number of rows, a rule, a row of another kind that occurs
    twice); ValueError without any file.
    """
    if not records:
        raise ValueError("a node without data files has no rows")
    wanted = None if columns is None else list(dict.fromkeys(["group_id", "index", *columns]))
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda record: _read(files, record, wanted), records))
    if tables[0].schema.metadata == SAMPLES.metadata:
        tables = list(_first_of_each_group(tables))
    table = pa.concat_tables(tables).combine_chunks()
    if repeated_keys(table).any():
        raise ObjectCorrupt(
            "a row is in two files of one node",
            where=files.url(records[0].path),
            found=f"{len(records)} files",
        )
    return table if columns is None else table.select(list(columns))


def _first_of_each_group(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    seen: set[str] = set()
    for table in tables:
        groups = table["group_id"].to_pylist()
        fresh = np.array([group not in seen for group in groups], dtype=bool)
        seen.update(groups)
        yield table if fresh.all() else table.filter(pa.array(fresh))


def _read(files: Files, record: FileRecord, columns: Sequence[str] | None) -> pa.Table:
    url = files.url(record.path)
    table = decode(files.read(record.path, record.sha256), url, columns)
    if record.rows not in (None, table.num_rows):
        problem = "the file has not the recorded number of rows"
        raise ObjectCorrupt(problem, where=url, found=table.num_rows, expected=record.rows)
    return table


def _read_named(files: Files, path: str) -> tuple[FileRecord, pa.Table]:
    data = files.read(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if not PurePosixPath(path).stem.endswith(f"-{sha256[:16]}"):
        do = "delete it: its groups are sampled again"
        raise ObjectCorrupt(
            "a shard is not what its name says",
            where=files.url(path),
            found=f"sha256 {sha256}",
            do=do,
        )
    table = decode(data, files.url(path))
    return FileRecord(path=path, size_bytes=len(data), sha256=sha256, rows=table.num_rows), table
