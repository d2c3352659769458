"""Where prompts come from: rows of files, or the generator of `reasoning_gym`, as one list of `PromptRow`.

A row that is wrong is an error that names it (`file:line`, or `task[item]`); no row is ever skipped.

Not here: tokens and templates (`tokens`), order and epochs (`source`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe.config.data import FilePrompts, PromptSource
from rlpipe.data.reasoning_gym import make_questions
from rlpipe.errors import DataError
from rlpipe.types import Prompt


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt as it was given. `where` names it in errors; `metadata` is JSON-able and travels to rewards and hooks."""

    prompt: Prompt
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""


def load_prompts(source: PromptSource) -> list[PromptRow]:
    """All rows of the source, in its own order.

    Raises: DataError for a file that is missing, empty or not readable, and for a row that is not what the source's keys
    say; ConfigError for a task, argument or format that does not exist.
    """
    if isinstance(source, FilePrompts):
        return [row for path in source.paths for row in _read_file(path, source)]
    return [PromptRow(made.prompt, made.label, made.metadata, made.where) for made in make_questions(source)]


def _read_file(path: str, source: FilePrompts) -> list[PromptRow]:
    if path.endswith(".jsonl"):
        raw = _jsonl_rows(path)
    elif path.endswith(".parquet"):
        raw = _parquet_rows(path)
    else:
        raise DataError("not a file type that is read", where=path, found=path, expected="a name ending in .jsonl or .parquet")
    rows = [_row(content, source, where) for where, content in raw]
    if not rows:
        raise DataError("the prompt file is empty", where=path, found="0 rows", expected="at least one")
    return rows


def file_digests(source: PromptSource) -> list[str]:
    """sha256 of each prompt file; none for made prompts, which their arguments decide. Raises: DataError."""
    return [hashlib.sha256(_bytes_of(path)).hexdigest() for path in source.paths] if isinstance(source, FilePrompts) else []


def _bytes_of(path: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as stream:
            return stream.read()  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            "the prompt file cannot be read",
            where=path,
            found=f"{type(error).__name__}: {error}",
            expected="a file, or an fsspec URL",
            do="a relative path counts from the folder the run is started in",
        ) from error


def _jsonl_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_bytes_of(path).split(b"\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise DataError("the line is not JSON", where=where, found=f"{_short(line)} ({error})") from error
        if not isinstance(content, dict):
            raise DataError("the line is not a JSON object", where=where, found=_short(content), expected="{...}")
        yield where, content


def _parquet_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        table = pq.read_table(pa.BufferReader(_bytes_of(path)))
    except pa.ArrowException as error:
        raise DataError("the file is not Parquet", where=path, found=str(error)) from error
    for number, content in enumerate(table.to_pylist()):
        yield f"{path}:row {number}", content


def _row(content: dict[str, Any], source: FilePrompts, where: str) -> PromptRow:
    label = None if source.label_key is None else _label(_value(content, source.label_key, "label_key", where), where)
    prompt = _prompt(_value(content, source.input_key, "input_key", where), where)
    return PromptRow(prompt, label, _metadata(content, source.metadata_key, where), where)


def _value(content: dict[str, Any], key: str, setting: str, where: str) -> Any:
    if content.get(key) is None:
        raise DataError(
            f"the row has no {key!r}",
            where=where,
            found=f"keys {', '.join(sorted(content)) or 'none'}",
            expected=f"a value under {key!r} (prompts.{setting})",
        )
    return content[key]


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value):
        return value
    raise DataError(
        "not a prompt",
        where=where,
        found=f"{type(value).__name__} {_short(value)}",
        expected='a string that is not empty, or a list of messages {"role": ..., "content": ...}',
    )


def _label(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError("not a label", where=where, found=f"{type(value).__name__} {_short(value)}", expected="a string or a number")


def _metadata(content: dict[str, Any], key: str | None, where: str) -> dict[str, Any]:
    value = None if key is None else content.get(key)
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError("the metadata is not JSON", where=where, found=_short(value)) from error
    if not isinstance(value, dict):
        raise DataError("the metadata is not an object", where=where, found=_short(value), expected="{...}")
    try:
        json.dumps(value)
    except TypeError as error:
        raise DataError("the metadata cannot be written as JSON", where=where, found=str(error)) from error
    return value


def _short(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
