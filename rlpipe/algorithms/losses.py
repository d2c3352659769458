"""Per-token losses. Pure functions of equally shaped tensors; `reduction` makes one number of them.

Not here: aggregation, masks, and where the log-probs come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PolicyLoss(NamedTuple):
    """Per token: the loss, whether the clipped branch was the larger one, and -log ratio (an estimate of KL(old ‖ new))."""

    loss: torch.Tensor
    clipped: torch.Tensor
    ppo_kl: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate.

    ρ = exp(ℓ - ℓ_old),  L = max(-ρ A, -clip(ρ, 1 - ε, 1 + ε_high) A);  with dual clip c, where A < 0: L = min(L, -c A).

    Gradient flows through `log_probs` only. ε_high = ε if None; `eps_clip_c` None is off.
    Source: PPO arXiv 1707.06347 eq. 7; clip-higher DAPO arXiv 2503.14476; dual clip arXiv 1912.09729.
    """
    log_ratio = log_probs - old_log_probs.detach()
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high)) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (clipped > plain).to(loss.dtype), -log_ratio.detach())


def sft_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """L = -ℓ: the negative log-likelihood of the given token."""
    return -log_probs
