"""How per-token losses become one number: a weight per token, fixed before anything is packed.

loss = Σ_t w_t L_t over all tokens of the optimizer step. Because w depends only on the step's samples, neither micro-batches
nor any kind of parallelism can change the loss.

Legend: N samples of one optimizer step, R response tokens of all of them.
"""

from __future__ import annotations

import numpy as np


def token_weights(mask: np.ndarray, response_lengths: np.ndarray, *, per_token: bool) -> np.ndarray:
    """Weight of every response token.

    Default: the mean over samples of each sample's masked token mean, w = m / (N max(M_i, 1)), M_i = Σ m of sample i.
    `per_token`: the mean over all masked tokens of the step, w = m / max(Σ m, 1).

    Shapes: mask [R] 0 or 1; response_lengths [N]; returns [R] float32.
    Raises: ValueError if the lengths do not add up to R.
    Source: the first is GRPO's (arXiv 2402.03300), the second DAPO's (arXiv 2503.14476).
    """
    mask, response_lengths = np.asarray(mask, np.float64), np.asarray(response_lengths)
    if response_lengths.sum() != len(mask):
        raise ValueError(f"responses of {response_lengths.sum()} tokens, but a mask of {len(mask)}")
    if per_token:
        return (mask / max(mask.sum(), 1.0)).astype(np.float32)
    sample = np.repeat(np.arange(len(response_lengths)), response_lengths)
    totals = np.maximum(np.bincount(sample, mask, minlength=len(response_lengths)), 1.0)
    return (mask / (len(response_lengths) * totals[sample])).astype(np.float32)
