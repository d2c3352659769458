"""Per-token estimates of KL(π ‖ π_ref) from the sampled tokens' log-probs.

With d = ℓ - ℓ_ref on tokens drawn from π:

    k1 = d                     unbiased, can be negative
    k2 = d² / 2                biased, low variance; its gradient is that of the KL
    k3 = exp(-d) - 1 + d       unbiased, never negative
    low_var_kl = k3 clamped to [-10, 10]

Source: Schulman, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch


def kl_estimate(
    log_probs: torch.Tensor, reference: torch.Tensor, kind: str, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """The estimate named `kind` (k1, k2, k3, low_var_kl), any equal shapes, with gradient.

    With `importance` = π / π_old (with its gradient) the estimate is multiplied by it, before low_var_kl's clamp: tokens that
    older weights sampled then estimate the KL of the current ones, and its gradient, without bias (DeepSeek-V3.2,
    arXiv 2512.02556 §3.1, with k3).

    Raises: ValueError for another name.
    """
    d = log_probs - reference
    match kind:
        case "k1":
            estimate = d
        case "k2":
            estimate = d.square() / 2
        case "k3" | "low_var_kl":
            estimate = torch.expm1(-d) + d
        case _:
            raise ValueError(f"kl_loss_type: found {kind!r}, expected one of k1, k2, k3, low_var_kl")
    if importance is not None:
        estimate = estimate * importance
    return estimate.clamp(-10, 10) if kind == "low_var_kl" else estimate
