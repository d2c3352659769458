"""Per-token losses. Pure functions of equally shaped tensors; `reduction` makes one number of them.

With Δ_t = ℓ_t - ℓ_old,t the surrogates differ in their ratio and in where the gradient flows:

    clip    ρ_t = exp(Δ_t)                     L = max(-ρ A, -clip(ρ, 1 - ε, 1 + ε_high) A)
    gspo    ρ = exp(mean of Δ over a sequence)  the same, the same ρ for all its tokens
    cispo   ρ_t = exp(Δ_t)                     L = -sg(clip(ρ, 1 - ε, 1 + ε_high)) A ℓ

sg: no gradient. Not here: aggregation, masks, and where the log-probs come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlpipe.algorithms.exponential import exp
from rlpipe.algorithms.sequences import Sequences


class PolicyLoss(NamedTuple):
    """Per token: the loss, whether the ratio was clipped, and -log ratio (an estimate of KL(old ‖
    new)), which two are without gradient."""

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

    Gradient flows through `log_probs` only. ε_high = ε if None; `eps_clip_c` None is off. Source:
    PPO arXiv 1707.06347 eq. 7; clip-higher DAPO arXiv 2503.14476; dual clip arXiv 1912.09729.
    """
    return _clipped(
        log_probs - old_log_probs.detach(), advantages, eps_clip, eps_clip_high, eps_clip_c
    )


def sequence_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """GSPO: the clipped surrogate with one ratio per sequence, the geometric mean of its tokens'.

    ρ = exp(1/M Σ_t m_t (ℓ_t - ℓ_old,t)) on every token of the sequence, M = Σ m; then as
    `policy_loss`.

    Tokens with mask 1 only. Averaged over a sequence's tokens it is the paper's sequence loss. A
    sample is a sequence: where a rollout fanned out into several, each has its own ratio. Source:
    arXiv 2507.18071. Its clip range is about 3e-4; slime leaves PPO's 0.2.
    """
    log_ratio = sequences.mean(log_probs - old_log_probs.detach())
    return _clipped(log_ratio, advantages, eps_clip, eps_clip_high, eps_clip_c)


def cispo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None,
) -> PolicyLoss:
    """CISPO: REINFORCE whose importance weight is clipped, so that no token loses its gradient.

    L = -sg(clip(ρ, 1 - ε, 1 + ε_high)) A ℓ,  ρ = exp(ℓ - ℓ_old);  ε ≥ 1 is no lower bound (the paper's), ε_high = ε if None.

    Source: MiniMax-M1, arXiv 2506.13585, which averages over all tokens of the group
    (calculate_per_token_loss).
    """
    log_ratio = (log_probs - old_log_probs).detach()
    ratio = exp(log_ratio)
    weight = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    return PolicyLoss(
        -weight * advantages * log_probs, (weight != ratio).to(log_probs.dtype), -log_ratio
    )


def off_policy_sequence_mask(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
    *,
    delta: float,
) -> torch.Tensor:
    """Off-policy sequence masking: 0 for bad tokens of a sequence that the policy has moved away
    from, else 1. No gradient.

    0 where A_t < 0 and 1/M Σ_t m_t (ℓ_old,t - ℓ_t) > δ.

    Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1. Denominators stay what they are.
    """
    away = sequences.mean((old_log_probs - log_probs).detach())
    return 1 - ((advantages < 0) & (away > delta)).to(log_probs.dtype)


def sft_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """L = -ℓ: the negative log-likelihood of the given token."""
    return -log_probs


def _clipped(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
) -> PolicyLoss:
    ratio = exp(log_ratio)
    plain = exp(log_ratio, -advantages)
    clipped = (
        -ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
        * advantages
    )
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (clipped > plain).to(loss.dtype), -log_ratio.detach())
