"""Compute the rows of the SQL tables `samples` and `metrics` for one iteration.

`samples` has one row for each sample of the iteration's rollout, trained or not, without its
tokens. `metrics` has the metrics that the stages recorded and the seconds that they took. The
columns are in `derived`; `scalars` keeps the tables of a whole branch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.arrays import ragged
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.tables import derived
from rlpipe.types import Commit, Node, Stage

Key = tuple[str, int]
"""(group_id, index) of a sample."""

SAMPLES = derived.SAMPLE_SCALARS.schema
METRICS = derived.METRICS.schema
TABLES = {"samples": SAMPLES, "metrics": METRICS}

SAMPLE_COLUMNS = (
    "group_id",
    "index",
    "prompt",
    "prompt_ids",
    "response_ids",
    "status",
    "finish_reason",
    "error",
    "weight_versions",
    "engine",
    "t_start_s",
    "t_end_s",
    "drop_reason",
    "num_turns",
)
BATCH_COLUMNS = (
    "group_id",
    "index",
    "loss_mask",
    "advantages",
    "rollout_log_probs",
    "proximal_log_probs",
)
PROMPT_DIGITS = 16


class RewardScalars(NamedTuple):
    """Reward columns of one sample."""

    reward: float | None = None
    parts: tuple[tuple[str, float], ...] = ()
    error: str | None = None


class BatchScalars(NamedTuple):
    """Means of one trained sample over the tokens that count; None where a column is missing."""

    advantage: float | None = None
    logprob_difference: float | None = None
    logprob_difference_max: float | None = None


def rows_of(
    files: Files, commit: Commit, tables: Iterable[str] = tuple(TABLES)
) -> dict[str, pa.Table]:
    """Return these tables for one iteration. Raises: ObjectMissing, ObjectCorrupt."""
    nodes = {stage: Nodes(files).get(stage, digest) for stage, digest in commit.nodes.items()}
    build = {
        "samples": lambda: _sample_table(files, commit, nodes),
        "metrics": lambda: _metric_table(commit, nodes),
    }
    return {table: build[table]() for table in tables}


def prompt_name(prompt: str) -> str:
    """Return the name of a prompt in the tables: the first digits of the sha256 of its JSON.

    A prompt has the same name in every epoch.
    """
    return hashlib.sha256(prompt.encode()).hexdigest()[:PROMPT_DIGITS]


def _metric_table(commit: Commit, nodes: dict[Stage, Node]) -> pa.Table:
    values: dict[str, float] = {}
    for stage, node in nodes.items():
        metrics = node.outputs.get("metrics", {})
        values |= {
            str(name): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        }
        if isinstance(seconds := node.outputs.get("seconds"), int | float):
            values[f"perf/{stage}_time"] = float(seconds)
    rows = {
        "branch": [commit.branch] * len(values),
        "iteration": [commit.iteration] * len(values),
        "name": list(values),
        "value": list(values.values()),
    }
    return pa.table([pa.array(rows[field.name], field.type) for field in METRICS], schema=METRICS)


def _sample_table(files: Files, commit: Commit, nodes: dict[Stage, Node]) -> pa.Table:
    rollout = nodes.get(Stage.ROLLOUT)
    if rollout is None or not rollout.files:
        return SAMPLES.empty_table()
    stored = read_rows(files, rollout.files, SAMPLE_COLUMNS)
    keys = list(zip(stored["group_id"].to_pylist(), stored["index"].to_pylist(), strict=True))
    values = {
        "branch": [commit.branch] * len(keys),
        "iteration": [commit.iteration] * len(keys),
        "prompt": [prompt_name(prompt) for prompt in stored["prompt"].to_pylist()],
        "prompt_tokens": _lengths(stored, "prompt_ids"),
        "response_tokens": _lengths(stored, "response_ids"),
        **_outcomes(commit, rollout, keys, stored),
        **_reward_columns(_rewards(files, nodes.get(Stage.REWARD)), keys, stored),
        **_batch_columns(_batch(files, nodes.get(Stage.ADVANTAGE)), keys),
        **_version_columns(commit, stored),
        "started": stored["t_start_s"].to_numpy(),
        "seconds": stored["t_end_s"].to_numpy() - stored["t_start_s"].to_numpy(),
    }
    arrays = [
        pa.array(values[field.name], field.type)
        if field.name in values
        else stored[field.name].cast(field.type)
        for field in SAMPLES
    ]
    return pa.table(arrays, schema=SAMPLES)


def _outcomes(
    commit: Commit, rollout: Node, keys: list[Key], stored: pa.Table
) -> dict[str, list[bool] | list[str | None]]:
    accepted = set(rollout.outputs.get("accepted", ()))
    trained = set(commit.trained)
    reasons = stored["drop_reason"].to_pylist()
    return {
        "accepted": [group in accepted for group, _ in keys],
        "trained": [group in trained for group, _ in keys],
        # The commit also has the drops of the advantage stage, which come after the shard.
        "drop_reason": [
            commit.dropped.get(group) or reason
            for (group, _), reason in zip(keys, reasons, strict=True)
        ],
    }


def _reward_columns(
    rewards: dict[Key, RewardScalars], keys: list[Key], stored: pa.Table
) -> dict[str, list[Any]]:
    rows = [rewards.get(key, RewardScalars()) for key in keys]
    errors = stored["error"].to_pylist()
    return {
        "reward": [row.reward for row in rows],
        "reward_parts": [list(row.parts) for row in rows],
        "error": [error or row.error for error, row in zip(errors, rows, strict=True)],
    }


def _batch_columns(batch: dict[Key, BatchScalars], keys: list[Key]) -> dict[str, list[Any]]:
    rows = [batch.get(key, BatchScalars()) for key in keys]
    return {name: [getattr(row, name) for row in rows] for name in BatchScalars._fields}


def _version_columns(commit: Commit, stored: pa.Table) -> dict[str, list[int | None]]:
    """Return the weight versions of each row; None where nothing was sampled."""
    runs = [[run["version"] for run in row] for row in stored["weight_versions"].to_pylist()]
    oldest = [min(row, default=None) for row in runs]
    return {
        "oldest_version": oldest,
        "newest_version": [max(row, default=None) for row in runs],
        # Iteration k trains weight version k.
        "staleness": [
            None if version is None else commit.iteration - version for version in oldest
        ],
    }


def _rewards(files: Files, reward: Node | None) -> dict[Key, RewardScalars]:
    if reward is None or not reward.files:
        return {}
    rows = read_rows(files, reward.files).to_pylist()
    return {
        (row["group_id"], row["index"]): RewardScalars(row["reward"], row["parts"], row["error"])
        for row in rows
    }


def _batch(files: Files, advantage: Node | None) -> dict[Key, BatchScalars]:
    if advantage is None or not advantage.files:
        return {}
    table = read_rows(files, advantage.files, BATCH_COLUMNS)
    mask, offsets = ragged(table["loss_mask"])
    counted = np.flatnonzero(mask)
    rows = list(pairwise(np.searchsorted(counted, offsets).tolist()))
    advantages = _response_values(table, "advantages")
    rollout_log_probs = _response_values(table, "rollout_log_probs")
    proximal_log_probs = _response_values(table, "proximal_log_probs")
    difference = None
    if rollout_log_probs is not None and proximal_log_probs is not None:
        difference = np.abs(rollout_log_probs - proximal_log_probs)
    keys = zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
    scalars = zip(
        _over_rows(_mean, advantages, counted, rows),
        _over_rows(_mean, difference, counted, rows),
        _over_rows(np.maximum.reduce, difference, counted, rows),
        strict=True,
    )
    return {key: BatchScalars(*values) for key, values in zip(keys, scalars, strict=True)}


def _response_values(table: pa.Table, name: str) -> np.ndarray | None:
    # A column of a batch is null in all rows or in none.
    return None if table[name].null_count else ragged(table[name])[0]


def _over_rows(
    reduce: Callable[[np.ndarray], np.floating],
    values: np.ndarray | None,
    counted: np.ndarray,
    rows: Sequence[tuple[int, int]],
) -> list[float | None]:
    """Return a figure of each row over its tokens with loss mask 1; None without such tokens.

    `values` [tokens]; `counted`: the positions in it that count; `rows`: for each row, the first
    and the last + 1 of its entries in `counted`.
    """
    if values is None:
        return [None] * len(rows)
    chosen = values[counted]
    return [float(reduce(chosen[start:end])) if start < end else None for start, end in rows]


def _mean(values: np.ndarray) -> np.floating:
    # The bits of `values.mean()`, which takes four times as long for a short row.
    return np.add.reduce(values) / values.size


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return np.diff(ragged(table[name])[1])
