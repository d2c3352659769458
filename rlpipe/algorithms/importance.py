"""Correction for tokens that other weights sampled: an importance weight per token.

With ℓ the trainer's log-prob before the iteration (proximal) and ℓ_roll the engine's when the token was sampled (behaviour):

    w = exp(ℓ - ℓ_roll)

The gap has two parts, and w corrects both: the engine computes a little otherwise than the trainer, and in asynchronous
training it sampled with weights that are up to S versions older. Times a clipped surrogate whose ratio is to ℓ, this is
decoupled PPO. Where engine and trainer agree w is 1 and nothing changes.

Not here: which tokens are too old to be trained at all (`rlpipe.batch`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Importance(NamedTuple):
    """Per token: the weight to multiply the loss with, the ratio it was cut from, and 1 where it was cut. Without gradient."""

    weight: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def truncated_importance(
    proximal: torch.Tensor, behaviour: torch.Tensor, *, tis_clip: float, tis_clip_low: float = 0.0
) -> Importance:
    """Truncated importance sampling (TIS).

    weight = clamp(w, tis_clip_low, tis_clip),  w = exp(ℓ - ℓ_roll)

    Any equal shapes. Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), as
    slime's `--use-tis`; with asynchronous training decoupled PPO, arXiv 2110.00641 and AReaL, arXiv 2505.24298.
    """
    ratio = (proximal.detach() - behaviour).exp()
    weight = ratio.clamp(tis_clip_low, tis_clip)
    return Importance(weight, ratio, (weight != ratio).to(ratio.dtype))
