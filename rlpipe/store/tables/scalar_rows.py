"""The scalar rows of one iteration: what there is to say of each of its samples without its tokens,
and its metrics.

`samples`: all that were sampled for it, trained or not. `metrics`: what its stages recorded, and
their seconds.

Not here: keeping them (`scalars`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.schema import KIND, ragged
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Commit, Node, Stage

Key = tuple[str, int]

SAMPLES = pa.schema(
    [
        ("branch", pa.string()),
        ("iteration", pa.int64()),
        ("group_id", pa.string()),
        ("index", pa.int32()),
        ("prompt", pa.string()),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("num_turns", pa.int32()),
        ("accepted", pa.bool_()),
        ("trained", pa.bool_()),
        ("drop_reason", pa.string()),
        ("advantage", pa.float32()),
        ("logprob_difference", pa.float32()),
        ("logprob_difference_max", pa.float32()),
        ("oldest_version", pa.int32()),
        ("newest_version", pa.int32()),
        ("staleness", pa.int32()),
        ("engine", pa.string()),
        ("started", pa.float64()),
        ("seconds", pa.float64()),
    ],
    metadata={KIND: b"scalars.samples/1"},
)
"""`prompt`: the first digits of its sha256 (`prompt_name`), the same in every epoch. `reward`: what
the verifier said; null with an `error`, or where nothing was scored. `advantage`: mean over the
tokens that count. `logprob_difference`: mean and largest absolute difference between the log-probs
of the engine and the trainer over those tokens. `staleness`: weight version trained minus the
oldest that sampled. `started`: seconds since the epoch. Null where it is not known: what was not
trained has no advantage."""

METRICS = pa.schema(
    [
        ("branch", pa.string()),
        ("iteration", pa.int64()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ],
    metadata={KIND: b"scalars.metrics/1"},
)
"""Metrics of the stages by their names, and `perf/<stage>_time` in seconds."""

TABLES = {"samples": SAMPLES, "metrics": METRICS}

READ = (
    "group_id", "index", "prompt", "prompt_ids", "response_ids", "status", "finish_reason", "error", "weight_versions", "engine",
    "t_start_s", "t_end_s", "drop_reason", "num_turns",
)  # fmt: skip


def rows_of(
    files: Files, commit: Commit, tables: Iterable[str] = tuple(TABLES)
) -> dict[str, pa.Table]:
    """These tables of an iteration. Raises: ObjectMissing, ObjectCorrupt."""
    nodes = {stage: Nodes(files).get(stage, digest) for stage, digest in commit.nodes.items()}
    made = {
        "samples": lambda: _samples(files, commit, nodes),
        "metrics": lambda: _metrics(commit, nodes),
    }
    return {table: made[table]() for table in tables}


def prompt_name(prompt: str) -> str:
    """How the tables name a prompt, given as a row has it (JSON)."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def _metrics(commit: Commit, nodes: dict[Stage, Node]) -> pa.Table:
    values: dict[str, float] = {}
    for stage, node in nodes.items():
        said = node.outputs.get("metrics", {})
        values |= {
            str(name): float(value)
            for name, value in said.items()
            if isinstance(value, int | float)
        }
        if isinstance(seconds := node.outputs.get("seconds"), int | float):
            values[f"perf/{stage}_time"] = float(seconds)
    columns = [
        [commit.branch] * len(values),
        [commit.iteration] * len(values),
        list(values),
        list(values.values()),
    ]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, METRICS, strict=True)],
        schema=METRICS,
    )


def _samples(files: Files, commit: Commit, nodes: dict[Stage, Node]) -> pa.Table:
    rollout = nodes.get(Stage.ROLLOUT)
    if rollout is None or not rollout.files:
        return SAMPLES.empty_table()
    table = read_rows(files, rollout.files, READ)
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    said = _rewards(files, nodes.get(Stage.REWARD))
    batch = _batch(files, nodes.get(Stage.ADVANTAGE))
    trained = set(commit.trained)
    accepted = set(rollout.outputs.get("accepted", ()))
    oldest, newest = _versions(table)
    errors = table["error"].to_pylist()
    reasons = table["drop_reason"].to_pylist()
    began, ended = (table[name].to_numpy() for name in ("t_start_s", "t_end_s"))
    columns: dict[str, Any] = {
        "branch": [commit.branch] * len(keys),
        "iteration": [commit.iteration] * len(keys),
        "prompt": [prompt_name(prompt) for prompt in table["prompt"].to_pylist()],
        "error": [
            error or said.get(key, (None, None, None))[2]
            for key, error in zip(keys, errors, strict=True)
        ],
        "reward": [said.get(key, (None,))[0] for key in keys],
        "reward_parts": [said[key][1] if key in said else [] for key in keys],
        "prompt_tokens": _lengths(table, "prompt_ids"),
        "response_tokens": _lengths(table, "response_ids"),
        "accepted": [group in accepted for group, _ in keys],
        "trained": [group in trained for group, _ in keys],
        "drop_reason": [
            commit.dropped.get(group) or reason
            for (group, _), reason in zip(keys, reasons, strict=True)
        ],
        "advantage": [batch.get(key, (None,) * 3)[0] for key in keys],
        "logprob_difference": [batch.get(key, (None,) * 3)[1] for key in keys],
        "logprob_difference_max": [batch.get(key, (None,) * 3)[2] for key in keys],
        "oldest_version": oldest,
        "newest_version": newest,
        "staleness": [
            None if version is None else commit.iteration - version for version in oldest
        ],
        "started": began,
        "seconds": ended - began,
    }
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else table[field.name].cast(field.type)
        for field in SAMPLES
    ]
    return pa.table(arrays, schema=SAMPLES)


def _rewards(
    files: Files, reward: Node | None
) -> dict[Key, tuple[float | None, list[tuple[str, float]], str | None]]:
    if reward is None or not reward.files:
        return {}
    rows = read_rows(files, reward.files).to_pylist()
    return {
        (row["group_id"], row["index"]): (row["reward"], row["parts"], row["error"]) for row in rows
    }


def _batch(
    files: Files, advantage: Node | None
) -> dict[Key, tuple[float | None, float | None, float | None]]:
    """Of each row that is trained: advantage, mean and largest difference of log-probs, over the
    tokens that count."""
    if advantage is None or not advantage.files:
        return {}
    names = [
        "group_id",
        "index",
        "loss_mask",
        "advantages",
        "rollout_log_probs",
        "proximal_log_probs",
    ]
    table = read_rows(files, advantage.files, names)
    mask, offsets = ragged(table["loss_mask"])
    apart = None
    if not table["rollout_log_probs"].null_count and not table["proximal_log_probs"].null_count:
        apart = np.abs(
            ragged(table["rollout_log_probs"])[0] - ragged(table["proximal_log_probs"])[0]
        )
    values = None if table["advantages"].null_count else ragged(table["advantages"])[0]
    keys = zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
    return {
        key: (
            _mean(values, where),
            _mean(apart, where),
            float(apart[where].max()) if apart is not None and where.size else None,
        )
        for key, where in zip(keys, _counting(mask, offsets), strict=True)
    }


def _counting(mask: np.ndarray, offsets: np.ndarray) -> Iterator[np.ndarray]:
    """Per row: positions of its tokens that count."""
    for start, end in pairwise(offsets):
        yield start + np.flatnonzero(mask[start:end])


def _mean(values: np.ndarray | None, where: np.ndarray) -> float | None:
    return float(values[where].mean()) if values is not None and where.size else None


def _versions(table: pa.Table) -> tuple[list[int | None], list[int | None]]:
    """Oldest and newest weight version of each row; None where nothing was sampled."""
    runs = [[run["version"] for run in row] for row in table["weight_versions"].to_pylist()]
    return [min(row, default=None) for row in runs], [max(row, default=None) for row in runs]


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return np.diff(ragged(table[name])[1])
