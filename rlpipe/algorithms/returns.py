"""Rewards per token, and their discounted sums, of ragged responses. NumPy, float64.

Legend: N samples, R response tokens of all of them, one sample after another.
Not here: values and GAE (`values`), baselines (`advantages`).
"""

from __future__ import annotations

import numpy as np


def outcome_rewards(rewards: np.ndarray, lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Each sample's reward on its last token of mask 1, and 0 elsewhere. A sample without such a
    token gets none.

    Shapes: rewards [N]; lengths [N]; mask [R]; returns [R].
    Source: slime's REINFORCE++ (which stops with an assertion at a sample that is wholly masked).
    """
    rewards = np.asarray(rewards, np.float64)
    lengths = np.asarray(lengths, np.int64)
    result = np.zeros(len(mask))
    at = np.flatnonzero(np.asarray(mask) > 0)
    ends = np.cumsum(lengths)
    last = np.searchsorted(at, ends) - 1
    there = last >= np.searchsorted(at, ends - lengths)
    result[at[last[there]]] = rewards[there]
    return result


def discounted_returns(
    rewards: np.ndarray, lengths: np.ndarray, *, gamma: float, steps: np.ndarray
) -> np.ndarray:
    """G_t = ρ_t + γ G_{t+1} within each response; where `steps` is 0 time stands still: G_t = ρ_t +
    G_{t+1}.

    Shapes: rewards, steps [R]; lengths [N]; returns [R].
    """
    rewards = np.asarray(rewards, np.float64)
    lengths = np.asarray(lengths, np.int64)
    factor = np.where(np.asarray(steps) > 0, gamma, 1.0)
    returns = np.zeros(len(rewards))
    ends = np.cumsum(lengths)
    order = np.argsort(-lengths, kind="stable")
    ends = ends[order]
    lengths = lengths[order]
    following = np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):
        alive = int(np.searchsorted(-lengths, -back, side="right"))
        at = ends[:alive] - back
        following[:alive] = rewards[at] + factor[at] * following[:alive]
        returns[at] = following[:alive]
    return returns
