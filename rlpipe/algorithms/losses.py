"""Per-token policy and SFT losses: pure functions of tensors of equal shape.

With Δ_t = ℓ_t - ℓ_base,t the surrogates differ in the ratio and in the path of the gradient:

    clip    ρ_t = exp(Δ_t)                      L = max(-ρ A, -clip(ρ, 1 - ε, 1 + ε_high) A)
    gspo    ρ = exp(mean of Δ over a sequence)  the same, with one ρ for all tokens of the sequence
    cispo   ρ_t = exp(Δ_t)                      L = -sg(clip(ρ, 1 - ε, 1 + ε_high)) A ℓ

sg means no gradient. ℓ_base are the proximal log-probs, or the rollout log-probs under
`use_rollout_logprobs`. `reduction` weights the tokens, `objective` combines the terms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlpipe.algorithms.exponential import exp
from rlpipe.algorithms.sequences import Sequences


class PolicyLoss(NamedTuple):
    """Per token: the loss, 1 if the ratio was clipped, and -log ratio.

    `clipped` and `ppo_kl` have no gradient. `ppo_kl` is an estimate of KL(base ‖ policy).
    """

    loss: torch.Tensor
    clipped: torch.Tensor
    ppo_kl: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate per token.

    ρ = exp(ℓ - ℓ_base),  L = max(-ρ A, -clip(ρ, 1 - ε, 1 + ε_high) A);
    with dual clip c, where A < 0: L = min(L, -c A).

    Gradient flows through `log_probs` only. ε_high = ε if None. `eps_clip_c` None disables the dual
    clip. Source: PPO arXiv 1707.06347 eq. 7; clip-higher DAPO arXiv 2503.14476; dual clip arXiv
    1912.09729.
    """
    log_ratio = log_probs - base_log_probs.detach()
    return _clipped_loss(log_ratio, advantages, eps_clip, eps_clip_high, eps_clip_c)


def sequence_policy_loss(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """Return GSPO's loss: the clipped surrogate with one ratio per sequence.

    ρ = exp(1/M Σ_t m_t (ℓ_t - ℓ_base,t)) for every token of the sequence, M = Σ m; then as
    `policy_loss`.

    Takes tokens with mask 1 only. The mean over a sequence's tokens is the paper's sequence loss. A
    sample is a sequence: if a rollout fanned out into several samples, each has its own ratio.
    Source: arXiv 2507.18071. The paper's clip range is about 3e-4; slime keeps PPO's 0.2.
    """
    log_ratio = sequences.mean(log_probs - base_log_probs.detach())
    return _clipped_loss(log_ratio, advantages, eps_clip, eps_clip_high, eps_clip_c)


def cispo_loss(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None,
) -> PolicyLoss:
    """Return CISPO's loss: REINFORCE with a clipped importance weight.

    L = -sg(clip(ρ, 1 - ε, 1 + ε_high)) A ℓ,  ρ = exp(ℓ - ℓ_base).

    Every token keeps its gradient. ε ≥ 1 disables the lower bound, as in the paper; ε_high = ε if
    None. Source: MiniMax-M1, arXiv 2506.13585, which averages over all tokens of the group
    (calculate_per_token_loss).
    """
    log_ratio = (log_probs - base_log_probs).detach()
    ratio = exp(log_ratio)
    weight = _clip(ratio, eps_clip, eps_clip_high)
    clipped = (weight != ratio).to(log_probs.dtype)
    return PolicyLoss(-weight * advantages * log_probs, clipped, -log_ratio)


def off_policy_sequence_mask(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
    *,
    delta: float,
) -> torch.Tensor:
    """Return the off-policy sequence mask per token: 0 or 1, without gradient.

    0 where A_t < 0 and 1/M Σ_t m_t (ℓ_base,t - ℓ_t) > δ, else 1.

    Masked tokens still count in every denominator. Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1.
    """
    distance = sequences.mean((base_log_probs - log_probs).detach())
    return 1 - ((advantages < 0) & (distance > delta)).to(log_probs.dtype)


def sft_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each token: L = -ℓ."""
    return -log_probs


def _clipped_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
) -> PolicyLoss:
    ratio = exp(log_ratio)
    # -A goes into `exp` as a factor: the product can be finite where the ratio overflows.
    plain = exp(log_ratio, -advantages)
    clipped = -_clip(ratio, eps_clip, eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (clipped > plain).to(loss.dtype), -log_ratio.detach())


def _clip(ratio: torch.Tensor, low: float, high: float | None) -> torch.Tensor:
    return ratio.clamp(1 - low, 1 + (low if high is None else high))
