"""Tables as files with their checksum in the name, and the shards of an active rollout.

All samples of a group are in one shard. While a rollout runs, finished groups are written to
`plans/<digest>/groups/<attempt>-<number>-<sha256[:16]>.parquet`, and a retry adopts these files. If
two attempts finished the same group, the first shard with the group counts: by name while the
rollout runs, then in the order of the node's record.

Entry points: `ShardWriter`, `adopt`, `read_rows`, `open_tables`, `write_table`, `write_data`,
`split_by_size`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import PurePosixPath
from typing import TypeVar
from uuid import uuid4

import numpy as np
import pyarrow as pa

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.rules import repeated_keys
from rlpipe.store.parquet.schema import SAMPLES, StoredTable, decode, encode
from rlpipe.types import FileRecord, Sample

READERS = 8
Item = TypeVar("Item")


def data_folder(stage: str, digest: str) -> str:
    """Return the folder of a node's data files."""
    return f"data/{stage}/{digest}"


def split_by_size(
    items: Sequence[Item], sizes: Sequence[int], most_bytes: int
) -> Iterator[list[Item]]:
    """Yield the items of each file, in order: at most `most_bytes`, or one item.

    `sizes` [items]: bytes of each. Without items there is one empty file.
    """
    part: list[Item] = []
    part_bytes = 0
    for item, size in zip(items, sizes, strict=True):
        if part and part_bytes + size > most_bytes:
            yield part
            part = []
            part_bytes = 0
        part.append(item)
        part_bytes += size
    yield part


def write_data(
    files: Files, folder: str, name: str, data: bytes, rows: int | None = None
) -> FileRecord:
    """Write bytes as `<folder>/<stem>-<sha256[:16]><suffix>`, and return the record of the file.

    Other content gets another name, so attempts never collide. Raises: StoreFull, StoreError.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    pure = PurePosixPath(name)
    path = f"{folder.rstrip('/')}/{pure.stem}-{sha256[:16]}{pure.suffix}"
    files.create(path, data)
    return FileRecord(path=path, size_bytes=len(data), sha256=sha256, rows=rows)


def write_table(
    files: Files,
    folder: str,
    name: str,
    table: pa.Table,
    row_groups: Sequence[int] | None = None,
) -> FileRecord:
    """Write a stored table as `<folder>/<name>-<sha256[:16]>.parquet`. `row_groups`: as `encode`.

    Raises: StoreFull, StoreError.
    """
    data = encode(table, row_groups)
    return write_data(files, folder, f"{name}.parquet", data, table.num_rows)


class ShardWriter:
    """Writes the finished groups of one attempt at a rollout. Not thread-safe."""

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
        """Write whole groups as one shard, durably. `dropped`: drop reason by group id.

        Raises: DataError naming the sample that breaks a rule; StoreFull; StoreError.
        """
        name = f"{self._attempt}-{self._written:05d}"
        for group in groups:
            group_ids = {sample.group_id for sample in group}
            if len(group_ids) != 1:
                raise DataError(
                    "the samples of a group have different group ids",
                    where=f"shard {name}",
                    found=sorted(group_ids),
                    expected="one group_id",
                )
        samples = list(chain.from_iterable(groups))
        table = samples_to_table(samples, self._iteration, dropped, where=f"shard {name}")
        record = write_table(self._files, self._prefix, name, table)
        self._written += 1
        return record


def adopt(files: Files, prefix: str, *, every: bool = False) -> list[tuple[FileRecord, list[str]]]:
    """Return the shards under a prefix, by name, each with the groups that count.

    A group counts in the first shard that has it. Shards without such groups are left out. `every`:
    return all groups of every shard instead. Raises: ObjectCorrupt if the bytes of a shard do not
    match its name, or its rows break a rule.
    """
    paths = files.list(prefix)
    adopted: list[tuple[FileRecord, list[str]]] = []
    seen: set[str] = set()
    # `list` is sorted and `map` keeps the order, so every reader counts the same shards.
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
    """Return all rows of a node's data files in order, or the given columns of them.

    If several shards have a group of samples, the rows come from the first one. Raises:
    ObjectMissing; ObjectCorrupt for a wrong checksum or number of rows, a broken rule, or a
    repeated row of another kind of table; ValueError without files.
    """
    # The keys are needed to find repeated groups and rows.
    wanted = None if columns is None else list(dict.fromkeys(["group_id", "index", *columns]))
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda table: table.read(wanted), open_tables(files, records)))
    # Two attempts may have written the same group of samples. Other tables have one writer.
    if tables[0].schema.metadata == SAMPLES.metadata:
        tables = list(_first_of_each_group(tables))
    table = pa.concat_tables(tables).combine_chunks()
    if repeated_keys(table).any():
        raise ObjectCorrupt(
            "two files of one node have the same row",
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


def open_tables(files: Files, records: Sequence[FileRecord]) -> list[StoredTable]:
    """Return a node's data files, whose bytes have the recorded sha256, undecoded.

    Raises: ObjectMissing; ObjectCorrupt for a wrong checksum or number of rows; ValueError without
    files.
    """
    if not records:
        raise ValueError("a node without data files has no rows")
    with ThreadPoolExecutor(READERS) as pool:
        # Readers of several files take turns at them. Threads of Arrow in each of these threads
        # doubled the CPU time of 64 shards.
        threads = len(records) == 1
        return list(pool.map(lambda record: _opened(files, record, threads=threads), records))


def _opened(files: Files, record: FileRecord, *, threads: bool) -> StoredTable:
    url = files.url(record.path)
    table = StoredTable(files.read(record.path, record.sha256), url, threads=threads)
    if record.rows not in (None, table.num_rows):
        raise ObjectCorrupt(
            "the file has another number of rows than recorded",
            where=url,
            found=table.num_rows,
            expected=record.rows,
        )
    return table


def _read_named(files: Files, path: str) -> tuple[FileRecord, pa.Table]:
    data = files.read(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if not PurePosixPath(path).stem.endswith(f"-{sha256[:16]}"):
        raise ObjectCorrupt(
            "the bytes of the shard do not match its name",
            where=files.url(path),
            found=f"sha256 {sha256}",
            do="delete it: its groups are sampled again",
        )
    table = decode(data, files.url(path))
    return FileRecord(path=path, size_bytes=len(data), sha256=sha256, rows=table.num_rows), table
