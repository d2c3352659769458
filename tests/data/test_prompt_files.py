"""Rows of prompt files: slices, streaming, and changed files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe.config.data import FilePrompts
from rlpipe.data.prompt_files import FileRows, split_slice
from rlpipe.data.prompts import StreamedPrompts, file_digests, load_prompts, with_metadata
from rlpipe.errors import DataError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Write the same seven rows as JSON lines and as Parquet in row groups of three."""
    rows = [{"prompt": f"question {number} ü", "n": number} for number in range(7)]
    lines = tmp_path / "rows.jsonl"
    lines.write_text(
        "\n".join(
            f"{json.dumps(row, ensure_ascii=False)}{chr(10) * (row['n'] % 2)}" for row in rows
        ),
        encoding="utf-8",
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=3)
    return {"jsonl": str(lines), "parquet": f"{tmp_path}/rows.parquet"}


KINDS = pytest.mark.parametrize("kind", ["jsonl", "parquet"])


def prompts(*paths: str) -> FilePrompts:
    return FilePrompts(type="file", paths=paths)


@KINDS
@pytest.mark.parametrize(
    ("row_slice", "numbers"),
    [
        ("", range(7)),
        ("@[2:4]", range(2, 4)),
        ("@[:3]", range(3)),
        ("@[5:]", range(5, 7)),
        ("@[-2:]", range(5, 7)),
        ("@[0:99]", range(7)),
    ],
)
def test_a_slice_has_python_semantics(
    files: dict[str, str], kind: str, row_slice: str, numbers: range
):
    rows = FileRows(files[kind] + row_slice)
    assert [content["n"] for _, content in rows] == list(numbers)
    assert len(rows) == len(numbers)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("@[7:9]", "no row of the file is in the slice"),
        ("@[a:b]", "not a slice of rows"),
        ("@[1:2:3]", "not a slice of rows"),
    ],
)
def test_an_empty_or_malformed_slice_is_refused(files: dict[str, str], path: str, problem: str):
    with pytest.raises(DataError, match=problem):
        FileRows(files["jsonl"] + path)


def test_a_path_with_other_brackets_is_not_a_slice():
    assert split_slice("a@b/[x].jsonl") == ("a@b/[x].jsonl", slice(None))


@KINDS
def test_streamed_rows_equal_loaded_rows_in_any_order(files: dict[str, str], kind: str):
    copied = shutil.copy(files["jsonl"], Path(files["jsonl"]).with_name("again.jsonl"))
    source = prompts(files[kind] + "@[1:]", str(copied))
    in_memory = load_prompts(source)
    streamed = load_prompts(source, streaming=True)
    assert isinstance(streamed, StreamedPrompts)
    assert list(streamed) == list(in_memory)
    assert [streamed[number] for number in (12, 0, 6, -1, 3)] == [
        in_memory[number] for number in (12, 0, 6, -1, 3)
    ]
    assert streamed[2:5] == in_memory[2:5]
    with pytest.raises(IndexError):
        streamed[13]


@KINDS
def test_a_changed_file_is_an_error(files: dict[str, str], kind: str):
    rows = load_prompts(prompts(files[kind]), streaming=True)
    path = Path(files[kind])
    path.write_bytes(path.read_bytes().replace(b"question 3", b"question 8") + b" ")
    with pytest.raises(DataError, match="has changed since the run started"):
        rows[3]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_row_is_named_when_prompts_are_loaded(
    files: dict[str, str], tmp_path: Path, streaming: bool
):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": 0.5}\n')
    with pytest.raises(DataError, match="not a prompt") as caught:
        load_prompts(prompts(files["jsonl"], str(path)), streaming=streaming)
    assert caught.value.where == f"{path}:2, column 'prompt'"


@pytest.mark.integration
@pytest.mark.parametrize("streaming", [False, True])
def test_processes_read_the_same_rows(files: dict[str, str], streaming: bool):
    source = prompts(files["parquet"], files["jsonl"])
    assert list(load_prompts(source, workers=2, streaming=streaming)) == list(load_prompts(source))


def test_tools_of_a_row_are_a_list_or_json_text(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = tmp_path / "t.jsonl"
    rows = [
        {"prompt": "a", "tools": tools},
        {"prompt": "b", "tools": json.dumps(tools), "metadata": {"x": 1}},
        {"prompt": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FilePrompts(type="file", paths=(str(path),), tool_key="tools")
    assert [row.metadata for row in load_prompts(source)] == [
        {"tools": tools},
        {"x": 1, "tools": tools},
        {},
    ]
    path.write_text('{"prompt": "a", "tools": "f"}\n')
    with pytest.raises(DataError, match="the tools are not JSON"):
        load_prompts(source)
    path.write_text('{"prompt": "a", "tools": {"name": "f"}}\n')
    with pytest.raises(DataError, match="not a list of tools"):
        load_prompts(source)


def test_a_slice_has_the_digest_of_its_file(files: dict[str, str]):
    assert file_digests(prompts(files["jsonl"] + "@[1:2]")) == file_digests(prompts(files["jsonl"]))


def test_metadata_entries_are_set_for_all_rows(files: dict[str, str]):
    rows = load_prompts(prompts(files["jsonl"]))
    assert with_metadata(rows, {}) is rows
    assert {row.metadata["rm_type"] for row in with_metadata(rows, {"rm_type": "f1"})} == {"f1"}
