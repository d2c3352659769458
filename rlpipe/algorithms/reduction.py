"""How per-token losses become one number: a weight per token, fixed before anything is packed.

loss = Σ_t w_t L_t over all tokens of the optimizer step. Because w depends only on the step's
samples, neither micro-batches nor any kind of parallelism can change the loss.

Legend: N samples of one optimizer step in B rollouts (each sample its own, unless a rollout fanned
out into several), R response tokens of all of them, M_k = Σ of the mask over the samples of rollout
k.
"""

from __future__ import annotations

import numpy as np


def token_weights(
    mask: np.ndarray,
    response_lengths: np.ndarray,
    *,
    per_token: bool = False,
    constant_length: int | None = None,
    rollout: np.ndarray | None = None,
    kept: np.ndarray | None = None,
) -> np.ndarray:
    """Weight of every response token.

    Default: the mean over rollouts of each one's masked token mean, w = m / (B max(M_k, 1)).
    `per_token`: the mean over all masked tokens of the step, w = m / max(Σ m, 1). `constant_length`
    C: every token the same weight, w = m / (B C), whatever the step's lengths. `rollout`: samples
    with equal numbers share M_k and count once in B; None: each sample for itself. `kept`: 0 for
    tokens that get no weight but still count in every denominator.

    Shapes: mask, kept [R] 0 or 1; response_lengths, rollout [N]; returns [R] float32. Raises:
    ValueError if the lengths do not add up to R. Source: GRPO's (arXiv 2402.03300), DAPO's (arXiv
    2503.14476), Dr.GRPO's (arXiv 2503.20783); per rollout as in slime.
    """
    mask = np.asarray(mask, np.float64)
    response_lengths = np.asarray(response_lengths)
    if response_lengths.sum() != len(mask):
        raise ValueError(f"responses of {response_lengths.sum()} tokens, but a mask of {len(mask)}")
    shares = mask if kept is None else mask * kept
    if per_token:
        return (shares / max(mask.sum(), 1.0)).astype(np.float32)
    numbers = (
        np.arange(len(response_lengths))
        if rollout is None
        else np.unique(rollout, return_inverse=True)[1]
    )
    owner = np.repeat(numbers, response_lengths)
    num_rollouts = int(numbers.max(initial=-1)) + 1
    if constant_length is not None:
        return (shares / (num_rollouts * constant_length)).astype(np.float32)
    totals = np.maximum(np.bincount(owner, mask, minlength=num_rollouts), 1.0)
    return (shares / (num_rollouts * totals[owner])).astype(np.float32)
