"""From scored rows to the batch of an iteration: which samples are trained, and why the others are
not.

Only groups that the rollout accepted are looked at; what became of the others, it says itself. A
group is left out whole. Reasons: `reward_error` (a sample has no reward), `failed` (a sample's
generation failed), `aborted` (a sample was cut off by us), `empty` (no response), `stale` (weights
too old sampled a token that counts), `unrouted` (with train.use_rollout_routing_replay: it is not
known which experts sampled a token that counts). What is left out is named in the commit.

Then, once the models' log-probs are there, its advantages.

N samples, G groups, R response tokens of all samples. Not here: log-probs (columns added by the
trainer), packing, the mathematics of estimators (`rlpipe.algorithms.advantages`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms import custom
from rlpipe.algorithms.advantages import CustomEstimator, ScoredBatch, estimate
from rlpipe.algorithms.values import Estimates
from rlpipe.batch.columns import BatchColumns
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.errors import DataError
from rlpipe.rewards.base import RewardRow
from rlpipe.store.routed_experts import num_rows, one_per_token
from rlpipe.types import Sample, Status

UNROUTED = (
    "unrouted ones: ask args.sglang_router_ip:port in a function of yours, or set sample.rollout_routed_experts; rollouts from "
    "before train.use_rollout_routing_replay have none: use train.use_routing_replay"
)


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
    """[R] int64: weight version trained − weight version that sampled the token; None in supervised
    batches."""
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    """[N], each with its reward, without its experts."""

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
    routed: bool = False,
    own_teacher: bool = False,
) -> Batch:
    """The batch of these rows: of the groups that the rollout `accepted`.

    `scored`: a sample without a reward drops its group (supervised rows have none). `version`: the
    weight version that is trained; a token that a version below `version - max_staleness` sampled
    drops its group. With `mask_stale` it only gets loss mask 0; the group is dropped if no token is
    left that counts. `routed`: with the experts of the engines, all layers. `own_teacher`: with the
    teacher's log-probs that samples bring.

    Raises: DataError if no group is left, or a sample does not bring what it should.
    """
    reward_of = {(row.group_id, row.index): row for row in rewards}
    wanted = set(accepted)
    ordered = sorted(
        (s for s in samples if s.group_id in wanted),
        key=lambda sample: (sample.group_id, sample.index),
    )
    assert len({(sample.group_id, sample.index) for sample in ordered}) == len(ordered), (
        "a sample is there twice"
    )
    oldest = version - max_staleness
    if mask_stale:
        ordered = [_masked(sample, oldest) for sample in ordered]
    dropped: dict[str, str] = {}
    for sample in ordered:
        row = reward_of.get((sample.group_id, sample.index))
        reason = _reason(sample, row, scored=scored, oldest=oldest) or (
            "unrouted" if routed and _is_unrouted(sample) else None
        )
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
            do=UNROUTED if "unrouted" in dropped.values() else None,
        )
    values = [reward_of[s.group_id, s.index].reward or 0.0 if scored else 0.0 for s in kept]
    return Batch(
        columns=_columns(kept).with_columns(
            routed_experts=_experts(kept) if routed else None,
            teacher_log_probs=_teacher(kept) if own_teacher else None,
        ),
        group_ids=tuple(sample.group_id for sample in kept),
        indices=tuple(sample.index for sample in kept),
        rewards=np.array(values, np.float64),
        dropped=dropped,
        staleness=_staleness(kept, version),
        samples=tuple(
            replace(s, reward=value, rollout_routed_experts=None)
            for s, value in zip(kept, values, strict=True)
        ),
    )


def with_advantages(
    batch: Batch, columns: BatchColumns, config: AdvantageConfig, hook_args: Any = None
) -> BatchColumns:
    """The batch's columns with the log-probs (and values) of the models, plus `advantages` and
    `returns`.

    `hook_args`: what functions of the user get as `args`. Raises: ValueError if a column is missing
    that the estimator reads; DataError if a function of the user answers what it must not;
    ConfigError if there is no such function.
    """
    scored = ScoredBatch(
        rewards=batch.rewards,
        group=np.unique(np.asarray(batch.group_ids), return_inverse=True)[1],
        rollout=columns.rollouts,
        lengths=columns.response_lengths,
        mask=columns.loss_mask,
        proximal_log_probs=columns.proximal_log_probs,
        reference_log_probs=columns.reference_log_probs,
        teacher_log_probs=columns.teacher_log_probs,
        values=columns.values,
    )
    of_user = _of_user(batch, columns, config.custom_advantage_function_path, hook_args)
    found = estimate(scored, config, of_user)
    return (
        columns
        if found is None
        else columns.with_columns(advantages=found.advantages, returns=found.returns)
    )


def _of_user(
    batch: Batch, columns: BatchColumns, path: str | None, hook_args: Any
) -> CustomEstimator | None:
    """The user's estimator, called with the batch under slime's names."""
    if path is None:
        return None
    function = custom.load("custom_advantage_function_path", path)

    def of_user(scored: ScoredBatch, normalised: np.ndarray, kl: np.ndarray) -> Estimates:
        return custom.custom_estimates(
            function, hook_args, _rollout_data(batch, columns, normalised, kl), scored.lengths
        )

    return of_user


def _rollout_data(
    batch: Batch, columns: BatchColumns, rewards: np.ndarray, kl: np.ndarray
) -> dict[str, Any]:
    """The batch under slime's names: one tensor per sample, or one number."""
    given = {
        "log_probs": columns.proximal_log_probs,
        "ref_log_probs": columns.reference_log_probs,
        "rollout_log_probs": columns.rollout_log_probs,
        "teacher_log_probs": columns.teacher_log_probs,
        "values": columns.values,
        "kl": kl.astype(np.float32),
        "loss_masks": columns.loss_mask.astype(np.int32),
    }
    named = {
        name: [torch.from_numpy(part.copy()) for part in columns.split(c)]
        for name, c in given.items()
        if c is not None
    }
    tokens = np.split(columns.tokens.astype(np.int64), columns.offsets[1:-1])
    return {
        **named,
        "tokens": [torch.from_numpy(part.copy()) for part in tokens],
        "total_lengths": columns.lengths.tolist(),
        "response_lengths": columns.response_lengths.tolist(),
        "rewards": rewards.tolist(),
        "raw_reward": batch.rewards.tolist(),
        "truncated": [int(sample.truncated) for sample in batch.samples],
        "sample_indices": list(batch.indices),
        "group_ids": list(batch.group_ids),
        "rollout_ids": columns.rollouts.tolist(),
        "metadata": [sample.metadata for sample in batch.samples],
    }


def _staleness(samples: list[Sample], version: int) -> np.ndarray | None:
    if any(sample.rollout_log_probs is None for sample in samples):
        return None
    runs = [
        (tokens, version - sampled_by)
        for sample in samples
        for tokens, sampled_by in _runs(sample, version)
    ]
    return np.repeat(np.array([age for _, age in runs], np.int64), [tokens for tokens, _ in runs])


def _runs(sample: Sample, version: int) -> list[tuple[int, int]]:
    return sample.weight_versions or [(len(sample.response_ids), version)]


def _is_old(sample: Sample, oldest: int) -> bool:
    return sample.oldest_weight_version is not None and sample.oldest_weight_version < oldest


def _masked(sample: Sample, oldest: int) -> Sample:
    """The sample with loss mask 0 where weights older than `oldest` sampled."""
    mask = _mask(sample)
    if not _is_old(sample, oldest):
        return replace(sample, loss_mask=mask)
    fresh = [
        int(version >= oldest) for tokens, version in sample.weight_versions for _ in range(tokens)
    ]
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
    return any(
        counts and version < oldest for counts, version in zip(_mask(sample), versions, strict=True)
    )


def _mask(sample: Sample) -> list[int]:
    """A sample that was removed after the fact keeps its place in its group, but no token of it
    counts."""
    if sample.remove_sample:
        return [0] * len(sample.response_ids)
    return sample.loss_mask if sample.loss_mask is not None else [1] * len(sample.response_ids)


def _rollouts(samples: list[Sample]) -> np.ndarray:
    """[N] int64: a number for each rollout; samples that one rollout fanned out into share it."""
    given = [sample.rollout_id for sample in samples]
    keys = [
        (s.group_id, s.index if number is None else number)
        for s, number in zip(samples, given, strict=True)
    ]
    known = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([known[key] for key in keys], np.int64)


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
    columns = BatchColumns.from_lists(
        [sample.prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        loss_mask=[_mask(sample) for sample in samples],
        rollout_log_probs=[sample.rollout_log_probs or [] for sample in samples]
        if sampled
        else None,
    )
    return columns.with_columns(rollout=_rollouts(samples))


def _teacher(samples: list[Sample]) -> np.ndarray:
    """[R] float32: the teacher's log-probs that the samples bring. Raises: DataError naming a
    sample without."""
    parts = []
    for sample in samples:
        if sample.teacher_log_probs is None:
            raise DataError(
                "a sample has no log-probs of the teacher",
                where=f"advantage/{sample.group_id}/{sample.index}",
                expected="sample.teacher_log_probs, one for each response token (teacher.opd_type: samples)",
                do="set them in the generate function or in a sample hook",
            )
        parts.append(np.asarray(sample.teacher_log_probs, np.float32))
    return np.concatenate(parts)


def _experts(samples: list[Sample]) -> np.ndarray:
    """[S, W] uint16: the experts of every token, `NOT_ROUTED` of those that no engine read.

    Raises: DataError if nothing is known of any of them (none has a token that counts).
    """
    known = next(
        (
            sample.rollout_routed_experts
            for sample in samples
            if sample.rollout_routed_experts is not None
        ),
        None,
    )
    if known is None:
        raise DataError(
            "no sample says which experts sampled it",
            where="advantage",
            found=f"{len(samples)} samples",
            do=UNROUTED,
        )
    rows = [
        known[:0] if sample.rollout_routed_experts is None else sample.rollout_routed_experts
        for sample in samples
    ]
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    return np.concatenate([one_per_token(*pair) for pair in zip(rows, lengths, strict=True)])


def _is_unrouted(sample: Sample) -> bool:
    counting = np.flatnonzero(_mask(sample))
    return len(counting) > 0 and num_rows(sample.rollout_routed_experts) < len(
        sample.prompt_ids
    ) + int(counting[-1])


def _count(reasons: dict[str, str]) -> str:
    counts: dict[str, int] = {}
    for reason in reasons.values():
        counts[reason] = counts.get(reason, 0) + 1
    return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))
