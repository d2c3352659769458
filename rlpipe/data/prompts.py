"""Where prompts come from: rows of files, or the generator of `reasoning_gym`, as one sequence of
`PromptRow`.

A row that is wrong is an error that names it (`file:line`, or `task[item]`); no row is ever
skipped. A file may be given as `path@[a:b]`, Python's slice of its rows. With `streaming` only
where each row begins is kept in memory; with `workers` files are read and checked by so many
processes. The rows are the same either way.

Not here: how a row of a file is read (`files`), tokens and templates (`tokens`), order and epochs
(`source`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from rlpipe.config.data import FilePrompts, PromptSource
from rlpipe.data.files import FileRows, bytes_of, split_slice
from rlpipe.data.rows import label_of, metadata_of, prompt_of, tools_of, value_of
from rlpipe.errors import DataError
from rlpipe.types import Prompt

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt as it was given. `where` names it in errors; `metadata` is JSON-able and travels
    to rewards and hooks."""

    prompt: Prompt
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""


class StreamedPrompts(Sequence[PromptRow]):
    """Rows that are read from their files when they are asked for; each was read and found right
    once before."""

    def __init__(self, source: FilePrompts, files: Sequence[FileRows]) -> None:
        self._source = source
        self._files = files

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        for rows in self._files:
            if index < len(rows):
                where, content = rows.read(index)
                return _row(content, self._source, where)
            index -= len(rows)
        raise AssertionError("unreachable")


def load_prompts(
    source: PromptSource, *, streaming: bool = False, workers: int = 0
) -> Sequence[PromptRow]:
    """All rows of the source, in its own order, each of them checked now.

    Raises: DataError for a file that is missing, empty or not readable, and for a row that is not
    what the source's keys say; ConfigError for a task, argument or format that does not exist.
    """
    if not isinstance(source, FilePrompts):
        from rlpipe.data.reasoning_gym import (
            make_questions,
        )  # the package loads a second's worth of others

        return [
            PromptRow(made.prompt, made.label, made.metadata, made.where)
            for made in make_questions(source)
        ]
    if streaming:
        files = _each(partial(_index, source=source), source.paths, workers)
        _refuse_doubles([rows.place for rows in files], source.paths)
        return StreamedPrompts(source, files)
    read = _each(partial(_read, source=source), source.paths, workers)
    _refuse_doubles([place for place, _ in read], source.paths)
    return [row for _, rows in read for row in rows]


def _refuse_doubles(places: Sequence[tuple[str, range]], paths: Sequence[str]) -> None:
    """Raises: DataError if two paths give a row of one file, which would be drawn twice as often as
    the others."""
    for later, (file, rows) in enumerate(places):
        for earlier in range(later):
            other, others = places[earlier]
            if file == other and range(max(rows.start, others.start), min(rows.stop, others.stop)):
                raise DataError(
                    "the same rows are given twice",
                    where=f"prompts.paths.{later}",
                    found=f"{paths[later]}, and {paths[earlier]} before it",
                    expected="each row of a file once; slices of one file (path@[a:b]) that do not overlap",
                    do="leave one of them out; to draw rows more often, write them to a file of their own",
                )


def with_metadata(rows: Sequence[PromptRow], entries: Mapping[str, Any]) -> Sequence[PromptRow]:
    """The rows with these entries of metadata in place of their own of the same name."""
    return [replace(row, metadata={**row.metadata, **entries}) for row in rows] if entries else rows


def _each(read: Callable[[str], Part], paths: Sequence[str], workers: int) -> list[Part]:
    if not workers or len(paths) == 1:
        return [read(path) for path in paths]
    with ProcessPoolExecutor(min(workers, len(paths)), mp_context=get_context("spawn")) as pool:
        return list(pool.map(read, paths))


def _read(path: str, source: FilePrompts) -> tuple[tuple[str, range], list[PromptRow]]:
    rows = FileRows(path)
    return rows.place, [_row(content, source, where) for where, content in rows]


def _index(path: str, source: FilePrompts) -> FileRows:
    rows = FileRows(path)
    for where, content in rows:
        _row(content, source, where)
    rows.forget()
    return rows


def file_digests(source: PromptSource) -> list[str]:
    """sha256 of each prompt file; none for made prompts, which their arguments decide. Raises:
    DataError."""
    paths = source.paths if isinstance(source, FilePrompts) else ()
    return [hashlib.sha256(bytes_of(split_slice(path)[0])).hexdigest() for path in paths]


def _row(content: dict[str, Any], source: FilePrompts, where: str) -> PromptRow:
    label = (
        None
        if source.label_key is None
        else label_of(value_of(content, source.label_key, "label_key", where), where)
    )
    prompt = prompt_of(value_of(content, source.input_key, "input_key", where), where)
    metadata = metadata_of(content, source.metadata_key, where)
    if (tools := tools_of(content, source.tool_key, where)) is not None:
        if "tools" in metadata:
            found = f"prompts.tool_key {source.tool_key!r} and metadata.tools"
            raise DataError("the tools are given twice", where=where, found=found)
        metadata = {**metadata, "tools": tools}
    return PromptRow(prompt, label, metadata, where)
