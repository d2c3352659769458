"""Token weights of a step whose samples are all here."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlpipe.algorithms import reduction


def token_weights(
    mask: np.ndarray, lengths: np.ndarray, *, kept: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """The weights [R]; `options` as of `denominators`."""
    sample = np.repeat(np.arange(len(lengths)), lengths)
    loss_tokens = np.bincount(sample, mask, minlength=len(lengths))
    divisors = reduction.denominators(loss_tokens, **options)
    return reduction.token_weights(mask, lengths, divisors, kept=kept)
