"""Samples, rewards and batches as Arrow tables and as Parquet bytes.

A row is a sample, keyed by (group_id, index). `rlpipe.store.columns` lists the columns, `rules` has
the rules. `make_table` and `encode` write, `decode` reads; both ends check every row, so a bad row
is an error that names the row and never reaches the trainer.

Parquet: zstd at level 1; ids and log-probs are split by byte, repeated strings are dictionaries.
10M tokens take 41.7 MB (4.17 bytes a token), of which log-probs are 84 %.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.store import columns
from rlpipe.store.columns import KIND, STORED, Table, list_of
from rlpipe.store.parquet.arrays import to_column
from rlpipe.store.parquet.rules import check, with_companions

SAMPLES = columns.SAMPLES.schema
REWARDS = columns.REWARDS.schema
BATCH = columns.BATCH.schema
SCHEMAS = {schema.metadata[KIND]: schema for schema in (SAMPLES, REWARDS, BATCH)}
SCHEMAS |= {kind: SCHEMAS[table.schema.metadata[KIND]] for kind, table in columns.EARLIER.items()}

OPTIONAL = {column.name for table in STORED for column in table.columns if column.optional}
ROW_GROUP_ROWS = 1024
SPLIT = {pa.int32(), pa.float32()}
"""Types whose bytes are split (BYTE_STREAM_SPLIT). DELTA_BINARY_PACKED is worse on token ids."""


def make_table(schema: pa.Schema, values: Mapping[str, Any], where: str) -> pa.Table:
    """Return a checked table of lists or Arrow arrays, one per field.

    A nullable field may be left out. Raises: DataError naming the column, and the row if one row
    is wrong.
    """
    if unknown := set(values) - set(schema.names):
        raise DataError("no such column", where=where, found=sorted(unknown), expected=schema.names)
    rows = len(next(iter(values.values()), ()))
    arrays = [to_column(field, values.get(field.name), rows, where) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    check(table, where, DataError)
    return table


def encode(table: pa.Table, row_groups: Sequence[int] | None = None) -> bytes:
    """Return a stored table as Parquet. Equal tables give equal bytes.

    `row_groups`: rows that are read together, in order; None: all. A larger group is cut.

    Raises: ValueError for a table of another schema.
    """
    schema = _schema_of(table.schema)
    if schema is None or not table.schema.equals(schema):
        raise ValueError(f"not one of the store's tables: {table.schema.names}")
    table = _without_empty(table)
    buffer = io.BytesIO()
    options = WRITE_OPTIONS[schema.metadata[KIND]]
    # In memory: an exception in a streaming write would publish a truncated object.
    with pq.ParquetWriter(buffer, table.schema, **options) as writer:
        start = 0
        for rows in row_groups or [table.num_rows]:
            writer.write_table(table.slice(start, rows), row_group_size=ROW_GROUP_ROWS)
            start += rows
    assert start == table.num_rows, "row groups of another table"
    return buffer.getvalue()


def decode(data: bytes, where: str, names: Sequence[str] | None = None) -> pa.Table:
    """Return the checked table in Parquet bytes, or the columns `names` of it.

    Of some columns only the rules between these are checked. Raises: ObjectCorrupt naming `where`
    and the row.
    """
    return StoredTable(data, where).read(names)


class StoredTable:
    """A stored table in Parquet bytes, from which columns and rows are read."""

    def __init__(self, data: bytes, where: str, *, threads: bool = True) -> None:
        """`where`: name of the bytes in errors. `threads`: decode columns in parallel.

        Raises: ObjectCorrupt for another schema.
        """
        self.where = where
        self._threads = threads
        with _readable_parquet(where):
            self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
            found = self._file.schema_arrow
        schema = _schema_of(found)
        if schema is None or not _readable(found, schema):
            raise self._other_schema()
        self.schema: pa.Schema = schema
        self.stored_names: list[str] = found.names
        """Columns of the file. Those of the schema that it lacks are null."""

    @property
    def num_rows(self) -> int:
        return self._file.metadata.num_rows

    def has(self, names: Sequence[str]) -> bool:
        """True if the file has these columns, without a null in the first row."""
        if not set(names) <= set(self.stored_names) or self.num_rows == 0:
            return False
        with _readable_parquet(self.where):
            first = next(self._file.iter_batches(1, row_groups=[0], columns=list(names)))
            return all(column.null_count == 0 for column in first.columns)

    def require(self, schema: pa.Schema) -> None:
        """Raises: ObjectCorrupt if this is not a table of this schema."""
        if self.schema is not schema:
            raise self._other_schema(schema.names)

    def read(self, names: Sequence[str] | None = None) -> pa.Table:
        """Return all rows, checked. Arguments and errors as `decode`."""
        if set(names or ()) - set(self.schema.names):
            raise self._other_schema(names or ())
        wanted = self.schema.names if names is None else with_companions(self.schema, set(names))
        table = self._checked(wanted, None)
        return table if names is None else table.select(list(names))

    def read_part(self, names: Sequence[str], rows: np.ndarray | None = None) -> pa.Table:
        """Return these columns, with the keys, of some rows.

        `rows`: ascending row numbers; None: all. Only row groups with such rows are decoded. The
        rules are checked between the columns that are read. Raises: ObjectCorrupt.
        """
        wanted = {"group_id", "index", *names}
        return self._checked([name for name in self.schema.names if name in wanted], rows)

    def _checked(self, names: Sequence[str], rows: np.ndarray | None) -> pa.Table:
        stored = [name for name in names if name in self.stored_names]
        with _readable_parquet(self.where):
            if rows is None:
                table = self._file.read(columns=stored, use_threads=self._threads)
                taken = None
            else:
                groups, taken = self._row_groups(rows)
                table = self._file.read_row_groups(
                    groups, columns=stored, use_threads=self._threads
                )
            table = _completed(table, self.schema, names)
            # Offsets of a damaged file may point outside the values, and would crash later code.
            table.validate(full=True)
            if taken is not None and len(taken) < table.num_rows:
                table = table.take(pa.array(taken))
        check(table, self.where, ObjectCorrupt)
        return table

    def _row_groups(self, rows: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Return the row groups that have these rows, and the positions of the rows in them."""
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        ends = np.cumsum(sizes, dtype=np.int64)
        group_of_row = np.searchsorted(ends, rows, side="right")
        groups = np.unique(group_of_row)
        read = np.array(sizes, np.int64)[groups]
        before = np.cumsum(read) - read
        position = np.searchsorted(groups, group_of_row)
        starts = (ends - sizes)[groups]
        return groups.tolist(), before[position] + rows - starts[position]

    def _other_schema(self, names: Sequence[str] = ()) -> ObjectCorrupt:
        found = self._file.schema_arrow
        return ObjectCorrupt(
            "the Parquet file has another schema",
            where=self.where,
            found=found.names,
            expected=_expected(found, names),
        )


@contextmanager
def _readable_parquet(where: str) -> Iterator[None]:
    """Raises: ObjectCorrupt naming `where` for an error of Arrow."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ObjectCorrupt("not a readable Parquet file", where=where, found=error) from error


def _without_empty(table: pa.Table) -> pa.Table:
    """Return the table without the optional columns in which every row is null."""
    empty = [
        name
        for name in OPTIONAL
        if name in table.column_names and table[name].null_count == table.num_rows
    ]
    return table.drop_columns(empty)


def _readable(found: pa.Schema, schema: pa.Schema) -> bool:
    """True if a file with the schema `found` is this table, perhaps of an earlier release.

    A nullable column may be missing, and a list that is large now may be a small one.
    """
    missing = {field.name for field in schema if field.nullable} - set(found.names)
    expected = [
        pa.field(field.name, list_of(field.type.value_type), field.nullable)
        if _is_small_list(field, found)
        else field
        for field in schema
        if field.name not in missing
    ]
    return found.equals(pa.schema(expected))


def _is_small_list(field: pa.Field, found: pa.Schema) -> bool:
    return (
        pa.types.is_large_list(field.type)
        and field.name in found.names
        and pa.types.is_list(found.field(field.name).type)
    )


def _completed(table: pa.Table, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
    """Return the table with the columns that the file does not have, as nulls."""
    wanted = pa.schema([schema.field(name) for name in names], metadata=schema.metadata)
    present = set(table.column_names)
    arrays = [
        table[field.name].cast(field.type)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(arrays, schema=wanted).combine_chunks()


def _schema_of(schema: pa.Schema) -> pa.Schema | None:
    return SCHEMAS.get((schema.metadata or {}).get(KIND, b""))


def _expected(found: pa.Schema, names: Sequence[str]) -> str:
    schema = _schema_of(found)
    if schema is None:
        kinds = [name.decode() for name in SCHEMAS]
        return f"the kind in the schema's metadata to be one of {kinds}"
    differing = [str(field) for field in schema if field not in list(found)]
    return "; ".join([*differing, *sorted(set(names) - set(schema.names))])


def _write_options(table: Table) -> dict[str, Any]:
    split = [
        leaf
        for column in table.columns
        for leaf in column.leaves
        if pa.types.is_list(column.type) and column.type.value_type in SPLIT
    ]
    dictionaries = [leaf for one in table.columns if one.dictionary for leaf in one.leaves]
    return {
        "version": "2.6",
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": sorted(dictionaries),
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": [column.name for column in table.columns if column.statistics],
        "write_page_checksum": True,
    }


WRITE_OPTIONS = {table.schema.metadata[KIND]: _write_options(table) for table in STORED}
