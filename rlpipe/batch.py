"""From scored rows to the batch of an iteration: which samples are trained, and why the others are not.

Only groups that the rollout accepted are looked at; what became of the others, it says itself. A group is left out whole.
Reasons: `reward_error` (a sample has no reward), `failed` (a sample's generation failed), `aborted` (a sample was cut off by us),
`empty` (no response), `stale` (weights too old sampled a token that counts). What is left out is named in the commit.

N samples, G groups, R response tokens of all samples. Not here: log-probs and advantages (columns added later), packing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
    staleness: np.ndarray | None = None
    """[R] int64: weight version trained − weight version that sampled the token; None in supervised batches."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The different group ids, in order."""
        return tuple(dict.fromkeys(self.group_ids))


def fix_batch(
    samples: Sequence[Sample],
    rewards: Sequence[RewardRow],
    *,
    accepted: Collection[str],
    scored: bool,
    version: int,
    max_staleness: int = 0,
    mask_stale: bool = False,
) -> Batch:
    """The batch of these rows: of the groups that the rollout `accepted`.

    `scored`: a sample without a reward drops its group (supervised rows have none). `version`: the weight version that is
    trained; a token that a version below `version - max_staleness` sampled drops its group. With `mask_stale` it only gets
    loss mask 0; the group is dropped if no token is left that counts.

    Raises: DataError if no group is left.
    """
    reward_of = {(row.group_id, row.index): row for row in rewards}
    wanted = set(accepted)
    ordered = sorted((s for s in samples if s.group_id in wanted), key=lambda sample: (sample.group_id, sample.index))
    assert len({(sample.group_id, sample.index) for sample in ordered}) == len(ordered), "a sample is there twice"
    oldest = version - max_staleness
    if mask_stale:
        ordered = [_masked(sample, oldest) for sample in ordered]
    dropped: dict[str, str] = {}
    for sample in ordered:
        row = reward_of.get((sample.group_id, sample.index))
        reason = _reason(sample, row, scored=scored, oldest=oldest)
        if reason:
            dropped.setdefault(sample.group_id, reason)
    if mask_stale:
        counting = {sample.group_id for sample in ordered if any(sample.loss_mask or ())}
        masked = {sample.group_id for sample in ordered if _is_old(sample, oldest)}
        dropped |= {group: "stale" for group in masked - counting if group not in dropped}
    kept = [sample for sample in ordered if sample.group_id not in dropped]
    if not kept:
        raise DataError(
            "no group is left to train on",
            where="advantage",
            found=f"{len(dropped)} groups left out: {_count(dropped)}",
            expected="at least one accepted group whose samples were all generated and scored",
        )
    return Batch(
        columns=_columns(kept),
        group_ids=tuple(sample.group_id for sample in kept),
        indices=tuple(sample.index for sample in kept),
        rewards=np.array([reward_of[s.group_id, s.index].reward or 0.0 if scored else 0.0 for s in kept], np.float64),
        dropped=dropped,
        staleness=_staleness(kept, version),
    )


def _staleness(samples: list[Sample], version: int) -> np.ndarray | None:
    if any(sample.rollout_log_probs is None for sample in samples):
        return None
    runs = [(tokens, version - sampled_by) for sample in samples for tokens, sampled_by in _runs(sample, version)]
    return np.repeat(np.array([age for _, age in runs], np.int64), [tokens for tokens, _ in runs])


def _runs(sample: Sample, version: int) -> list[tuple[int, int]]:
    return sample.weight_versions or [(len(sample.response_ids), version)]


def _is_old(sample: Sample, oldest: int) -> bool:
    return sample.oldest_weight_version is not None and sample.oldest_weight_version < oldest


def _masked(sample: Sample, oldest: int) -> Sample:
    """The sample with loss mask 0 where weights older than `oldest` sampled."""
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(sample.response_ids)
    if not _is_old(sample, oldest):
        return replace(sample, loss_mask=mask)
    fresh = [int(version >= oldest) for tokens, version in sample.weight_versions for _ in range(tokens)]
    return replace(sample, loss_mask=[kept * ours for kept, ours in zip(mask, fresh, strict=True)])


def _reason(sample: Sample, row: RewardRow | None, *, scored: bool, oldest: int) -> str | None:
    if sample.status is Status.FAILED:
        return "failed"
    if sample.status in (Status.ABORTED, Status.PENDING):
        return "aborted"
    if not sample.response_ids:
        return "empty"
    if _unmasked_old(sample, oldest):
        return "stale"
    if scored and (row is None or row.reward is None):
        return "reward_error"
    return None


def _unmasked_old(sample: Sample, oldest: int) -> bool:
    if not _is_old(sample, oldest):
        return False
    versions = [version for tokens, version in sample.weight_versions for _ in range(tokens)]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(versions)
    return any(counts and version < oldest for counts, version in zip(mask, versions, strict=True))


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
