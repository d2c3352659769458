"""Python objects to tables and back: `Sample` and reward rows.

Lists of tokens pass through NumPy rather than one Arrow scalar each: a million tokens take tens of
milliseconds.

Not here: the columns themselves and their rules (`schema`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.store.parquet.schema import REWARDS, SAMPLES, from_experts, make_table, ragged
from rlpipe.store.routed_experts import one_per_token, rows_of
from rlpipe.types import Sample, Status

FIELDS = tuple(field.name for field in dataclasses.fields(Sample) if field.name in SAMPLES.names)
DEFAULTS = {"remove_sample": False, "non_generation_time": 0.0, "num_turns": 1}
"""Values of columns that older files have not."""
EXPERTS = "rollout_routed_experts"
"""The column that may be left behind: it is large, and few read it."""


class RewardLike(Protocol):
    """One verifier's answer about one sample."""

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
    """The table of samples. `dropped`: group id → reason, for groups that will not be trained.

    Raises: DataError naming row and column: a list of the wrong length, NaN, an id that does not
    fit, text that is not Unicode.
    """
    dropped = dropped or {}
    columns: dict[str, Any] = {
        name: [getattr(sample, name) for sample in samples] for name in FIELDS
    }
    columns["prompt"] = [_to_json(sample.prompt, where, row) for row, sample in enumerate(samples)]
    columns["metadata"] = [
        _to_json(sample.metadata, where, row) for row, sample in enumerate(samples)
    ]
    columns["weight_versions"] = [
        [{"tokens": tokens, "version": version} for tokens, version in runs]
        for runs in columns["weight_versions"]
    ]
    columns["reward_parts"] = [list(parts.items()) for parts in columns["reward_parts"]]
    columns["status"] = [str(status) for status in columns["status"]]
    columns[EXPERTS] = from_experts([_experts_per_token(sample) for sample in samples])
    columns["drop_reason"] = [dropped.get(sample.group_id) for sample in samples]
    columns["iteration"] = [iteration] * len(samples)
    return make_table(SAMPLES, columns, where)


def table_to_samples(table: pa.Table) -> list[Sample]:
    """The samples of a table; `iteration` and `drop_reason` stay behind, and routed experts if they
    are not there.

    Raises: ValueError if another column is missing; ObjectCorrupt if one that is JSON is not.
    """
    if missing := set(FIELDS) - {EXPERTS} - set(table.column_names):
        raise ValueError(f"samples need all of their columns, missing {sorted(missing)}")
    names = [name for name in FIELDS if name in table.column_names]
    columns = (READERS.get(name, _to_plain)(table[name]) for name in names)
    samples = [Sample(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
    for sample in samples:
        if sample.rollout_routed_experts is not None:
            tokens = len(sample.prompt_ids) + len(sample.response_ids)
            sample.rollout_routed_experts = rows_of(
                sample.rollout_routed_experts.reshape(max(tokens, 1), -1)[:tokens]
            )
    return samples


def rewards_to_table(rewards: Sequence[RewardLike], where: str = "rewards") -> pa.Table:
    """The table of reward rows. Raises: DataError naming row and column; a row needs a reward or an
    error."""
    columns: dict[str, Any] = {
        name: [getattr(row, name) for row in rewards] for name in REWARDS.names
    }
    columns["parts"] = [list(parts.items()) for parts in columns["parts"]]
    return make_table(REWARDS, columns, where)


def table_to_rewards(table: pa.Table) -> list[dict[str, Any]]:
    """Keyword arguments of each reward row: group_id, index, reward, parts, error."""
    return [{**row, "parts": dict(row["parts"])} for row in table.select(REWARDS.names).to_pylist()]


def _to_json(value: Any, where: str, row: int) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "prompt or metadata cannot be written as JSON", where=f"{where} row {row}", found=error
        ) from error


def from_json(text: str, what: str) -> Any:
    """The value of a column of JSON text. Raises: ObjectCorrupt."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ObjectCorrupt(
            f"the {what} of a row is not JSON", where="samples", found=f"{text[:80]!r} ({error})"
        ) from error


def _metadata(text: str) -> dict[str, Any]:
    value = from_json(text, "metadata")
    if not isinstance(value, dict):
        raise ObjectCorrupt("the metadata of a row is no object", where="samples", found=text[:80])
    return value


def _to_plain(column: pa.ChunkedArray) -> list[Any]:
    return column.to_pylist()


def _to_value(default: Any) -> Callable[[pa.ChunkedArray], list[Any]]:
    return lambda column: [default if value is None else value for value in column.to_pylist()]


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
        flat[bounds[row] : bounds[row + 1]] if there else None for row, there in enumerate(valid)
    ]


def _experts_per_token(sample: Sample) -> np.ndarray | None:
    rows = sample.rollout_routed_experts
    return (
        None
        if rows is None
        else one_per_token(rows, len(sample.prompt_ids) + len(sample.response_ids))
    )


def _to_arrays(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    values, offsets = ragged(column)
    parts = np.split(values, offsets[1:-1])
    there = column.is_valid().to_pylist()
    return (
        [part if known else None for part, known in zip(parts, there, strict=True)] if there else []
    )


READERS: dict[str, Callable[[pa.ChunkedArray], list[Any]]] = {
    "prompt": lambda column: [from_json(text, "prompt") for text in column.to_pylist()],
    "metadata": lambda column: [_metadata(text) for text in column.to_pylist()],
    "prompt_ids": _to_lists,
    "response_ids": _to_lists,
    "rollout_log_probs": _to_lists,
    EXPERTS: _to_arrays,
    "loss_mask": _to_lists,
    "teacher_log_probs": _to_lists,
    "weight_versions": _to_runs,
    "status": lambda column: [Status(text) for text in column.to_pylist()],
    "reward_parts": lambda column: [dict(parts) for parts in column.to_pylist()],
    **{name: _to_value(default) for name, default in DEFAULTS.items()},
}
