"""From rewards to advantages: per sample, then per token.

NumPy, because this is a stage of its own on rows of a store. Legend: N samples, R response tokens of all of them.
Not here: which groups are in the batch, and the log-probs of any model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpipe.config.algorithms import AdvantageConfig


def group_relative(
    rewards: np.ndarray, group: np.ndarray, *, center: bool = True, scale_by_std: bool, eps: float = 1e-6
) -> np.ndarray:
    """Advantage of each sample relative to its group.

    A_i = (r_i - mean_g) / (std_g + eps),  g = group of i, unbiased std.

    A group of one has no deviation: it is not divided. Without `center` the reward itself is returned.
    Shapes: rewards [N] float; group [N] int64, any numbers; returns [N] float32.
    Raises: ValueError if the shapes differ or a reward is not finite.
    Source: GRPO, arXiv 2402.03300 eq. 3 (which leaves the deviation's n - 1 and eps open; slime has both); without
    `scale_by_std` Dr. GRPO, arXiv 2503.20783.
    """
    rewards, group = np.asarray(rewards, np.float64), np.asarray(group)
    if rewards.shape != group.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and group {group.shape} must be one number per sample")
    if not np.isfinite(rewards).all():
        raise ValueError(f"reward of sample {int(np.argmin(np.isfinite(rewards)))} is not finite")
    if not center:
        return rewards.astype(np.float32)
    _, member, count = np.unique(group, return_inverse=True, return_counts=True)
    centered = rewards - (np.bincount(member, rewards) / count)[member]
    if scale_by_std:
        variance = np.bincount(member, centered**2) / np.maximum(count - 1, 1)
        centered = np.where(count[member] > 1, centered / (np.sqrt(variance)[member] + eps), centered)
    return centered.astype(np.float32)


def token_advantages(
    rewards: np.ndarray, group_ids: Sequence[str] | np.ndarray, response_lengths: np.ndarray, config: AdvantageConfig
) -> np.ndarray | None:
    """The `advantages` column: each sample's advantage on every token of its response; None for estimator `none`.

    Shapes: rewards [N]; group_ids N names; response_lengths [N]; returns [R] float32.
    """
    if config.advantage_estimator == "none":
        return None
    _, group = np.unique(np.asarray(group_ids), return_inverse=True)
    per_sample = group_relative(rewards, group, center=config.rewards_normalization, scale_by_std=config.grpo_std_normalization)
    return np.repeat(per_sample, response_lengths)
