"""What a row is, in Arrow and in Parquet: samples, rewards, batch rows.

One row per sample, keyed by (group_id, index). A table knows its kind (schema metadata), and every
table is checked by the same rules when it is written and when it is read: a bad row is an error
that names it, never a surprise in the trainer.

Parquet: ids and log-probs are split by byte and compressed with zstd; repeated strings are
dictionaries. `prompt` and `metadata` are JSON text. Log-probs and advantages are float32: a Python
float that is none is rounded.

Not here: files and their names (`shards`), or Python objects (`rows`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.errors import DataError, ObjectCorrupt, RlpipeError
from rlpipe.types import Status

KIND = b"rlpipe"


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_required("element", kind))


def _large_list(kind: pa.DataType) -> pa.DataType:
    """For what may be more than 2^31 values in a table."""
    return pa.large_list(_required("element", kind))


VERSION_RUN = pa.struct([_required("tokens", pa.int32()), _required("version", pa.int32())])

SAMPLES = pa.schema(
    [
        _required("iteration", pa.int64()),
        _required("group_id", pa.string()),
        _required("index", pa.int32()),
        _required("prompt", pa.string()),
        _required("prompt_ids", _list(pa.int32())),
        pa.field("label", pa.string()),
        _required("metadata", pa.string()),
        _required("seed", pa.int64()),
        _required("response", pa.string()),
        _required("response_ids", _list(pa.int32())),
        pa.field("rollout_log_probs", _list(pa.float32())),
        pa.field("loss_mask", _list(pa.uint8())),
        _required("weight_versions", _list(VERSION_RUN)),
        _required("status", pa.string()),
        _required("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("reward", pa.float64()),
        _required("reward_parts", pa.map_(pa.string(), _required("value", pa.float64()))),
        _required("engine", pa.string()),
        _required("t_start_s", pa.float64()),
        _required("t_end_s", pa.float64()),
        pa.field("drop_reason", pa.string()),
        pa.field("rollout_id", pa.int32()),
        pa.field("remove_sample", pa.bool_()),
        pa.field("non_generation_time", pa.float64()),
        pa.field("num_turns", pa.int32()),
        pa.field("rollout_routed_experts", _large_list(pa.uint16())),
        pa.field("teacher_log_probs", _list(pa.float32())),
    ],
    metadata={KIND: b"samples/1"},
)
"""`types.Sample`, the iteration that sampled it, why its group is not trained (null: it may be).
Experts: W of each token."""

REWARDS = pa.schema(
    [
        _required("group_id", pa.string()),
        _required("index", pa.int32()),
        pa.field("reward", pa.float64()),
        _required("parts", pa.map_(pa.string(), _required("value", pa.float64()))),
        pa.field("error", pa.string()),
    ],
    metadata={KIND: b"rewards/1"},
)
"""What a verifier said; a row without a reward has an error."""

BATCH = pa.schema(
    [
        _required("group_id", pa.string()),
        _required("index", pa.int32()),
        _required("tokens", _list(pa.int32())),
        _required("prompt_len", pa.int32()),
        pa.field("rollout", pa.int64()),
        _required("loss_mask", _list(pa.uint8())),
        pa.field("rollout_log_probs", _list(pa.float32())),
        pa.field("proximal_log_probs", _list(pa.float32())),
        pa.field("reference_log_probs", _list(pa.float32())),
        pa.field("teacher_log_probs", _list(pa.float32())),
        pa.field("advantages", _list(pa.float32())),
        pa.field("values", _list(pa.float32())),
        pa.field("returns", _list(pa.float32())),
        pa.field("routed_experts", _large_list(pa.uint16())),
    ],
    metadata={KIND: b"batch/2"},
)
"""All that `train` needs: prompt + response tokens; a number for the rollout that a sample is of; W
experts of every token; one value per response token in each of the other lists. What may be null is
in all rows or in none."""

KINDS = {schema.metadata[KIND]: schema for schema in (SAMPLES, REWARDS, BATCH)}
PER_TOKEN = (
    "loss_mask",
    "rollout_log_probs",
    "proximal_log_probs",
    "reference_log_probs",
    "teacher_log_probs",
    "advantages",
    "values",
    "returns",
)
STATUSES = [status.value for status in Status]
SPLIT = {pa.int32(), pa.float32()}
DICTIONARY = {
    "iteration", "group_id", "prompt", "prompt_len", "label", "metadata", "status", "finish_reason", "engine", "error",
    "drop_reason", "loss_mask.list.element", "weight_versions.list.element.tokens", "weight_versions.list.element.version",
    "reward_parts.key_value.key", "parts.key_value.key", "routed_experts.list.element",
    "rollout_routed_experts.list.element",
}  # fmt: skip
STATISTICS = ("iteration", "group_id", "index", "reward", "status", "drop_reason")


def ragged(column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column as flat values [sum of lengths] and offsets [rows + 1] int64; a null list has
    length 0."""
    array = _array(column)
    return _numpy(array.flatten()), np.concatenate(
        [[0], np.cumsum(_lengths(array), dtype=np.int64)]
    )


def from_ragged(values: np.ndarray, offsets: np.ndarray, kind: pa.DataType) -> pa.Array:
    """The list column of flat values and offsets; the inverse of `ragged`. `kind` is the element's
    type."""
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(values, kind), type=_list(kind)
    )


def from_experts(rows: Sequence[np.ndarray | None]) -> pa.Array:
    """The column of routed experts, from [tokens, W] of each row; None where they are not known."""
    there = [np.zeros(0, np.uint16) if row is None else row.reshape(-1) for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in there], dtype=np.int64)])
    values = pa.array(np.concatenate([np.zeros(0, np.uint16), *there]), pa.uint16())
    absent = pa.array([row is None for row in rows], pa.bool_())
    kind = _large_list(pa.uint16())
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), values, type=kind, mask=absent
    )


def make_table(schema: pa.Schema, columns: Mapping[str, Any], where: str) -> pa.Table:
    """A checked table of lists or Arrow arrays, one per field; a nullable field may be left out.

    Raises: DataError naming the column, and the row where there is one.
    """
    if unknown := set(columns) - set(schema.names):
        raise DataError("no such column", where=where, found=sorted(unknown), expected=schema.names)
    rows = len(next(iter(columns.values()), ()))
    arrays = [_column(field, columns.get(field.name), rows, where) for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    check(table, where, DataError)
    return table


def encode(table: pa.Table) -> bytes:
    """A table of one of the three kinds as Parquet. Equal tables give equal bytes. Raises:
    ValueError for another kind."""
    kind = _kind(table.schema)
    if kind is None or not table.schema.equals(kind):
        raise ValueError(f"not one of the store's tables: {table.schema.names}")
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=1024, **WRITE_OPTIONS[kind.metadata[KIND]])
    return buffer.getvalue()


def decode(data: bytes, where: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The checked table in Parquet bytes, or some of its columns (checked as far as they go).

    Raises: ObjectCorrupt naming `where` and the row.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        found = file.schema_arrow
        kind = _kind(file.schema_arrow)
        if kind is None or not _readable(found, kind) or set(columns or ()) - set(kind.names):
            expected = _expected(found, columns or ())
            raise ObjectCorrupt(
                "not the table it should be", where=where, found=found.names, expected=expected
            )
        wanted = kind.names if columns is None else _with_companions(kind, columns)
        table = _completed(
            file.read(columns=[name for name in wanted if name in found.names]), kind, wanted
        )
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ObjectCorrupt("not a readable Parquet file", where=where, found=error) from error
    check(table, where, ObjectCorrupt)
    return table if columns is None else table.select(list(columns))


def _readable(found: pa.Schema, kind: pa.Schema) -> bool:
    """Is it the kind, but for columns that may be null and were not there yet when the file was
    written?

    Lists that are large now may have been none yet.
    """
    late = {field.name for field in kind if field.nullable} - set(found.names)
    then = [
        pa.field(f.name, _list(f.type.value_type), f.nullable) if _was_small(f, found) else f
        for f in kind
    ]
    return found.equals(pa.schema([field for field in then if field.name not in late]))


def _was_small(field: pa.Field, found: pa.Schema) -> bool:
    return (
        pa.types.is_large_list(field.type)
        and field.name in found.names
        and pa.types.is_list(found.field(field.name).type)
    )


def _completed(table: pa.Table, kind: pa.Schema, names: Sequence[str]) -> pa.Table:
    """With the columns that were not there yet when the file was written: they are null, and may
    be."""
    schema = pa.schema([kind.field(name) for name in names], metadata=kind.metadata)
    there = set(table.column_names)
    columns = [
        table[f.name].cast(f.type) if f.name in there else pa.nulls(table.num_rows, f.type)
        for f in schema
    ]
    return pa.table(columns, schema=schema).combine_chunks()


def check(table: pa.Table, where: str, error: type[RlpipeError]) -> None:
    """Raises `error` naming the first row that breaks a rule of its kind."""
    for wrong, problem in _broken_rules(table):
        if wrong.any():
            row = int(np.argmax(wrong))
            key = f"{table['group_id'][row]}/{table['index'][row]}"
            raise error(problem, where=f"{where} row {row} ({key})")


def _broken_rules(table: pa.Table) -> Iterator[tuple[np.ndarray, str]]:
    """One flag per row, and what is wrong where it is set; only the rules of the columns that are
    there."""
    names = set(table.column_names)
    for field in table.schema:
        nulls = _nulls(table[field.name])
        if not field.nullable or (_kind(table.schema) is BATCH and not nulls.all()):
            yield nulls, f"{field.name} is null"
    yield _numpy(table["index"]) < 0, "index is negative"
    yield repeated_keys(table), "two rows have the same group_id and index"
    for name in names & {"prompt_ids", "response_ids", "tokens"}:
        yield _any_value(table[name], lambda ids: ids < 0), f"{name} has a negative token id"
    for name in names & set(PER_TOKEN):
        yield from _broken_per_token(table, name)
    for name in names & {"reward_parts", "parts"}:
        yield (
            _any_value(table[name], lambda parts: ~np.isfinite(parts)),
            f"{name} has a value that is not finite",
        )
    if "reward" in names:
        yield (
            ~np.isfinite(_numpy(table["reward"])) & ~_nulls(table["reward"]),
            "reward is not finite",
        )
    if names >= {"reward", "parts", "error"}:
        yield _nulls(table["reward"]) & _nulls(table["error"]), "neither a reward nor an error"
    if names >= {"prompt_len", "tokens"}:
        yield (
            (_numpy(table["prompt_len"]) < 0) | (_response_lengths(table) < 0),
            "prompt_len is not within tokens",
        )
    for name in names & {"routed_experts", "rollout_routed_experts"}:
        yield _broken_experts(table, name), f"{name} are not equally many for every token"
    if "status" in names:
        yield np.isin(_numpy(table["status"]), STATUSES, invert=True), "status is not one of ours"
    if "weight_versions" in names:
        yield _broken_runs(table), "weight_versions do not add up to the response"


def _broken_per_token(table: pa.Table, name: str) -> Iterator[tuple[np.ndarray, str]]:
    wrong = (_lengths(table[name]) != _response_lengths(table)) & ~_nulls(table[name])
    yield wrong, f"{name} has not one value per response token"
    if name == "loss_mask":
        yield (
            _any_value(table[name], lambda mask: mask > 1),
            "loss_mask has a value that is neither 0 nor 1",
        )
    else:
        yield (
            _any_value(table[name], lambda values: ~np.isfinite(values)),
            f"{name} has a value that is not finite",
        )


def _broken_experts(table: pa.Table, name: str) -> np.ndarray:
    experts = _lengths(table[name])
    there = ~_nulls(table[name])
    tokens = (
        _lengths(table["tokens"])
        if name == "routed_experts"
        else _lengths(table["prompt_ids"]) + _response_lengths(table)
    )
    width = experts.sum() // max(int(tokens[there].sum()), 1)
    return (experts != tokens * width) & there


def _broken_runs(table: pa.Table) -> np.ndarray:
    column = _array(table["weight_versions"])
    ends = np.cumsum(_lengths(column))
    runs = _numpy(column.flatten().field("tokens")).astype(np.int64)
    tokens = np.concatenate([[0], np.cumsum(np.where(runs < 0, 2**31, runs))])
    total = np.diff(tokens[ends], prepend=0)
    return (_lengths(column) > 0) & (total != _response_lengths(table))


def repeated_keys(table: pa.Table) -> np.ndarray:
    """One flag per row: is its (group_id, index) that of an earlier row?"""
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    if len(set(keys)) == len(keys):
        return np.zeros(len(keys), dtype=bool)
    return np.array([keys.index(key) < row for row, key in enumerate(keys)])


def _with_companions(kind: pa.Schema, columns: Sequence[str]) -> list[str]:
    """The columns, and those that their rules compare them with."""
    experts = set(columns) & {"routed_experts", "rollout_routed_experts"}
    measured = experts | set(columns) & {*PER_TOKEN, "weight_versions", "prompt_len"}
    lengths = {"response_ids", "tokens", "prompt_len"} if measured else set()
    lengths |= {"prompt_ids"} if experts else set()
    return [name for name in kind.names if name in {"group_id", "index", *columns} | lengths]


def _response_lengths(table: pa.Table) -> np.ndarray:
    if "response_ids" in table.column_names:
        return _lengths(table["response_ids"])
    return _lengths(table["tokens"]) - _numpy(table["prompt_len"])


def _any_value(column: pa.ChunkedArray, wrong: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Per row: is any value of its list (or map) wrong?"""
    array = _array(column)
    if pa.types.is_map(array.type):
        array = pa.ListArray.from_arrays(array.offsets, array.items)
    count = np.concatenate([[0], np.cumsum(wrong(_numpy(array.flatten())))])
    ends = np.cumsum(_lengths(array))
    return np.diff(count[ends], prepend=0) > 0


def _array(column: pa.Array | pa.ChunkedArray) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return _array(column).to_numpy(zero_copy_only=False)


def _lengths(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Values per list, 0 where it is null."""
    return _numpy(_array(column).value_lengths().fill_null(0))


def _nulls(column: pa.ChunkedArray) -> np.ndarray:
    return _numpy(column.is_null())


def _column(field: pa.Field, values: Any, rows: int, where: str) -> pa.Array:
    if values is None and field.nullable:
        return pa.nulls(rows, field.type)
    if values is None or len(values) != rows:
        found = "nothing" if values is None else len(values)
        raise DataError(
            f"column {field.name} has not one value per row",
            where=where,
            found=found,
            expected=rows,
        )
    try:
        return _convert(values, field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        row = next((row for row, value in enumerate(values) if not _fits(value, field.type)), "?")
        raise DataError(
            f"{field.name} is not {field.type}", where=f"{where} row {row}", found=error
        ) from error


def _convert(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values if values.type == kind else values.cast(kind)
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        return _from_lists(values, kind)
    return pa.array(values, kind)


def _from_lists(rows: Sequence[Sequence[float] | None], kind: pa.ListType) -> pa.Array:
    """Lists of numbers, through NumPy: Arrow itself would cut 2.5 to 2 and let a None into a list
    that has none."""
    flat = np.array(list(chain.from_iterable(row for row in rows if row is not None)))
    if flat.size and flat.dtype.kind not in ("i" if pa.types.is_integer(kind.value_type) else "if"):
        raise TypeError(f"values of type {flat.dtype}")
    offsets = np.cumsum([0, *(0 if row is None else len(row) for row in rows)], dtype=np.int32)
    absent = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(flat, kind.value_type), type=kind, mask=absent
    )


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        _convert([value], kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return False
    return True


def _kind(schema: pa.Schema) -> pa.Schema | None:
    return KINDS.get((schema.metadata or {}).get(KIND, b""))


def _expected(found: pa.Schema, columns: Sequence[str]) -> str:
    kind = _kind(found)
    if kind is None:
        return f"the kind in the schema's metadata to be one of {[name.decode() for name in KINDS]}"
    return "; ".join(
        [
            *(str(field) for field in kind if field not in list(found)),
            *sorted(set(columns) - set(kind.names)),
        ]
    )


def _write_options(schema: pa.Schema) -> dict[str, Any]:
    leaves = {
        (f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name): field.type
        for field in schema
    }
    split = [
        path for path, kind in leaves.items() if pa.types.is_list(kind) and kind.value_type in SPLIT
    ]
    names = set(schema.names)
    return {
        "version": "2.6",
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [path for path in sorted(DICTIONARY) if path.split(".")[0] in names],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": [path for path in STATISTICS if path in names],
        "write_page_checksum": True,
    }


WRITE_OPTIONS = {kind: _write_options(schema) for kind, schema in KINDS.items()}
