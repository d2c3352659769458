"""Build the batch of an iteration from scored samples, and estimate its advantages.

`fix_batch` decides which accepted groups are trained. A group is dropped whole if one of its
samples cannot be trained; the commit names the reason:

| reason         | a sample of the group ...                                                     |
|----------------|-------------------------------------------------------------------------------|
| `reward_error` | has no reward                                                                 |
| `failed`       | failed while it was sampled                                                   |
| `aborted`      | was aborted                                                                   |
| `empty`        | has no response                                                               |
| `stale`        | has a token in the loss that too old weights sampled                          |
| `unrouted`     | has a token in the loss without known experts (use_rollout_routing_replay)    |

`with_advantages` runs the estimator once the trainer has added the log-probs. N samples, R response
tokens, S tokens of prompts and responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms import custom
from rlpipe.algorithms.advantages import CustomEstimator, ScoredBatch, estimate
from rlpipe.algorithms.values import Estimates
from rlpipe.batch.columns import BatchColumns
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.config.hooks import rollout_id
from rlpipe.errors import DataError
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.columns import hook_names
from rlpipe.store.routed_experts import num_rows, one_per_token
from rlpipe.types import Sample, Status

UNROUTED_HELP = (
    "unrouted groups: ask args.sglang_router_ip:port in your generate function, or set "
    "sample.rollout_routed_experts; rollouts from before train.use_rollout_routing_replay have "
    "none: use train.use_routing_replay"
)
NOT_ESTIMATED = ("advantages", "returns")
"""Columns that an estimator computes, so a custom estimator does not get them."""

Key = tuple[str, int]
"""(group id, index) of a sample."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples that an iteration trains on, sorted by group id and index."""

    columns: BatchColumns
    group_ids: tuple[str, ...]
    """[N]."""
    indices: tuple[int, ...]
    """[N]: number of the sample in its group."""
    rewards: np.ndarray
    """[N] float64; zeros in a supervised batch."""
    dropped: dict[str, str]
    """Group id → reason, for the accepted groups that are not trained."""
    staleness: np.ndarray | None = None
    """[R] int64: weight version trained − weight version that sampled; None in supervised rows."""
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    """[N]: each with its reward and without its experts."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The group ids without repetition, in order."""
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
    """Return the batch of the groups that the rollout `accepted`.

    `scored`: a sample without a reward drops its group; supervised rows have no rewards.
    `version`: the weight version that is trained. A token that a version below
    `version - max_staleness` sampled drops its group. With `mask_stale` the token gets loss mask 0
    instead, and the group is dropped only if no token in the loss is left. `routed`: the batch has
    the experts that the engines chose. `own_teacher`: the batch has the teacher's log-probs that
    the samples bring.

    Raises: DataError if no group is left, or a sample lacks a value that the batch needs.
    """
    oldest = version - max_staleness
    reward_of = {(row.group_id, row.index): row for row in rewards}
    ordered = _ordered(samples, accepted)
    if mask_stale:
        ordered = [_with_stale_masked(sample, oldest) for sample in ordered]
    dropped: dict[str, str] = {}
    for sample in ordered:
        row = reward_of.get((sample.group_id, sample.index))
        reason = _drop_reason(sample, row, scored=scored, oldest=oldest, routed=routed)
        if reason:
            dropped.setdefault(sample.group_id, reason)
    if mask_stale:
        masked_out = _groups_without_tokens(ordered, oldest) - dropped.keys()
        dropped |= dict.fromkeys(masked_out, "stale")
    kept = [sample for sample in ordered if sample.group_id not in dropped]
    if not kept:
        raise _nothing_left(dropped)
    values = [_reward(reward_of, sample) if scored else 0.0 for sample in kept]
    return Batch(
        columns=_columns(kept).with_columns(
            routed_experts=_experts(kept) if routed else None,
            teacher_log_probs=_teacher_log_probs(kept) if own_teacher else None,
        ),
        group_ids=tuple(sample.group_id for sample in kept),
        indices=tuple(sample.index for sample in kept),
        rewards=np.array(values, np.float64),
        dropped=dropped,
        staleness=staleness_of(kept, version),
        samples=tuple(
            replace(sample, reward=value, rollout_routed_experts=None)
            for sample, value in zip(kept, values, strict=True)
        ),
    )


def with_advantages(
    batch: Batch,
    columns: BatchColumns,
    config: AdvantageConfig,
    hook_args: Any = None,
    *,
    iteration: int = 0,
) -> BatchColumns:
    """Return the columns with `advantages` and `returns`.

    `columns`: the batch's columns with the log-probs and values of the models. `hook_args`: the
    `args` of user functions. `iteration`: their `rollout_id`.

    Raises: ValueError if the estimator needs a column that is missing; DataError if a user function
    returns a wrong value; ConfigError if the function does not exist.
    """
    path = config.custom_convert_samples_to_train_data_path
    if path is not None:
        batch, columns = _converted(batch, columns, path, hook_args)
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
    path = config.custom_advantage_function_path
    estimator = None if path is None else _custom_estimator(batch, columns, path, hook_args)
    estimates = estimate(scored, config, estimator)
    if estimates is None:
        return columns
    columns = columns.with_columns(advantages=estimates.advantages, returns=estimates.returns)
    path = config.rollout_data_postprocess_path
    return columns if path is None else _postprocessed(batch, columns, path, hook_args, iteration)


def _converted(
    batch: Batch, columns: BatchColumns, path: str, hook_args: Any
) -> tuple[Batch, BatchColumns]:
    """Return batch and columns with the values of the user's conversion of the samples."""
    function = custom.load("custom_convert_samples_to_train_data_path", path)
    result = custom.converted(function, hook_args, batch.samples, columns.rollouts)
    log_probs = {name: value.astype(np.float32) for name, value in result.log_probs.items()}
    mask = result.loss_mask.astype(columns.loss_mask.dtype)
    columns = columns.with_columns(loss_mask=mask, **log_probs)
    return replace(batch, rewards=result.rewards), columns


def _postprocessed(
    batch: Batch, columns: BatchColumns, path: str, hook_args: Any, iteration: int
) -> BatchColumns:
    """Return the columns after the user's post-processing of the estimated batch."""
    function = custom.load("rollout_data_postprocess_path", path)
    rollout_data = _rollout_data(batch, columns, batch.rewards, np.zeros(len(columns.loss_mask)))
    for name in NOT_ESTIMATED:
        column = getattr(columns, name)
        parts = columns.split(column)
        rollout_data[name] = [torch.from_numpy(part.astype(np.float32)) for part in parts]
    estimates, mask = custom.postprocessed(
        function,
        hook_args,
        rollout_id(hook_args, iteration),
        rollout_data,
        columns.response_lengths,
    )
    return columns.with_columns(
        advantages=estimates.advantages,
        returns=estimates.returns,
        loss_mask=mask.astype(columns.loss_mask.dtype),
    )


def _custom_estimator(
    batch: Batch, columns: BatchColumns, path: str, hook_args: Any
) -> CustomEstimator:
    """Return the user's estimator, which gets the batch under slime's names."""
    function = custom.load("custom_advantage_function_path", path)

    def estimator(scored: ScoredBatch, normalised: np.ndarray, kl: np.ndarray) -> Estimates:
        rollout_data = _rollout_data(batch, columns, normalised, kl)
        return custom.custom_estimates(function, hook_args, rollout_data, scored.lengths)

    return estimator


def _rollout_data(
    batch: Batch, columns: BatchColumns, rewards: np.ndarray, kl: np.ndarray
) -> dict[str, Any]:
    """Return the batch under slime's names: a list with a tensor or a number of each sample."""
    per_token = {
        hook: getattr(columns, name)
        for name, hook in hook_names().items()
        if name not in NOT_ESTIMATED
    }
    per_token["kl"] = kl.astype(np.float32)
    per_token["loss_masks"] = columns.loss_mask.astype(np.int32)
    tokens = np.split(columns.tokens.astype(np.int64), columns.offsets[1:-1])
    return {
        **{
            name: [torch.from_numpy(part.copy()) for part in columns.split(column)]
            for name, column in per_token.items()
            if column is not None
        },
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
        "source_names": [
            sample.metadata.get("source_name") or "unknown" for sample in batch.samples
        ],
    }


def _ordered(samples: Sequence[Sample], accepted: Collection[str]) -> list[Sample]:
    groups = set(accepted)
    ordered = sorted(
        (sample for sample in samples if sample.group_id in groups),
        key=lambda sample: (sample.group_id, sample.index),
    )
    keys = {(sample.group_id, sample.index) for sample in ordered}
    assert len(keys) == len(ordered), "a sample appears twice"
    return ordered


def _drop_reason(
    sample: Sample, row: RewardRow | None, *, scored: bool, oldest: int, routed: bool
) -> str | None:
    if sample.status is Status.FAILED:
        return "failed"
    if sample.status in (Status.ABORTED, Status.PENDING):
        return "aborted"
    if not sample.response_ids:
        return "empty"
    if _has_stale_token(sample, oldest):
        return "stale"
    if scored and (row is None or row.reward is None):
        return "reward_error"
    if routed and _has_unrouted_token(sample):
        return "unrouted"
    return None


def _groups_without_tokens(samples: list[Sample], oldest: int) -> set[str]:
    """Return the groups with a stale sample in which masking left no token in the loss."""
    in_loss = {sample.group_id for sample in samples if any(sample.loss_mask or ())}
    return {sample.group_id for sample in samples if _is_stale(sample, oldest)} - in_loss


def _nothing_left(dropped: dict[str, str]) -> DataError:
    reasons = sorted(Counter(dropped.values()).items())
    counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
    return DataError(
        "no group is left to train on",
        where="advantage",
        found=f"{len(dropped)} groups left out: {counts}",
        expected="at least one accepted group whose samples were all generated and scored",
        do=UNROUTED_HELP if "unrouted" in dropped.values() else None,
    )


def _reward(reward_of: dict[Key, RewardRow], sample: Sample) -> float:
    return reward_of[sample.group_id, sample.index].reward or 0.0


def _loss_mask(sample: Sample) -> list[int]:
    # A removed sample stays in its group, where its reward counts, but none of its tokens does.
    if sample.remove_sample:
        return [0] * len(sample.response_ids)
    return sample.loss_mask if sample.loss_mask is not None else [1] * len(sample.response_ids)


def _token_versions(sample: Sample) -> Iterator[int]:
    """Yield the weight version that sampled each response token."""
    for tokens, version in sample.weight_versions:
        for _ in range(tokens):
            yield version


def _is_stale(sample: Sample, oldest: int) -> bool:
    return sample.oldest_weight_version is not None and sample.oldest_weight_version < oldest


def _has_stale_token(sample: Sample, oldest: int) -> bool:
    if not _is_stale(sample, oldest):
        return False
    tokens = zip(_loss_mask(sample), _token_versions(sample), strict=True)
    return any(mask and version < oldest for mask, version in tokens)


def _with_stale_masked(sample: Sample, oldest: int) -> Sample:
    """Return the sample with loss mask 0 for tokens that weights older than `oldest` sampled."""
    mask = _loss_mask(sample)
    if _is_stale(sample, oldest):
        tokens = zip(mask, _token_versions(sample), strict=True)
        mask = [value * int(version >= oldest) for value, version in tokens]
    return replace(sample, loss_mask=mask)


def staleness_of(samples: Sequence[Sample], version: int) -> np.ndarray | None:
    """Return `Batch.staleness` of these samples. `version`: the weight version that is trained."""
    if any(sample.rollout_log_probs is None for sample in samples):
        return None
    # A sample without recorded versions counts as sampled by the weights that are trained.
    runs = [
        (tokens, version - sampled_by)
        for sample in samples
        for tokens, sampled_by in sample.weight_versions or [(len(sample.response_ids), version)]
    ]
    ages = np.array([age for _, age in runs], np.int64)
    return np.repeat(ages, [tokens for tokens, _ in runs])


def _columns(samples: list[Sample]) -> BatchColumns:
    without = [sample for sample in samples if sample.rollout_log_probs is None]
    if 0 < len(without) < len(samples):
        raise DataError(
            "some samples have log-probs of the engine and some have none",
            where=f"advantage/{without[0].group_id}/{without[0].index}",
            found=f"{len(without)} of {len(samples)} without",
            expected="all or none: a batch is sampled or supervised",
        )
    log_probs = None if without else [sample.rollout_log_probs or [] for sample in samples]
    columns = BatchColumns.from_lists(
        [sample.prompt_ids for sample in samples],
        [sample.response_ids for sample in samples],
        loss_mask=[_loss_mask(sample) for sample in samples],
        rollout_log_probs=log_probs,
    )
    return columns.with_columns(rollout=_rollout_numbers(samples))


def _rollout_numbers(samples: list[Sample]) -> np.ndarray:
    """Return [N] int64: equal numbers for the samples that one rollout fanned out into."""
    keys = [
        (sample.group_id, sample.index if sample.rollout_id is None else sample.rollout_id)
        for sample in samples
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def _teacher_log_probs(samples: list[Sample]) -> np.ndarray:
    """Return [R] float32. Raises: DataError naming a sample without the teacher's log-probs."""
    parts = []
    for sample in samples:
        if sample.teacher_log_probs is None:
            raise DataError(
                "a sample has no log-probs of the teacher",
                where=f"advantage/{sample.group_id}/{sample.index}",
                expected="sample.teacher_log_probs, one for each response token "
                "(teacher.opd_type: samples)",
                do="set them in the generate function or in a sample hook",
            )
        parts.append(np.asarray(sample.teacher_log_probs, np.float32))
    return np.concatenate(parts)


def _experts(samples: list[Sample]) -> np.ndarray:
    """Return [S, W] uint16: the experts of every token, NOT_ROUTED where no engine read it.

    Raises: DataError if no sample has experts, so that W is unknown.
    """
    recorded = [sample.rollout_routed_experts for sample in samples]
    known = next((experts for experts in recorded if experts is not None), None)
    if known is None:
        raise DataError(
            "no sample names the experts that sampled it",
            where="advantage",
            found=f"{len(samples)} samples",
            do=UNROUTED_HELP,
        )
    rows = [known[:0] if experts is None else experts for experts in recorded]
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    return np.concatenate(
        [one_per_token(row, length) for row, length in zip(rows, lengths, strict=True)]
    )


def _has_unrouted_token(sample: Sample) -> bool:
    in_loss = np.flatnonzero(_loss_mask(sample))
    if len(in_loss) == 0:
        return False
    # Token t is sampled from the row of token t - 1.
    needed = len(sample.prompt_ids) + int(in_loss[-1])
    return num_rows(sample.rollout_routed_experts) < needed
