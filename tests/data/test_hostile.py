"""Malformed prompt files: every row is valid, or a DataError names file and row."""

from __future__ import annotations

import datetime
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.data import FilePrompts
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import DataError

DEEP = b"[" * 100_000
LINES = {
    "not UTF-8": b'{"p": "a", "l": 1}\n\xff\n',
    "deep nesting": DEEP,
    "deep nesting in a prompt": b'{"p": ' + DEEP + b"]" * 100_000 + b', "l": 1}',
    "half a surrogate pair": b'{"p": "\\ud800", "l": 1}',
    "half a pair in a message": b'{"p": [{"role": "user", "content": "\\ud800"}], "l": 1}',
    "NaN in a message": b'{"p": [{"role": "user", "content": NaN}], "l": 1}',
    "NaN as a label": b'{"p": "a", "l": NaN}',
    "an infinite label": b'{"p": "a", "l": 1e999}',
    "half a surrogate pair in a label": b'{"p": "a", "l": "\\ud800"}',
    "NaN in metadata": b'{"p": "a", "l": 1, "m": {"a": NaN}}',
    "deep nesting in metadata": b'{"p": "a", "l": 1, "m": "' + DEEP + b'"}',
    "deep nesting in tools": b'{"p": "a", "l": 1, "t": "' + DEEP + b'"}',
    "NaN in tools": b'{"p": "a", "l": 1, "t": [{"a": NaN}]}',
    "too many digits": b'{"p": ' + b"9" * 5000 + b"}",
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def _load(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return load_prompts(
        FilePrompts(
            type="file",
            paths=(str(path),),
            input_key="p",
            label_key="l",
            metadata_key="m",
            tool_key="t",
        )
    )


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_that_a_plan_cannot_store_is_named(line: bytes, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        _load(tmp_path / "a.jsonl", line)
    assert str(caught.value.where).startswith(f"{tmp_path}/a.jsonl:")


@given(row=st.dictionaries(st.sampled_from("plmt"), JSON, min_size=2))
def test_an_arbitrary_row_can_be_stored_or_is_refused(
    row: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    with suppress(DataError):
        (row_read,) = _load(path, json.dumps(row).encode())
        json.dumps(
            [row_read.prompt, row_read.label, row_read.metadata],
            allow_nan=False,
            ensure_ascii=False,
        ).encode()


def _parquet(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({"l": ["1"], **{name: pa.array([value]) for name, value in columns.items()}}),
        buffer,
    )
    return buffer.getvalue()


@pytest.mark.parametrize(
    "columns",
    [
        {"p": b"a"},
        {"p": 1.5},
        {"p": datetime.date(2026, 1, 1)},
        {"p": [{"role": "user", "content": b"x"}]},
        {"p": [{"role": "user", "content": datetime.date(2026, 1, 1)}]},
        {"p": [{"role": b"user", "content": "x"}]},
        {"p": "a", "m": {"a": b"x"}},
        {"p": "a", "m": {"a": float("nan")}},
        {"p": "a", "l": float("inf")},
        {"p": "a", "t": [1]},
    ],
)
def test_parquet_values_of_other_types_are_named_by_row(columns: dict[str, Any], tmp_path: Path):
    with pytest.raises(DataError, match="row 0"):
        _load(tmp_path / "a.parquet", _parquet(**columns))


WHOLE = io.BytesIO()
pq.write_table(
    pa.table({"p": [f"prompt {n}" for n in range(40)], "l": ["1"] * 40, "m": ["{}"] * 40}), WHOLE
)


@given(
    changes=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 10**4),
)
def test_damaged_parquet_is_read_or_refused(
    changes: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
):
    content = bytearray(WHOLE.getvalue())
    for offset, value in changes:
        content[offset % len(content)] = value
    with suppress(DataError):
        _load(
            tmp_path_factory.getbasetemp() / "any.parquet",
            bytes(content[: len(content) if cut % 4 else cut % len(content)]),
        )


@pytest.mark.parametrize(
    "path", ["github://a.jsonl", "abc://a.jsonl", "\0.jsonl", "a.jsonl@[" + "9" * 5000 + ":]"]
)
def test_an_invalid_path_is_refused(path: str):
    with pytest.raises(DataError):
        load_prompts(FilePrompts(type="file", paths=(path,), input_key="p"))
