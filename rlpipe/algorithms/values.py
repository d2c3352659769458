"""A critic's part of PPO: generalised advantage estimation (NumPy, a stage of its own) and the
value loss (torch).

V_t is the critic's value of the state in which response token t is chosen: of prompt and response
up to t - 1. Rewards are per token too: whoever calls puts the sample's reward (and a KL penalty, if
there is one) on the tokens where it falls.

Legend: N samples, R response tokens of all of them, one sample after another. Not here: where
values come from (`engines.megatron.train.critic`), what a token's reward is, whitening.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Estimates(NamedTuple):
    """[R] float32 each: advantages for the policy, returns for the critic to learn."""

    advantages: np.ndarray
    returns: np.ndarray


class ValueLoss(NamedTuple):
    """Per token: the loss, and whether the clipped branch was the larger one (without gradient)."""

    loss: torch.Tensor
    clipped: torch.Tensor


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    response_lengths: np.ndarray,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    mask: np.ndarray | None = None,
) -> Estimates:
    """Generalised advantage estimation within each response.

    δ_t = r_t + γ V_{t+1} - V_t,  A_t = δ_t + γ λ A_{t+1},  R_t = A_t + V_t,  with V and A 0 after the last step.

    With `mask`, only tokens of mask 1 are steps: what a tool wrote is no action, so discounting and
    bootstrapping go over it, and a reward on such a token counts for the last step before it (for
    the first, if there is none). Where mask is 0, A = 0 and R = V. Without `mask` every token is a
    step, which is slime's. A truncated response ends like a finished one (slime's too).

    Shapes: rewards, values, mask [R]; response_lengths [N] int64. Computed in float64.
    Raises: ValueError if the shapes differ or a number is not finite.
    Source: arXiv 1506.02438 eq. 16-18.
    """
    rewards = np.asarray(rewards, np.float64)
    values = np.asarray(values, np.float64)
    lengths = np.asarray(response_lengths, np.int64)
    _check(rewards, values, lengths, mask)
    if mask is None:
        advantages = _backward(rewards, values, lengths, gamma, lambd)
        return Estimates(advantages.astype(np.float32), (advantages + values).astype(np.float32))
    steps = np.asarray(mask) > 0
    sample = np.repeat(np.arange(len(lengths)), lengths)
    taken = np.bincount(sample[steps], minlength=len(lengths))
    advantages = np.zeros(len(values))
    advantages[steps] = _backward(
        _on_steps(rewards, steps, sample, taken), values[steps], taken, gamma, lambd
    )
    return Estimates(advantages.astype(np.float32), (advantages + values).astype(np.float32))


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    value_clip: float | None,
) -> ValueLoss:
    """The critic's squared error, clipped around what it said before the iteration.

    L = max((V - R)², (clamp(V, V_old - c, V_old + c) - R)²),  c = `value_clip`; None: L = (V - R)².

    Any equal shapes; the gradient goes to `values`. Source: PPO as implemented by OpenAI's
    baselines (the paper, arXiv
    1707.06347 eq. 9, has no clipping). Its usual factor 1/2 is a coefficient of whoever reduces it.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return ValueLoss(plain, torch.zeros_like(plain))
    near = values.clamp(old_values - value_clip, old_values + value_clip)
    clipped = (near - returns).square()
    return ValueLoss(torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype))


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R) over tokens of mask 1: 1 is a perfect critic, 0 one that knows the
    mean only.

    Shapes: [R] each. 0 where the returns are all equal.
    """
    counted = np.asarray(mask) > 0
    targets = np.asarray(returns, np.float64)[counted]
    spread = float(targets.var()) if len(targets) else 0.0
    return (
        1.0 - float((targets - np.asarray(values, np.float64)[counted]).var()) / spread
        if spread > 0
        else 0.0
    )


def _check(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None
) -> None:
    shapes = {
        rewards.shape,
        values.shape,
        (int(lengths.sum()),),
        *(() if mask is None else (np.shape(mask),)),
    }
    if len(shapes) != 1:
        raise ValueError(
            f"rewards, values and mask must have one number per response token, found shapes {sorted(shapes)}"
        )
    for name, column in (("rewards", rewards), ("values", values)):
        if not np.isfinite(column).all():
            raise ValueError(f"{name}[{int(np.argmin(np.isfinite(column)))}] is not finite")


def _on_steps(
    rewards: np.ndarray, steps: np.ndarray, sample: np.ndarray, taken: np.ndarray
) -> np.ndarray:
    """The rewards of the steps, each with those of the tokens between it and the next."""
    first = np.cumsum(taken) - taken
    before = np.cumsum(steps) - 1
    step = np.maximum(before, first[sample])
    known = taken[sample] > 0
    return np.bincount(step[known], rewards[known], minlength=int(taken.sum()))


def _backward(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, lambd: float
) -> np.ndarray:
    """A of every step: all samples at once, from their ends to their beginnings."""
    advantages = np.zeros(len(rewards))
    ends = np.cumsum(lengths)
    order = np.argsort(-lengths, kind="stable")
    ends = ends[order]
    lengths = lengths[order]
    next_value = np.zeros(len(lengths))
    next_advantage = np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):
        alive = int(np.searchsorted(-lengths, -back, side="right"))
        at = ends[:alive] - back
        delta = rewards[at] + gamma * next_value[:alive] - values[at]
        next_advantage[:alive] = delta + gamma * lambd * next_advantage[:alive]
        next_value[:alive] = values[at]
        advantages[at] = next_advantage[:alive]
    return advantages
