"""Convert `Sample` objects and reward rows to tables and back.

Entry points: `samples_to_table`, `table_to_samples`, `rewards_to_table`, `table_to_rewards`. Lists
of tokens pass through NumPy and never become one Arrow scalar each: a million tokens take tens of
milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.store.labels import label_text, label_value
from rlpipe.store.parquet.arrays import from_experts, ragged
from rlpipe.store.parquet.schema import REWARDS, SAMPLES, make_table
from rlpipe.store.routed_experts import one_per_token, rows_of
from rlpipe.types import Image, Sample, Status

FIELDS = tuple(field.name for field in dataclasses.fields(Sample) if field.name in SAMPLES.names)
"""Fields of `Sample` that are columns of the same name."""
EXPERTS = "rollout_routed_experts"
"""The column that most readers leave out: it may be most of the data."""
TOKEN_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "rollout_log_probs",
    "loss_mask",
    "teacher_log_probs",
    "weight_versions",
    EXPERTS,
)
"""Columns about single tokens."""
NULL_VALUES = {"remove_sample": False, "non_generation_time": 0.0, "num_turns": 1}
"""Meaning of null in columns that files of earlier releases do not have."""


class RewardLike(Protocol):
    """The answer of a verifier about one sample."""

    @property
    def group_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def parts(self) -> Mapping[str, float]: ...
    @property
    def error(self) -> str | None: ...


def samples_to_table(
    samples: Sequence[Sample],
    iteration: int,
    dropped: Mapping[str, str] | None = None,
    where: str = "samples",
) -> pa.Table:
    """Return the table of samples.

    `dropped`: group id → reason, for groups that will not be trained.

    Raises: DataError naming row and column, for a list of the wrong length, NaN, a number that does
    not fit its column, or text that is not Unicode.
    """
    dropped = dropped or {}
    values: dict[str, Any] = {name: [getattr(one, name) for one in samples] for name in FIELDS}
    values["prompt"] = [_to_json(one.prompt, where, row) for row, one in enumerate(samples)]
    values["metadata"] = [_to_json(one.metadata, where, row) for row, one in enumerate(samples)]
    values["label"] = [_to_label(one.label, where, row) for row, one in enumerate(samples)]
    values["weight_versions"] = [
        [{"tokens": tokens, "version": version} for tokens, version in runs]
        for runs in values["weight_versions"]
    ]
    values["images"] = image_values([sample.images for sample in samples])
    values["reward_parts"] = [list(parts.items()) for parts in values["reward_parts"]]
    values["status"] = [str(status) for status in values["status"]]
    values[EXPERTS] = from_experts([_experts_per_token(sample) for sample in samples])
    values["drop_reason"] = [dropped.get(sample.group_id) for sample in samples]
    values["iteration"] = [iteration] * len(samples)
    values["prompt_tokens"] = [len(one.prompt_ids) for one in samples]
    values["response_tokens"] = [len(one.response_ids) for one in samples]
    return make_table(SAMPLES, values, where)


def table_to_samples(table: pa.Table) -> list[Sample]:
    """Return the samples of a table, without the columns that are no fields.

    The table may lack TOKEN_COLUMNS. Raises: ValueError if another column is missing; ObjectCorrupt
    if a JSON column does not hold JSON.
    """
    if missing := set(FIELDS).difference(TOKEN_COLUMNS, table.column_names):
        raise ValueError(f"samples need their columns, missing {sorted(missing)}")
    names = [name for name in FIELDS if name in table.column_names]
    columns = (READERS.get(name, _to_plain)(table[name]) for name in names)
    samples = [Sample(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
    for sample in samples:
        if sample.rollout_routed_experts is not None:
            tokens = len(sample.prompt_ids) + len(sample.response_ids)
            experts = sample.rollout_routed_experts.reshape(max(tokens, 1), -1)[:tokens]
            sample.rollout_routed_experts = rows_of(experts)
    return samples


def image_values(images: Sequence[Sequence[Image]]) -> list[list[dict[str, Any]]] | None:
    """Return the values of a column of images, by row; None if no row has any."""
    if not any(images):
        return None
    return [
        [{"sha256": digest, "rows": rows, "columns": columns} for digest, rows, columns in row]
        for row in images
    ]


def to_images(column: pa.ChunkedArray) -> list[list[Image]]:
    """Return the images of each row. The inverse of `image_values`."""
    return [
        [(image["sha256"], image["rows"], image["columns"]) for image in row or ()]
        for row in column.to_pylist()
    ]


def rewards_to_table(rewards: Sequence[RewardLike], where: str = "rewards") -> pa.Table:
    """Return the table of reward rows.

    Raises: DataError naming row and column; a row needs a reward or an error.
    """
    values: dict[str, Any] = {
        name: [getattr(row, name) for row in rewards] for name in REWARDS.names
    }
    values["parts"] = [list(parts.items()) for parts in values["parts"]]
    return make_table(REWARDS, values, where)


def table_to_rewards(table: pa.Table) -> list[dict[str, Any]]:
    """Return the keyword arguments of each reward row: group_id, index, reward, parts, error."""
    rows = table.select(REWARDS.names).to_pylist()
    return [{**row, "parts": dict(row["parts"])} for row in rows]


def from_json(text: str, column: str) -> Any:
    """Return the value of a JSON column. Raises: ObjectCorrupt."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ObjectCorrupt(
            f"the {column} of a row is not JSON", where="samples", found=f"{text[:80]!r} ({error})"
        ) from error


def _to_json(value: Any, where: str, row: int) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "prompt or metadata cannot be written as JSON", where=f"{where} row {row}", found=error
        ) from error


def _to_label(label: Any, where: str, row: int) -> str | None:
    try:
        return label_text(label)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "the label cannot be stored", where=f"{where} row {row}", found=error
        ) from error


def _metadata(text: str) -> dict[str, Any]:
    value = from_json(text, "metadata")
    if not isinstance(value, dict):
        raise ObjectCorrupt(
            "the metadata of a row is not an object", where="samples", found=text[:80]
        )
    return value


def _experts_per_token(sample: Sample) -> np.ndarray | None:
    experts = sample.rollout_routed_experts
    if experts is None:
        return None
    return one_per_token(experts, len(sample.prompt_ids) + len(sample.response_ids))


def _to_plain(column: pa.ChunkedArray) -> list[Any]:
    return column.to_pylist()


def _with_null_as(value: Any) -> Callable[[pa.ChunkedArray], list[Any]]:
    return lambda column: [value if item is None else item for item in column.to_pylist()]


def _to_runs(column: pa.ChunkedArray) -> list[list[tuple[int, int]]]:
    array = column.combine_chunks()
    tokens, versions = (field.to_pylist() for field in array.flatten().flatten())
    flat = list(zip(tokens, versions, strict=True))
    ends = np.cumsum(array.value_lengths().to_numpy()).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _to_lists(column: pa.ChunkedArray) -> list[list[Any] | None]:
    values, offsets = ragged(column)
    flat = values.tolist()
    bounds = offsets.tolist()
    valid = column.is_valid().to_pylist()
    return [
        flat[bounds[row] : bounds[row + 1]] if valid[row] else None for row in range(len(valid))
    ]


def _to_arrays(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    values, offsets = ragged(column)
    valid = column.is_valid().to_pylist()
    if not valid:
        return []
    parts = np.split(values, offsets[1:-1])
    return [part if present else None for part, present in zip(parts, valid, strict=True)]


READERS: dict[str, Callable[[pa.ChunkedArray], list[Any]]] = {
    "prompt": lambda column: [from_json(text, "prompt") for text in column.to_pylist()],
    "metadata": lambda column: [_metadata(text) for text in column.to_pylist()],
    "label": lambda column: [label_value(text) for text in column.to_pylist()],
    "prompt_ids": _to_lists,
    "response_ids": _to_lists,
    "rollout_log_probs": _to_lists,
    EXPERTS: _to_arrays,
    "loss_mask": _to_lists,
    "teacher_log_probs": _to_lists,
    "weight_versions": _to_runs,
    "images": to_images,
    "status": lambda column: [Status(text) for text in column.to_pylist()],
    "reward_parts": lambda column: [dict(parts) for parts in column.to_pylist()],
    **{name: _with_null_as(value) for name, value in NULL_VALUES.items()},
}
"""How a column becomes a field of `Sample`; the others are plain values."""
