"""Weight every token so that the loss of an optimizer step is one weighted sum.

    loss = Σ_t w_t L_t   over all tokens of the optimizer step

w depends on the samples of the step only and is fixed before packing. Micro-batches and all kinds
of parallelism therefore leave the loss unchanged.

Legend: N samples of one optimizer step, B rollouts (one a sample, unless a rollout fanned out into
several samples), R response tokens, M_k sum of the loss mask over the samples of rollout k.
"""

from __future__ import annotations

import numpy as np


def denominators(
    loss_tokens: np.ndarray,
    *,
    per_token: bool = False,
    constant_length: int | None = None,
    rollout: np.ndarray | None = None,
) -> np.ndarray:
    """Return the divisor of every sample's tokens.

    default              B max(M_k, 1)   mean over rollouts of each token mean
    `per_token`          max(Σ M_k, 1)   mean over the counted tokens of the step
    `constant_length` C  B C             the same weight for every token

    `loss_tokens`: sums of the loss masks. `rollout`: samples with equal numbers share M_k and count
    once in B. None: each sample is its own rollout. The sums are of whole numbers, so their order
    does not change them.

    Shapes: loss_tokens, rollout [N]; returns [N] float64.
    Source: GRPO (arXiv 2402.03300), DAPO (arXiv 2503.14476), Dr.GRPO (arXiv 2503.20783). Means per
    rollout as in slime.
    """
    loss_tokens = np.asarray(loss_tokens, np.float64)
    num_samples = len(loss_tokens)
    if per_token:
        return np.full(num_samples, max(loss_tokens.sum(), 1.0))
    rollout_of_sample = (
        np.arange(num_samples) if rollout is None else np.unique(rollout, return_inverse=True)[1]
    )
    num_rollouts = int(rollout_of_sample.max(initial=-1)) + 1
    if constant_length is not None:
        return np.full(num_samples, float(num_rollouts * constant_length))
    totals = np.bincount(rollout_of_sample, loss_tokens, minlength=num_rollouts)
    return num_rollouts * np.maximum(totals, 1.0)[rollout_of_sample]


def token_weights(
    mask: np.ndarray,
    response_lengths: np.ndarray,
    divisors: np.ndarray,
    *,
    kept: np.ndarray | None = None,
) -> np.ndarray:
    """Return the weight of every response token: w = m / divisor of its sample.

    `divisors`: the samples' `denominators` among all samples of the step. `kept`: 0 for tokens
    without weight that still count in every denominator.

    Shapes: mask, kept [R] 0 or 1; response_lengths, divisors [N]; returns [R] float32.
    Raises: ValueError if the lengths do not add up to R.
    """
    mask = np.asarray(mask, np.float64)
    response_lengths = np.asarray(response_lengths)
    if response_lengths.sum() != len(mask):
        raise ValueError(
            f"response_lengths add up to {response_lengths.sum()} tokens, "
            f"expected as many as the mask of {len(mask)} tokens"
        )
    shares = mask if kept is None else mask * kept
    return (shares / np.repeat(divisors, response_lengths)).astype(np.float32)
