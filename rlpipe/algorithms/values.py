"""Critic mathematics of PPO: generalised advantage estimation (NumPy) and the value loss (torch).

V_t is the critic's value of the state before response token t: of the prompt and the response up to
t - 1. Rewards are per token: the caller places the sample's reward and a KL penalty on tokens.

Legend: N samples, R response tokens of all samples, sample after sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Estimates(NamedTuple):
    """[R] float32 each: advantages for the policy, returns as targets of the critic."""

    advantages: np.ndarray
    returns: np.ndarray


class ValueLoss(NamedTuple):
    """Per token: the loss, and 1 if the clipped branch was larger (without gradient)."""

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
    """Return the generalised advantage estimates within each response.

    δ_t = r_t + γ V_{t+1} - V_t,  A_t = δ_t + γ λ A_{t+1},  R_t = A_t + V_t,
    with V and A 0 after the last step.

    With `mask`, only tokens of mask 1 are steps, because a tool's output is no action. Discounting
    and bootstrapping skip the other tokens. A reward on a skipped token counts for the last step
    before it, or for the first step if no step precedes it. Where mask is 0, A = 0 and R = V.
    Without `mask` every token is a step, as in slime. A truncated response ends like a finished
    one, as in slime.

    Shapes: rewards, values, mask [R]; response_lengths [N] int64. Computed in float64.
    Raises: ValueError if the shapes differ or a number is not finite.
    Source: arXiv 1506.02438 eq. 16-18.
    """
    rewards = np.asarray(rewards, np.float64)
    values = np.asarray(values, np.float64)
    lengths = np.asarray(response_lengths, np.int64)
    _check_columns(rewards, values, lengths, mask)
    if mask is None:
        advantages = _backward_pass(rewards, values, lengths, gamma, lambd)
    else:
        is_step = np.asarray(mask) > 0
        sample = np.repeat(np.arange(len(lengths)), lengths)
        num_steps = np.bincount(sample[is_step], minlength=len(lengths))
        step_rewards = _step_rewards(rewards, is_step, sample, num_steps)
        advantages = np.zeros(len(values))
        advantages[is_step] = _backward_pass(step_rewards, values[is_step], num_steps, gamma, lambd)
    return Estimates(advantages.astype(np.float32), (advantages + values).astype(np.float32))


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    value_clip: float | None,
) -> ValueLoss:
    """Return the critic's squared error, clipped around its values before the iteration.

    L = max((V - R)², (clamp(V, V_old - c, V_old + c) - R)²),  c = `value_clip`; None: L = (V - R)².

    Any equal shapes; gradient flows to `values`. The caller applies PPO's factor 1/2. Source: PPO
    as implemented by OpenAI's baselines (the paper, arXiv 1707.06347 eq. 9, does not clip).
    """
    plain = (values - returns).square()
    if value_clip is None:
        return ValueLoss(plain, torch.zeros_like(plain))
    limited = values.clamp(old_values - value_clip, old_values + value_clip)
    clipped = (limited - returns).square()
    return ValueLoss(torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype))


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """Return 1 - Var(R - V) / Var(R) over tokens of mask 1.

    1 for a perfect critic, 0 for a critic that predicts the mean, 0 if all returns are equal.

    Shapes: [R] each.
    """
    counted = np.asarray(mask) > 0
    targets = np.asarray(returns, np.float64)[counted]
    spread = float(targets.var()) if len(targets) else 0.0
    if spread <= 0:
        return 0.0
    errors = targets - np.asarray(values, np.float64)[counted]
    return 1.0 - float(errors.var()) / spread


def _check_columns(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None
) -> None:
    shapes = {rewards.shape, values.shape, (int(lengths.sum()),)}
    if mask is not None:
        shapes.add(np.shape(mask))
    if len(shapes) != 1:
        raise ValueError(
            "rewards, values and mask must have one number per response token, "
            f"found shapes {sorted(shapes)}"
        )
    for name, column in (("rewards", rewards), ("values", values)):
        if not np.isfinite(column).all():
            raise ValueError(f"{name}[{int(np.argmin(np.isfinite(column)))}] is not finite")


def _step_rewards(
    rewards: np.ndarray, is_step: np.ndarray, sample: np.ndarray, num_steps: np.ndarray
) -> np.ndarray:
    """Return the rewards of the steps, each with the rewards of tokens up to the next step."""
    first_step = np.cumsum(num_steps) - num_steps
    last_step_before = np.cumsum(is_step) - 1
    step_of_token = np.maximum(last_step_before, first_step[sample])
    has_steps = num_steps[sample] > 0
    return np.bincount(step_of_token[has_steps], rewards[has_steps], minlength=int(num_steps.sum()))


def _backward_pass(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, lambd: float
) -> np.ndarray:
    """Return A of every step, computed from the last step of each sample to the first."""
    advantages = np.zeros(len(rewards))
    # One vectorised step per position, counted from the end; longest samples first, so the samples
    # that reach a position are a prefix.
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths)[order]
    lengths = lengths[order]
    next_value = np.zeros(len(lengths))
    next_advantage = np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):
        active = int(np.searchsorted(-lengths, -back, side="right"))
        step = ends[:active] - back
        delta = rewards[step] + gamma * next_value[:active] - values[step]
        next_advantage[:active] = delta + gamma * lambd * next_advantage[:active]
        next_value[:active] = values[step]
        advantages[step] = next_advantage[:active]
    return advantages
