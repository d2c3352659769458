"""`with_advantages`: estimate the advantages of a batch once the models have scored it.

User functions of the advantage stage get the batch under slime's names. N samples, R response
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms import custom
from rlpipe.algorithms.advantages import CustomEstimator, ScoredBatch, estimate
from rlpipe.algorithms.values import Estimates
from rlpipe.batch.build import Batch
from rlpipe.batch.columns import BatchColumns
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.config.hooks import rollout_id
from rlpipe.store.columns import hook_names

NOT_ESTIMATED = ("advantages", "returns")
"""Columns that an estimator computes, so a custom estimator does not get them."""


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
