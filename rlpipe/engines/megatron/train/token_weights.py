"""`step_weights`: the weight of every token in an optimizer step, fixed before packing.

A rank computes the weights of the samples that it holds, from the sizes of all samples of the step.
They do not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpipe.algorithms import custom
from rlpipe.algorithms.importance import Correction, correct
from rlpipe.algorithms.reduction import denominators, token_weights
from rlpipe.batch.columns import BatchColumns, gather_index
from rlpipe.config.algorithms import LossConfig


@dataclass(frozen=True, eq=False)
class StepWeights:
    """Weights of an optimizer step: arrays [R] of the held samples, 0 for other steps' tokens."""

    weight: np.ndarray
    """Weight of each token's loss in the sum."""
    policy_weight: np.ndarray | None
    """Weight of the surrogate, from a custom reducer. None: `weight`."""
    factor: np.ndarray | None
    """Off-policy factor, with `use_tis`. None also if the step corrects its own log-probs."""
    metrics: dict[str, float]
    """Metrics of the off-policy correction."""


def reads_whole_batch(loss: LossConfig, *, scored: bool) -> bool:
    """True if the weights of a token depend on other samples than by their sizes.

    `scored`: the batch has proximal log-probs. Then its correction is fixed before the step, with
    bounds and metrics over all samples. User functions get all samples of a step.
    """
    return bool(loss.hooks) or bool(loss.corrects and scored)


def step_weights(
    batch: BatchColumns, samples: np.ndarray, loss: LossConfig, hook_args: Any = None
) -> StepWeights:
    """Return weights and off-policy factors of the step that trains these samples.

    `batch`: the whole batch, or only some samples unless `reads_whole_batch`. `samples`: numbers of
    the step's samples on all ranks, int64, ascending. Without proximal log-probs in the batch the
    weights have no off-policy correction (`StepProximal`). Raises: DataError if a user function
    returns a wrong result.
    """
    held = batch.held(samples)
    own = batch.positions(samples[held])
    index = gather_index(batch.response_offsets, own)
    part = batch.select(own)
    correction = _correction(part, loss, hook_args)
    sizes = batch.sizes
    assert sizes.loss_tokens is not None
    in_loss = sizes.loss_tokens[samples]
    # Rejected tokens leave the denominator only with `renormalize_rejected`.
    counted = part.loss_mask
    remaining = in_loss
    kept: np.ndarray | None = correction.kept
    if loss.renormalize_rejected:
        counted = part.loss_mask * correction.kept
        kept = None
        if held.all():
            remaining = np.bincount(part.sample_of, counted, minlength=len(part))

    def weights(mask: np.ndarray, loss_tokens: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
        divisors = denominators(
            loss_tokens,
            per_token=loss.calculate_per_token_loss,
            constant_length=loss.constant_length,
            rollout=sizes.rollouts[samples],
        )
        return token_weights(mask, part.response_lengths, divisors[held], kept=kept)

    policy = None
    if path := loss.custom_pg_loss_reducer_function_path:
        policy = correction.kept * custom.reducer_weights(
            custom.load("custom_pg_loss_reducer_function_path", path),
            masks=part.split(counted),
            total_lengths=part.lengths,
            per_token=loss.calculate_per_token_loss,
            num_rollouts=len(np.unique(part.rollouts)),
        )
    # Metrics are averaged over all tokens of the loss mask, rejected tokens included.
    averaged = weights(part.loss_mask, in_loss, None).astype(np.float64)
    return StepWeights(
        weight=_scattered(weights(counted, remaining, kept), index, batch),
        policy_weight=None if policy is None else _scattered(policy, index, batch),
        factor=_scattered(correction.factor, index, batch)
        if loss.use_tis and batch.proximal_log_probs is not None
        else None,
        metrics={name: float(averaged @ column) for name, column in correction.metrics.items()},
    )


def mask_weights(batch: BatchColumns, samples: np.ndarray, loss: LossConfig) -> np.ndarray:
    """Return the weights [R] of a step without corrections, 0 for other steps' tokens.

    Arguments as `step_weights`.
    """
    sizes = batch.sizes
    assert sizes.loss_tokens is not None
    held = batch.held(samples)
    own = batch.positions(samples[held])
    index = gather_index(batch.response_offsets, own)
    divisors = denominators(
        sizes.loss_tokens[samples],
        per_token=loss.calculate_per_token_loss,
        constant_length=loss.constant_length,
        rollout=sizes.rollouts[samples],
    )
    weights = token_weights(batch.loss_mask[index], batch.response_lengths[own], divisors[held])
    return _scattered(weights, index, batch)


def _scattered(values: np.ndarray, index: np.ndarray, batch: BatchColumns) -> np.ndarray:
    result = np.zeros(batch.num_response_tokens, np.float32)
    result[index] = values
    return result


def _correction(part: BatchColumns, loss: LossConfig, hook_args: Any) -> Correction:
    if not loss.corrects or part.proximal_log_probs is None:
        return Correction(np.ones(part.num_response_tokens), np.ones(part.num_response_tokens))
    proximal_log_probs = part.proximal_log_probs
    rollout_log_probs = part.rollout_log_probs
    assert rollout_log_probs is not None
    if not (path := loss.custom_tis_function_path):
        lengths = part.response_lengths
        return correct(proximal_log_probs, rollout_log_probs, part.loss_mask, lengths, loss)
    return custom.custom_correction(
        custom.load("custom_tis_function_path", path),
        hook_args,
        proximal_log_probs=part.split(proximal_log_probs),
        rollout_log_probs=part.split(rollout_log_probs),
        masks=part.split(part.loss_mask),
        total_lengths=part.lengths,
    )
