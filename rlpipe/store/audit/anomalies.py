"""Unusual values of a branch, found in its tables iteration by iteration.

    reward_errors   share of samples without a reward because the verifier failed
    failed          share of samples that were not generated
    truncated       share of responses that were cut off at the length limit
    empty           share of responses without a token
    dropped         share of groups that were sampled and not trained
    no_signal       share of trained groups with equal rewards, so that they teach nothing
    stale           a trained token is older than `async_buffer_size` allows
    drift           engine and trainer differ in the log-probs of trained tokens
    grad_norm, reward, response_tokens, entropy
                    far from the median of the iterations before

A share is unusual above its limit. A value is unusual if its distance from the median is more than
`Limits.jump` times the median distance.

Entry points: `find_anomalies`, `shares`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.tables import scalars

DRIFT = {"float32": 1e-3}
"""Limit of the mean absolute difference of log-probs, by the model's dtype."""
OTHER_DRIFT = 0.3
WATCHED = {
    "grad_norm": "train/grad_norm",
    "reward": "rollout/raw_reward",
    "entropy": "train/entropy",
}
FLAT = 1e-3
"""Smallest relative distance from the median. Without it, any change of a constant value would be
unusual."""


COLUMNS = (
    "group_id",
    "status",
    "error",
    "reward",
    "response_tokens",
    "trained",
    "accepted",
    "staleness",
    "logprob_difference",
)


class Limits(NamedTuple):
    """Limits above which a value is unusual."""

    reward_errors: float = 0.02
    failed: float = 0.02
    truncated: float = 0.5
    empty: float = 0.02
    dropped: float = 0.5
    no_signal: float = 0.8
    drift: float | None = None
    """Mean absolute difference of log-probs; None: by the model's dtype."""
    jump: float = 12.0
    """Multiple of the median distance from the median of the iterations before."""
    window: int = 20
    """Number of iterations before. At least half of them must exist."""


class Anomaly(NamedTuple):
    """An unusual value in one iteration."""

    rule: str
    branch: str
    iteration: int
    value: float
    usual: str
    """Description of the usual value."""


def find_anomalies(files: Files, branch: str, limits: Limits | None = None) -> list[Anomaly]:
    """Return all unusual values along a branch and its origins, oldest first.

    The configuration of the branch that made an iteration decides its limits. Raises: ObjectMissing
    if the branch does not exist; ObjectCorrupt if its rows cannot be read.
    """
    limits = limits or Limits()
    anomalies = [
        *_in_samples(scalars.read(files, branch), Branches(files), limits),
        *_in_metrics(files, branch, limits),
    ]
    return sorted(anomalies, key=lambda anomaly: (anomaly.iteration, anomaly.rule))


def by_iteration(rows: pa.Table) -> Iterator[tuple[str, int, dict[str, np.ndarray]]]:
    """Yield (branch, iteration, columns) of each iteration.

    A null is NaN in numbers, and None in texts.
    """
    columns = {name: rows[name].to_numpy(zero_copy_only=False) for name in COLUMNS}
    branches = rows["branch"].to_pylist()
    iterations = rows["iteration"].to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(iterations)) + 1).tolist(), len(iterations)]
    for start, end in pairwise(starts):
        if end > start:
            yield (
                branches[start],
                int(iterations[start]),
                {name: column[start:end] for name, column in columns.items()},
            )


def shares(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return, for each rule, the share of samples or groups of an iteration to which it applies."""
    status = columns["status"]
    groups = columns["group_id"]
    rewards = columns["reward"].astype(float)
    # A sample that was not generated has an error too, but no verifier failed.
    unscored = (
        np.array([error is not None for error in columns["error"]])
        & np.isnan(rewards)
        & (status != "failed")
    )
    trained = columns["trained"].astype(bool)
    values: dict[str, set[float]] = {}
    for group, reward in zip(groups[trained], rewards[trained], strict=True):
        values.setdefault(group, set()).add(reward)
    sizes = Counter(groups[trained].tolist())
    no_signal = 0.0
    # Groups of one sample, and runs without rewards, have no spread of rewards at all.
    if sizes and max(sizes.values()) > 1 and not np.isnan(rewards[trained]).any():
        no_signal = float(np.mean([len(distinct) == 1 for distinct in values.values()]))
    return {
        "reward_errors": float(unscored.mean()),
        "failed": float((status == "failed").mean()),
        "truncated": float((status == "truncated").mean()),
        "empty": float((columns["response_tokens"] == 0).mean()),
        "dropped": 1 - len(values) / len(set(groups)),
        "no_signal": no_signal,
    }


def _in_samples(rows: pa.Table, branches: Branches, limits: Limits) -> Iterator[Anomaly]:
    lengths: list[float] = []
    for branch, k, columns in by_iteration(rows):
        for rule, share in shares(columns).items():
            if share > (limit := getattr(limits, rule)):
                yield Anomaly(rule, branch, k, share, f"at most {limit:.0%}")
        trained = columns["trained"].astype(bool)
        if trained.any():
            yield from _in_trained(branch, k, columns, branches.config(branch), limits)
        length = float(columns["response_tokens"].mean())
        yield from _jump("response_tokens", branch, k, length, lengths, limits)
        lengths.append(length)


def _in_trained(
    branch: str,
    k: int,
    columns: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    limits: Limits,
) -> Iterator[Anomaly]:
    # The configuration may come from another release, so missing keys are allowed.
    allowed = int(config.get("async_buffer_size") or 0)
    masked = bool((config.get("rollout") or {}).get("mask_offpolicy_in_partial_rollout"))
    drift = limits.drift or DRIFT.get((config.get("model") or {}).get("dtype", ""), OTHER_DRIFT)
    trained = columns["trained"].astype(bool)
    ages = columns["staleness"][trained].astype(float)
    if not masked and (oldest := np.nanmax(ages, initial=0.0)) > allowed:
        yield Anomaly("stale", branch, k, float(oldest), f"at most {allowed} (async_buffer_size)")
    differences = columns["logprob_difference"][trained].astype(float)
    known = differences[~np.isnan(differences)]
    if known.size and (mean := float(known.mean())) > drift:
        yield Anomaly("drift", branch, k, mean, f"at most {drift:g}")


def _in_metrics(files: Files, branch: str, limits: Limits) -> Iterator[Anomaly]:
    rows = scalars.read(files, branch, "metrics")
    for rule, name in WATCHED.items():
        before: list[float] = []
        for row in rows.filter(pc.field("name") == name).to_pylist():
            yield from _jump(rule, row["branch"], row["iteration"], row["value"], before, limits)
            before.append(row["value"])


def _jump(
    rule: str, branch: str, k: int, value: float, before: list[float], limits: Limits
) -> Iterator[Anomaly]:
    """Compare a value with the median of the values before."""
    recent = np.array(before[-limits.window :])
    if len(recent) < max(limits.window // 2, 1):
        return
    median = float(np.median(recent))
    distance = max(
        float(np.median(np.abs(recent - median))), FLAT * abs(median), np.finfo(float).tiny
    )
    if abs(value - median) > limits.jump * distance:
        usual = f"{median:.4g} ± {distance:.2g} over the {len(recent)} iterations before"
        yield Anomaly(rule, branch, k, value, usual)
