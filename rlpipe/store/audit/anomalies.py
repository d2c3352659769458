"""What is unusual along a branch: asked of its tables, iteration by iteration.

    reward_errors   a share of the samples has no reward because the verifier failed
    failed          a share of the samples could not be generated
    truncated       a share of the responses was cut off at the length limit
    empty           a share of the responses has no token
    dropped         a share of the groups was sampled and not trained
    no_signal       a share of the groups has equal rewards throughout, so that they teach nothing
    stale           a token that was trained is older than `async_buffer_size` allows
    drift           engine and trainer disagree about the log-probs of the tokens that were trained
    grad_norm, reward, response_tokens, entropy
                    far from its own median over the iterations before

A share is unusual above its limit; a value if it is further from the median than `Limits.jump`
times the usual distance from it.

Not here: what is wrong rather than unusual (`audit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.tables import scalars

DRIFT = {"float32": 1e-3}
"""Mean absolute difference of log-probs of a sample, by the model's dtype."""
OTHER_DRIFT = 0.3
WATCHED = {
    "grad_norm": "train/grad_norm",
    "reward": "rollout/raw_reward",
    "entropy": "train/entropy",
}
FLAT = 1e-3
"""Part of its own size by which a value always varies: one that never changed may do so a
little."""


class Limits(NamedTuple):
    """From where on something is unusual."""

    reward_errors: float = 0.02
    failed: float = 0.02
    truncated: float = 0.5
    empty: float = 0.02
    dropped: float = 0.5
    no_signal: float = 0.9
    drift: float | None = None
    """Mean absolute difference of log-probs; None: by the model's dtype."""
    jump: float = 12.0
    """Times the median distance from the median of the `window` iterations before."""
    window: int = 20
    """At least half of it has to be there."""


class Anomaly(NamedTuple):
    """Something unusual in one iteration."""

    rule: str
    branch: str
    iteration: int
    value: float
    usual: str
    """What it is compared with, in words."""


def find_anomalies(files: Files, branch: str, limits: Limits | None = None) -> list[Anomaly]:
    """Everything unusual along a branch, oldest first; each iteration by the configuration of the
    branch that made it.

    Raises: ObjectMissing if there is no such branch; ObjectCorrupt if its rows cannot be read.
    """
    limits = limits or Limits()
    found = [
        *_of_samples(scalars.read(files, branch), Branches(files), limits),
        *_of_metrics(files, branch, limits),
    ]
    return sorted(found, key=lambda one: (one.iteration, one.rule))


def by_iteration(rows: pa.Table) -> Iterator[tuple[str, int, dict[str, np.ndarray]]]:
    """(branch, iteration, columns) of each iteration; numbers are NaN and texts None where they are
    null."""
    names = (
        "group_id", "status", "error", "reward", "response_tokens", "trained", "accepted", "staleness",
        "logprob_difference",
    )  # fmt: skip
    columns = {name: rows[name].to_numpy(zero_copy_only=False) for name in names}
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
    """The share of the samples (or groups) of an iteration to which each rule applies."""
    status = columns["status"]
    groups = columns["group_id"]
    rewards = columns["reward"].astype(float)
    unscored = (
        np.array([error is not None for error in columns["error"]])
        & np.isnan(rewards)
        & (status != "failed")
    )
    trained = columns["trained"].astype(bool)
    kept = set(groups[trained])
    spread: dict[str, set[float]] = {}
    for group, reward in zip(groups[trained], rewards[trained], strict=True):
        spread.setdefault(group, set()).add(reward)
    alike = (
        [len(values) == 1 for values in spread.values()]
        if not np.isnan(rewards[trained]).any()
        else []
    )
    sizes = Counter(groups[trained].tolist())
    return {
        "reward_errors": float(unscored.mean()),
        "failed": float((status == "failed").mean()),
        "truncated": float((status == "truncated").mean()),
        "empty": float((columns["response_tokens"] == 0).mean()),
        "dropped": 1 - len(kept) / len(set(groups)),
        "no_signal": float(np.mean(alike)) if alike and max(sizes.values()) > 1 else 0.0,
    }


def _of_samples(rows: pa.Table, branches: Branches, limits: Limits) -> Iterator[Anomaly]:
    lengths: list[float] = []
    for branch, k, columns in by_iteration(rows):
        for rule, share in shares(columns).items():
            if share > (limit := getattr(limits, rule)):
                yield Anomaly(rule, branch, k, share, f"at most {limit:.0%}")
        trained = columns["trained"].astype(bool)
        if trained.any():
            yield from _of_trained(branch, k, columns, branches.config(branch), limits)
        length = float(columns["response_tokens"].mean())
        yield from _jump("response_tokens", branch, k, length, lengths, limits)
        lengths.append(length)


def _of_trained(
    branch: str,
    k: int,
    columns: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    limits: Limits,
) -> Iterator[Anomaly]:
    allowed = int(config.get("async_buffer_size") or 0)
    masked = bool((config.get("rollout") or {}).get("mask_offpolicy_in_partial_rollout"))
    drift = limits.drift or DRIFT.get((config.get("model") or {}).get("dtype", ""), OTHER_DRIFT)
    trained = columns["trained"].astype(bool)
    ages = columns["staleness"][trained].astype(float)
    if not masked and (oldest := np.nanmax(ages, initial=0.0)) > allowed:
        yield Anomaly("stale", branch, k, float(oldest), f"at most {allowed} (async_buffer_size)")
    apart = columns["logprob_difference"][trained].astype(float)
    known = apart[~np.isnan(apart)]
    if known.size and (mean := float(known.mean())) > drift:
        yield Anomaly("drift", branch, k, mean, f"at most {drift:g}")


def _of_metrics(files: Files, branch: str, limits: Limits) -> Iterator[Anomaly]:
    rows = scalars.read(files, branch, "metrics")
    for rule, name in WATCHED.items():
        before: list[float] = []
        for row in rows.filter(
            pa.array([found == name for found in rows["name"].to_pylist()], pa.bool_())
        ).to_pylist():
            yield from _jump(rule, row["branch"], row["iteration"], row["value"], before, limits)
            before.append(row["value"])


def _jump(
    rule: str, branch: str, k: int, value: float, before: list[float], limits: Limits
) -> Iterator[Anomaly]:
    recent = np.array(before[-limits.window :])
    if len(recent) < max(limits.window // 2, 1):
        return
    middle = float(np.median(recent))
    distance = max(
        float(np.median(np.abs(recent - middle))), FLAT * abs(middle), np.finfo(float).tiny
    )
    if abs(value - middle) > limits.jump * distance:
        yield Anomaly(
            rule,
            branch,
            k,
            value,
            f"{middle:.4g} ± {distance:.2g} over the {len(recent)} iterations before",
        )
