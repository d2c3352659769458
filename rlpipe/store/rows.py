"""Python objects to tables and back: `Sample` and reward rows.

Lists of tokens pass through NumPy rather than one Arrow scalar each: a million tokens take tens of milliseconds.

Not here: the columns themselves and their rules (`schema`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rlpipe.errors import DataError
from rlpipe.store.schema import REWARDS, SAMPLES, make_table, ragged
from rlpipe.types import Sample, Status

FIELDS = tuple(field.name for field in dataclasses.fields(Sample) if field.name in SAMPLES.names)
DEFAULTS = {"remove_sample": False, "non_generation_time": 0.0, "num_turns": 1}
"""Values of columns that older files have not."""


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
    samples: Sequence[Sample], iteration: int, dropped: Mapping[str, str] | None = None, where: str = "samples"
) -> pa.Table:
    """The table of samples. `dropped`: group id → reason, for groups that will not be trained.

    Raises: DataError naming row and column: a list of the wrong length, NaN, an id that does not fit, text that is not Unicode.
    """
    dropped = dropped or {}
    columns: dict[str, Any] = {name: [getattr(sample, name) for sample in samples] for name in FIELDS}
    columns["prompt"] = [_to_json(sample.prompt, where, row) for row, sample in enumerate(samples)]
    columns["metadata"] = [_to_json(sample.metadata, where, row) for row, sample in enumerate(samples)]
    columns["weight_versions"] = [
        [{"tokens": tokens, "version": version} for tokens, version in runs] for runs in columns["weight_versions"]
    ]
    columns["reward_parts"] = [list(parts.items()) for parts in columns["reward_parts"]]
    columns["status"] = [str(status) for status in columns["status"]]
    columns["drop_reason"] = [dropped.get(sample.group_id) for sample in samples]
    columns["iteration"] = [iteration] * len(samples)
    return make_table(SAMPLES, columns, where)


def table_to_samples(table: pa.Table) -> list[Sample]:
    """The samples of a table; `iteration` and `drop_reason` stay behind. Raises: ValueError if a column is missing."""
    if missing := set(FIELDS) - set(table.column_names):
        raise ValueError(f"samples need all of their columns, missing {sorted(missing)}")
    columns = (READERS.get(name, _to_plain)(table[name]) for name in FIELDS)
    return [Sample(**dict(zip(FIELDS, row, strict=True))) for row in zip(*columns, strict=True)]


def rewards_to_table(rewards: Sequence[RewardLike], where: str = "rewards") -> pa.Table:
    """The table of reward rows. Raises: DataError naming row and column; a row needs a reward or an error."""
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rewards] for name in REWARDS.names}
    columns["parts"] = [list(parts.items()) for parts in columns["parts"]]
    return make_table(REWARDS, columns, where)


def table_to_rewards(table: pa.Table) -> list[dict[str, Any]]:
    """Keyword arguments of each reward row: group_id, index, reward, parts, error."""
    return [{**row, "parts": dict(row["parts"])} for row in table.select(REWARDS.names).to_pylist()]


def _to_json(value: Any, where: str, row: int) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError("prompt or metadata cannot be written as JSON", where=f"{where} row {row}", found=error) from error


def _to_plain(column: pa.ChunkedArray) -> list[Any]:
    return column.to_pylist()


def _to_value(default: Any) -> Callable[[pa.ChunkedArray], list[Any]]:
    return lambda column: [default if value is None else value for value in column.to_pylist()]


def _to_runs(column: pa.ChunkedArray) -> list[list[tuple[int, int]]]:
    array = column.combine_chunks()
    tokens, versions = (field.to_pylist() for field in array.flatten().flatten())
    flat, ends = list(zip(tokens, versions, strict=True)), np.cumsum(array.value_lengths().to_numpy()).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _to_lists(column: pa.ChunkedArray) -> list[list[Any] | None]:
    values, offsets = ragged(column)
    flat, bounds, valid = values.tolist(), offsets.tolist(), column.is_valid().to_pylist()
    return [flat[bounds[row] : bounds[row + 1]] if there else None for row, there in enumerate(valid)]


READERS: dict[str, Callable[[pa.ChunkedArray], list[Any]]] = {
    "prompt": lambda column: [json.loads(text) for text in column.to_pylist()],
    "metadata": lambda column: [json.loads(text) for text in column.to_pylist()],
    "prompt_ids": _to_lists,
    "response_ids": _to_lists,
    "rollout_log_probs": _to_lists,
    "loss_mask": _to_lists,
    "weight_versions": _to_runs,
    "status": lambda column: [Status(text) for text in column.to_pylist()],
    "reward_parts": lambda column: [dict(parts) for parts in column.to_pylist()],
    **{name: _to_value(default) for name, default in DEFAULTS.items()},
}
