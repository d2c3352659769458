"""Load prompts from files, `reasoning_gym`, `verifiers` or seeds as one sequence of `PromptRow`.

Every row is checked when it is loaded. A bad row is an error that names it (`file:line` or
`task[item]`); no row is skipped. A file can be given as `path@[a:b]`, a Python slice of its rows.
With `streaming`, only the position of each row stays in memory. With `workers`, several processes
read and check the files. The rows are the same in all cases.

Entry points: `load_prompts`, `file_digests`, `with_metadata`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

from rlpipe.config.data import FilePrompts, PromptSource, SeedPrompts, VerifiersPrompts
from rlpipe.data.image_files import ImageFile, take_images
from rlpipe.data.preferences import preference
from rlpipe.data.prompt_files import FileRows, excerpt, read_bytes, split_slice
from rlpipe.data.verifiers_tasks import TASK_KEY, read_tasks
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.labels import label_text
from rlpipe.types import Prompt

Part = TypeVar("Part")
Label = str | dict[str, Any] | list[Any]
PROMPTS_KEY = "data.prompts"
"""Key of the prompts of training, for errors."""
PLAIN_PROMPT = "{prompt}"
"""The `prompt_format` that changes nothing."""
RowRange = tuple[str, range]
"""(file, numbers of its rows)."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a source, before the chat template.

    `where` names the row in errors. `metadata` is JSON-able; rewards and hooks get it.
    """

    prompt: Prompt
    label: Label | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    rejected: str | None = None
    """The rejected response of a preference row; `label` is the chosen one."""
    images: tuple[ImageFile, ...] = ()
    """In the order of their places in the prompt."""


class ImageColumn(NamedTuple):
    """The column of the images of a file."""

    name: str
    folder: str
    """Folder of the file."""


class StreamedPrompts(Sequence[PromptRow]):
    """Rows that are read from their files on access. Each row was checked once before."""

    def __init__(
        self, source: FilePrompts, files: Sequence[FileRows], key: str, image_key: str | None
    ) -> None:
        self._source = source
        self._key = key
        self._image_key = image_key
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
                column = _image_column(self._image_key, rows)
                return _prompt_row(content, self._source, where, self._key, column)
            index -= len(rows)
        raise AssertionError("unreachable")


def load_prompts(
    source: PromptSource,
    *,
    streaming: bool = False,
    workers: int = 0,
    key: str = PROMPTS_KEY,
    image_key: str | None = None,
) -> Sequence[PromptRow]:
    """Return all rows of a source in its order, each checked.

    `key`: dotted key of the source, for errors. `image_key`: column of the images in files; None:
    prompts are text.
    Raises: DataError for a file that is missing, empty or unreadable, and for a bad row;
    ConfigError for an unknown task, argument or format.
    """
    if isinstance(source, SeedPrompts):
        seeds = range(source.seed, source.seed + source.size)
        return [PromptRow(str(seed), None, {"seed": seed}, f"{key}[{seed}]") for seed in seeds]
    if isinstance(source, VerifiersPrompts):
        return [
            PromptRow(prompt, None, {TASK_KEY: task}, f"{source.id}[{source.skip + number}]")
            for number, (prompt, task) in enumerate(read_tasks(source, key))
        ]
    if not isinstance(source, FilePrompts):
        # Imported here: reasoning_gym takes about a second to import.
        from rlpipe.data.reasoning_gym_questions import make_questions

        return make_questions(source, key)
    if streaming:
        index = partial(_index_file, source=source, key=key, image_key=image_key)
        files = _map_paths(index, source.paths, workers)
        _check_overlap([rows.row_range for rows in files], source.paths, key)
        return StreamedPrompts(source, files, key, image_key)
    read = partial(_read_file, source=source, key=key, image_key=image_key)
    parts = _map_paths(read, source.paths, workers)
    _check_overlap([row_range for row_range, _ in parts], source.paths, key)
    return [row for _, rows in parts for row in rows]


def _check_overlap(ranges: Sequence[RowRange], paths: Sequence[str], key: str) -> None:
    """Raise DataError if two paths contain the same row of a file."""
    # Such a row would be drawn twice as often as the others.
    for later, (file, rows) in enumerate(ranges):
        for earlier in range(later):
            other_file, other = ranges[earlier]
            overlap = range(max(rows.start, other.start), min(rows.stop, other.stop))
            if file == other_file and overlap:
                raise DataError(
                    "the same rows are given twice",
                    where=f"{key}.paths.{later}",
                    found=f"{paths[later]}, and {paths[earlier]} before it",
                    expected="each row of a file once; "
                    "slices of one file (path@[a:b]) that do not overlap",
                    do="remove one of them; to draw rows more often, write them to another file",
                )


def check_columns(
    names: Sequence[str], path: str, row: PromptRow, prompts: PromptSource | None
) -> None:
    """Check that a row has the columns `names` of a reward function. Raises: ConfigError.

    `path`: of the function.
    """
    label = [prompts.label_key] if isinstance(prompts, FilePrompts) and prompts.label_key else []
    columns = [*label, *row.metadata]
    for name in names:
        if name not in columns:
            raise ConfigError(
                f"the reward function needs the column {name!r}, which samples do not have",
                where="reward.function.path",
                found=f"{path}; samples of {row.where} have {', '.join(columns) or 'none'}",
                expected="the column data.prompts.label_key, or an entry of each row's metadata",
                do=_column_advice(name, prompts, names),
            )


def _column_advice(name: str, prompts: PromptSource | None, names: Sequence[str]) -> str:
    """Return how a reward in TRL's form gets a value for `name`, one of its parameters `names`."""
    as_metadata = f"write the column as metadata: {{{json.dumps(name)}: ...}}"
    if not isinstance(prompts, FilePrompts):
        return as_metadata
    _, row = FileRows(prompts.paths[0]).read(0)
    if name in row:
        return f"set data.prompts.label_key={name}, or {as_metadata}"
    if prompts.label_key in names:
        return as_metadata
    if prompts.label_key:
        return f"rename the parameter {name} to {prompts.label_key}, or {as_metadata}"
    columns = ", ".join(column for column in row if column != prompts.input_key)
    return (
        f"rename the parameter {name} to the column of the answer and set data.prompts.label_key "
        f"to this column (the file has {columns or 'no other'}), or {as_metadata}"
    )


def held_out_key(number: int) -> str:
    """Return the key of the prompts of a held-out set, for errors."""
    return f"evaluation.datasets.{number}.prompts"


def with_metadata(rows: Sequence[PromptRow], entries: Mapping[str, Any]) -> Sequence[PromptRow]:
    """Return the rows with these metadata entries, which replace entries of the same name."""
    return [replace(row, metadata={**row.metadata, **entries}) for row in rows] if entries else rows


def _map_paths(read: Callable[[str], Part], paths: Sequence[str], workers: int) -> list[Part]:
    if not workers or len(paths) == 1:
        return [read(path) for path in paths]
    # spawn: a forked child of a process with threads can deadlock.
    with ProcessPoolExecutor(min(workers, len(paths)), mp_context=get_context("spawn")) as pool:
        return list(pool.map(read, paths))


def _read_file(
    path: str, source: FilePrompts, key: str, image_key: str | None
) -> tuple[RowRange, list[PromptRow]]:
    rows = FileRows(path, key)
    column = _image_column(image_key, rows)
    return rows.row_range, [
        _prompt_row(content, source, where, key, column) for where, content in rows
    ]


def _index_file(path: str, source: FilePrompts, key: str, image_key: str | None) -> FileRows:
    rows = FileRows(path, key)
    column = _image_column(image_key, rows)
    for where, content in rows:
        _prompt_row(content, source, where, key, column)
    rows.release()
    return rows


def _image_column(image_key: str | None, rows: FileRows) -> ImageColumn | None:
    folder = rows.row_range[0].rpartition("/")[0]
    return None if image_key is None else ImageColumn(image_key, folder)


def file_digests(source: PromptSource) -> list[str]:
    """Return the sha256 of each prompt file; empty for generated prompts. Raises: DataError."""
    # The arguments of generated prompts determine them completely.
    paths = source.paths if isinstance(source, FilePrompts) else ()
    return [hashlib.sha256(read_bytes(split_slice(path)[0])).hexdigest() for path in paths]


def _prompt_row(
    content: dict[str, Any],
    source: FilePrompts,
    where: str,
    key: str = PROMPTS_KEY,
    column: ImageColumn | None = None,
) -> PromptRow:
    """Convert a row of a file. Raises: DataError if the row is not valid.

    `key`: of the source. `column`: of the images; None: prompts are text.
    """
    label = None
    rejected = None
    if source.rejected_key is not None:
        _require_pair(content, source, key, where)
    if source.label_key is not None:
        value = _value(content, source.label_key, f"{key}.label_key", where)
        of_label = in_column(where, source.label_key)
        label = _label(value, of_label)
        if source.label_pattern is not None:
            label = _matched(label, source.label_pattern, f"{key}.label_pattern", of_label)
    of_prompt = in_column(where, source.input_key)
    images: tuple[ImageFile, ...] = ()
    if column is not None:
        content, images = _without_images(content, source.input_key, column, where)
    if source.rejected_key is None:
        prompt = _prompt(_value(content, source.input_key, f"{key}.input_key", where), of_prompt)
    else:
        value = _value(content, source.rejected_key, f"{key}.rejected_key", where)
        other = _label(value, in_column(where, source.rejected_key))
        given = content.get(source.input_key)
        prompt = None if given is None else _prompt(given, of_prompt)
        prompt, label, rejected = preference(prompt, label, other, where)
    if source.prompt_format != PLAIN_PROMPT:
        prompt = _formatted(prompt, source.prompt_format, key, of_prompt)
    metadata = _with_tools(content, source, where, key)
    return PromptRow(prompt, label, metadata, where, rejected, images)


def _without_images(
    content: dict[str, Any], input_key: str, column: ImageColumn, where: str
) -> tuple[dict[str, Any], tuple[ImageFile, ...]]:
    """Return a row whose prompt has no contents of images, which are no JSON; and the images.

    Raises: as `take_images`.
    """
    prompt = content.get(input_key)
    is_messages = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
    if not is_messages and not isinstance(prompt, str):
        return content, ()  # `_prompt` names the problem
    prompt, images = take_images(
        prompt, content.get(column.name), in_column(where, column.name), folder=column.folder
    )
    return {**content, input_key: prompt}, images


def _with_tools(
    content: dict[str, Any], source: FilePrompts, where: str, key: str
) -> dict[str, Any]:
    """Return the metadata of a row, with its tools. Raises: DataError."""
    metadata = _metadata(content, source.metadata_key, where)
    if (tools := _tools(content, source.tool_key, where)) is None:
        return metadata
    if "tools" in metadata:
        raise DataError(
            "the row has tools in two columns",
            where=where,
            found=f"column {source.tool_key!r} ({key}.tool_key), and the entry 'tools' of "
            f"column {source.metadata_key!r} ({key}.metadata_key)",
            do="keep one of them",
        )
    return {**metadata, "tools": tools}


def _require_pair(content: dict[str, Any], source: FilePrompts, key: str, where: str) -> None:
    """Check both columns of responses at once. Raises: DataError."""
    keys = {"label_key": source.label_key, "rejected_key": source.rejected_key}
    missing = {name: column for name, column in keys.items() if column not in content}
    if len(missing) < 2:
        return
    raise DataError(
        f"the row has no {' and no '.join(map(repr, missing.values()))}",
        where=where,
        found=f"columns {', '.join(map(repr, sorted(content))) or 'none'}",
        expected=", ".join(
            f"the {kind} response in column {column!r} ({key}.{name})"
            for kind, (name, column) in zip(("chosen", "rejected"), missing.items(), strict=True)
        ),
        do=f"set {key}.label_key and {key}.rejected_key to columns of this file",
    )


def in_column(where: str, column: str) -> str:
    """Return the name of a row's value in a column, for errors."""
    return f"{where}, column {column!r}"


def _value(content: dict[str, Any], column: str, setting: str, where: str) -> Any:
    if content.get(column) is None:
        columns = f"columns {', '.join(map(repr, sorted(content))) or 'none'}"
        raise DataError(
            f"the row has no {column!r}",
            where=where,
            found=f"null in column {column!r}" if column in content else columns,
            expected=f"a value in column {column!r} ({setting})",
            do=f"set {setting} to a column of this file, or add the column to every row",
        )
    return content[column]


def _prompt(value: Any, where: str) -> Prompt:
    """Return a text or messages unchanged, and an integer as a text: the number of a task, which a
    generate function of the user looks up (tau-bench in slime)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    is_messages = isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in value
    )
    if value and (isinstance(value, str) or is_messages):
        return _storable(value, "prompt", where)
    raise DataError(
        "not a prompt",
        where=where,
        found=f"{type(value).__name__} {excerpt(value)}",
        expected="a string that is not empty, an integer, or a list of messages "
        '{"role": ..., "content": ...}',
    )


def _label(value: Any, where: str) -> Label:
    """Return a string, an object or a list unchanged and a finite number as a string."""
    if isinstance(value, str | dict | list):
        return _storable(value, "label", where)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise DataError(
        "not a label",
        where=where,
        found=f"{type(value).__name__} {excerpt(value)}",
        expected="a string, a number, or an object for a function of yours",
    )


def _matched(label: Label, pattern: str, setting: str, where: str) -> str:
    """Return the first group of the pattern. Raises: DataError without a match."""
    match = re.search(pattern, label) if isinstance(label, str) else None
    if match is None or match[1] is None:
        raise DataError(
            f"{setting} does not match the label",
            where=where,
            found=excerpt(label),
            expected=pattern,
            do="correct the pattern or the row",
        )
    return match[1]


def _formatted(prompt: Prompt, text: str, key: str, where: str) -> str:
    """Return the prompt in the format. Raises: DataError for a list of messages."""
    if not isinstance(prompt, str):
        raise DataError(
            f"{key}.prompt_format is for strings",
            where=where,
            found="a list of messages",
            do=f"remove {key}.prompt_format, or set {key}.input_key to a column of strings",
        )
    return text.format(prompt=prompt)


def _metadata(content: dict[str, Any], key: str | None, where: str) -> dict[str, Any]:
    """Return the object under a key, or the object of its JSON text; {} if absent."""
    value = None if key is None else content.get(key)
    if key is None or value is None:
        return {}
    where = in_column(where, key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            found = excerpt(value)
            raise DataError("the metadata is not JSON", where=where, found=found) from error
    if not isinstance(value, dict):
        raise DataError(
            "the metadata is not an object", where=where, found=excerpt(value), expected="{...}"
        )
    return _storable(value, "metadata", where)


def _tools(content: dict[str, Any], key: str | None, where: str) -> list[Any] | None:
    """Return the list of tools under a key, or the list of its JSON text; None if absent."""
    if key is None:
        return None
    value = content.get(key)
    where = in_column(where, key)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError("the tools are not JSON", where=where, found=excerpt(value)) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            "not a list of tools",
            where=where,
            found=excerpt(value),
            expected='[{"type": "function", ...}]',
        )
    return _storable(value, "tools", where)


def _storable(value: Any, description: str, where: str) -> Any:
    """Return the value if a plan can store it. Raises: DataError otherwise."""
    # Plans are UTF-8 JSON: NaN, infinity, bytes and half surrogate pairs cannot be stored.
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        if description == "label":
            label_text(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the {description} cannot be written as JSON", where=where, found=str(error)
        ) from error
    return value
