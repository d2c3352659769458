"""Conversions between Arrow columns, NumPy arrays and Python lists.

A list column is "ragged": flat values [sum of lengths] and offsets [rows + 1]. Tokens pass through
NumPy and never become one Arrow scalar each: a million tokens take tens of milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlpipe.errors import DataError
from rlpipe.store.columns import EXPERTS, list_of


def ragged(column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat values [sum of lengths] and offsets [rows + 1] int64 of a list column.

    A null list has length 0.
    """
    lists = combined(column)
    offsets = np.concatenate([[0], np.cumsum(lengths(lists), dtype=np.int64)])
    return to_numpy(lists.flatten()), offsets


def from_ragged(values: np.ndarray, offsets: np.ndarray, element: pa.DataType) -> pa.Array:
    """Return the list column of flat values and offsets: the inverse of `ragged`."""
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(values, element), type=list_of(element)
    )


def from_experts(rows: Sequence[np.ndarray | None]) -> pa.Array:
    """Return the column of routed experts from [tokens, W] of each row; None becomes null."""
    flat = [np.zeros(0, np.uint16) if row is None else row.reshape(-1) for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in flat], dtype=np.int64)])
    values = pa.array(np.concatenate([np.zeros(0, np.uint16), *flat]), pa.uint16())
    absent = pa.array([row is None for row in rows], pa.bool_())
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), values, type=EXPERTS, mask=absent
    )


def to_column(field: pa.Field, values: Any, rows: int, where: str) -> pa.Array:
    """Return the values of one field as an Arrow array.

    `values`: a list, an Arrow array, or None for a nullable field without values.

    Raises: DataError naming the column, and the row where one value does not fit.
    """
    if values is None and field.nullable:
        return pa.nulls(rows, field.type)
    if values is None or len(values) != rows:
        raise DataError(
            f"column {field.name} has not one value per row",
            where=where,
            found="nothing" if values is None else len(values),
            expected=rows,
        )
    try:
        return _convert(values, field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        row = next((row for row, value in enumerate(values) if not _fits(value, field.type)), "?")
        raise DataError(
            f"{field.name} is not {field.type}", where=f"{where} row {row}", found=error
        ) from error


def any_in_row(
    column: pa.ChunkedArray, predicate: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return one flag per row: the predicate holds for a value of its list or map."""
    lists = combined(column)
    if pa.types.is_map(lists.type):
        lists = pa.ListArray.from_arrays(lists.offsets, lists.items)
    flags = predicate(to_numpy(lists.flatten()))
    # The usual case: the sums below take most of the time of a check.
    if not flags.any():
        return np.zeros(len(lists), bool)
    count = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(lengths(lists))
    return np.diff(count[ends], prepend=0) > 0


def combined(column: pa.Array | pa.ChunkedArray) -> Any:
    """Return the column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def to_numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the column as a NumPy array."""
    return combined(column).to_numpy(zero_copy_only=False)


def lengths(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the number of values of each list; 0 for a null list."""
    return to_numpy(combined(column).value_lengths().fill_null(0))


def nulls(column: pa.ChunkedArray) -> np.ndarray:
    """Return one flag per row: the value is null."""
    return to_numpy(column.is_null())


def _convert(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values if values.type == kind else values.cast(kind)
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        return _from_lists(values, kind)
    return pa.array(values, kind)


def _from_lists(rows: Sequence[Sequence[float] | None], kind: pa.ListType) -> pa.Array:
    # Not pa.array: Arrow cuts 2.5 to 2 in a list of integers and accepts None in a list without
    # nulls. `array` refuses both, and takes half of the time of np.array.
    code = "q" if pa.types.is_integer(kind.value_type) else "d"
    parts = [np.frombuffer(array(code, row), code) for row in rows if row is not None]
    flat = np.concatenate([np.zeros(0, code), *parts])
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
