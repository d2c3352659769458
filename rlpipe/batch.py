"""From scored rows to the batch of an iteration: which samples are trained, and why the others are not.

A group is left out whole. Reasons: `reward_error` (a sample has no reward), `failed` (a sample's generation failed), `aborted` (a
sample was cut off by us), `empty` (no response), `stale` (older weights sampled it). What is left out is named in the commit;
nothing disappears.

N samples, G groups, R response tokens of all samples. Not here: log-probs and advantages (columns added later), packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.errors import DataError
from rlpipe.packing import BatchColumns
from rlpipe.rewards.base import RewardRow
from rlpipe.types import Sample, Status


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples an iteration trains on, by group id and index, in that order."""

    columns: BatchColumns
    group_ids: tuple[str, ...]
    """[N]."""
    indices: tuple[int, ...]
    """[N] number of the sample within its group."""
    rewards: np.ndarray
    """[N] float64; zeros in supervised batches."""
    dropped: dict[str, str]
    """Group id → reason, of the groups that were left out."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The different group ids, in order."""
        return tuple(dict.fromkeys(self.group_ids))


def fix_batch(samples: Sequence[Sample], rewards: Sequence[RewardRow], *, scored: bool, version: int) -> Batch:
    """The batch of these rows. `scored`: a sample without a reward drops its group (supervised rows have none).
    `version`: the weight version that is trained; tokens that an older one sampled drop their group.

    Raises: DataError if no group is left.
    """
    reward_of = {(row.group_id, row.index): row for row in rewards}
    ordered = sorted(samples, key=lambda sample: (sample.group_id, sample.index))
    assert len({(sample.group_id, sample.index) for sample in ordered}) == len(ordered), "a sample is there twice"
    dropped: dict[str, str] = {}
    for sample in ordered:
        row = reward_of.get((sample.group_id, sample.index))
        reason = _reason(sample, row, scored=scored, version=version)
        if reason:
            dropped.setdefault(sample.group_id, reason)
    kept = [sample for sample in ordered if sample.group_id not in dropped]
    if not kept:
        raise DataError(
            "no group is left to train on",
            where="advantage",
            found=f"{len(dropped)} groups left out: {_count(dropped)}",
            expected="at least one group whose samples were all generated and scored",
        )
    return Batch(
        columns=_columns(kept),
        group_ids=tuple(sample.group_id for sample in kept),
        indices=tuple(sample.index for sample in kept),
        rewards=np.array([reward_of[s.group_id, s.index].reward or 0.0 if scored else 0.0 for s in kept], np.float64),
        dropped=dropped,
    )


def _reason(sample: Sample, row: RewardRow | None, *, scored: bool, version: int) -> str | None:
    if sample.status is Status.FAILED:
        return "failed"
    if sample.status in (Status.ABORTED, Status.PENDING):
        return "aborted"
    if not sample.response_ids:
        return "empty"
    oldest = sample.oldest_weight_version
    if oldest is not None and oldest < version:
        return "stale"
    if scored and (row is None or row.reward is None):
        return "reward_error"
    return None


def _columns(samples: list[Sample]) -> BatchColumns:
    without = [sample for sample in samples if sample.rollout_log_probs is None]
    if 0 < len(without) < len(samples):
        raise DataError(
            "some samples have log-probs of the engine and some have none",
            where=f"advantage/{without[0].group_id}/{without[0].index}",
            found=f"{len(without)} of {len(samples)} without",
            expected="all or none: a batch is sampled or supervised",
        )
    sampled = not without
    return BatchColumns.from_lists(
        [sample.prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        loss_mask=[s.loss_mask if s.loss_mask is not None else [1] * len(s.response_ids) for s in samples],
        rollout_log_probs=[sample.rollout_log_probs or [] for sample in samples] if sampled else None,
    )


def _count(reasons: dict[str, str]) -> str:
    counts: dict[str, int] = {}
    for reason in reasons.values():
        counts[reason] = counts.get(reason, 0) + 1
    return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))
