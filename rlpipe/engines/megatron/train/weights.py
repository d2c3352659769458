"""What an optimizer step's tokens are weighted with, fixed before anything is packed: the same on
every rank.

Not here: the losses that are weighted (`algorithms.objective`), packing and ranks (`step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpipe.algorithms import custom
from rlpipe.algorithms.importance import Correction, correct
from rlpipe.algorithms.reduction import token_weights
from rlpipe.batch.packing import BatchColumns, gather_index
from rlpipe.config.algorithms import LossConfig


@dataclass(frozen=True, eq=False)
class StepWeights:
    """What is fixed for an optimizer step before anything is packed: [R] each, 0 for tokens of
    other steps."""

    samples: np.ndarray
    """int64, ascending."""
    weight: np.ndarray
    policy_weight: np.ndarray | None
    factor: np.ndarray | None
    metrics: dict[str, float]
    """Of the correction."""


def prepare(
    batch: BatchColumns, samples: np.ndarray, loss: LossConfig, hook_args: Any = None
) -> StepWeights:
    """Weights and off-policy factors of the step that trains these samples (int64, ascending).

    Raises: DataError if a function of the user answers what it must not.
    """
    index = gather_index(batch.response_offsets, samples)
    part = batch.select(samples)
    correction = _correction(part, loss, hook_args)
    counted = part.loss_mask * correction.kept if loss.renormalize_rejected else part.loss_mask
    kept = None if loss.renormalize_rejected else correction.kept
    aggregation = {
        "per_token": loss.calculate_per_token_loss,
        "constant_length": loss.constant_length,
    }

    def weights(mask: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
        return token_weights(
            mask, part.response_lengths, **aggregation, rollout=part.rollouts, kept=kept
        )

    averaged = weights(part.loss_mask, None).astype(np.float64)
    policy = None
    if path := loss.custom_pg_loss_reducer_function_path:
        policy = correction.kept * custom.reducer_weights(
            custom.load("custom_pg_loss_reducer_function_path", path),
            masks=part.split(counted),
            total_lengths=part.lengths,
            per_token=loss.calculate_per_token_loss,
            num_rollouts=len(np.unique(part.rollouts)),
        )
    return StepWeights(
        samples=samples,
        weight=_spread(weights(counted, kept), index, batch),
        policy_weight=None if policy is None else _spread(policy, index, batch),
        factor=_spread(correction.factor, index, batch) if loss.use_tis else None,
        metrics={name: float(averaged @ column) for name, column in correction.metrics.items()},
    )


def _spread(values: np.ndarray, index: np.ndarray, batch: BatchColumns) -> np.ndarray:
    result = np.zeros(batch.num_response_tokens, np.float32)
    result[index] = values
    return result


def _correction(part: BatchColumns, loss: LossConfig, hook_args: Any) -> Correction:
    if not loss.corrects:
        return Correction(np.ones(part.num_response_tokens), np.ones(part.num_response_tokens))
    proximal = part.proximal_log_probs
    behaviour = part.rollout_log_probs
    assert proximal is not None
    assert behaviour is not None
    if not (path := loss.custom_tis_function_path):
        return correct(proximal, behaviour, part.loss_mask, part.response_lengths, loss)
    return custom.custom_correction(
        custom.load("custom_tis_function_path", path),
        hook_args,
        proximal=part.split(proximal),
        behaviour=part.split(behaviour),
        masks=part.split(part.loss_mask),
        total_lengths=part.lengths,
    )
