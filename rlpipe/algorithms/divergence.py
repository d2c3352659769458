"""Estimate KL(π ‖ π_ref) per token from the log-probs of the sampled tokens.

With d = ℓ - ℓ_ref on tokens sampled from π:

    k1 = d                     unbiased, can be negative
    k2 = d² / 2                biased, low variance; its gradient is the gradient of the KL
    k3 = exp(-d) - 1 + d       unbiased, never negative
    low_var_kl = k3 clamped to [-10, 10]

Entry points: `kl_estimate`, and `unbiased_kl` for tokens that older weights sampled.

Source: Schulman, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch

from rlpipe.algorithms.exponential import SPLIT, exp, expm1

FAR_BELOW = -4.0
"""Below this d, `unbiased_kl` uses the closed-form gradient of k3.

Autograd's gradient has a relative error of 1e-6 at this d and a larger error below it.
"""


def kl_estimate(
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor,
    kind: str,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the KL estimate of each token, with gradient.

    With `importance`, the estimate is multiplied by it before the clamp of low_var_kl. Autograd
    adds the gradients of `log_probs` and `importance`. If importance = π / π_base, use
    `unbiased_kl`, which is exact.

    Any equal shapes; `kind` is k1, k2, k3 or low_var_kl. Raises: ValueError for another kind.
    """
    d = log_probs - reference_log_probs
    match kind:
        case "k1":
            estimate = d
        case "k2":
            estimate = d.square() / 2
        case "k3" | "low_var_kl":
            estimate = expm1(-d) + d
        case _:
            raise ValueError(
                f"kl_loss_type: found {kind!r}, expected one of k1, k2, k3, low_var_kl"
            )
    if importance is not None:
        estimate = estimate * importance
    return estimate.clamp(-10, 10) if kind == "low_var_kl" else estimate


def unbiased_kl(
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """Return the KL estimate k times the ratio ρ, with the gradient of both factors.

    ρ = π / π_base = exp(ℓ - ℓ_base);  the gradient is ρ (k + k'), which is ρ d for k3.

    With this factor, tokens that older weights sampled estimate the KL of the current weights
    without bias, and so does the gradient.

    Any equal shapes; kinds as in `kl_estimate`. Raises: ValueError for another kind.
    Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1, with k3.
    """
    log_ratio = log_probs - base_log_probs
    d = log_probs - reference_log_probs
    is_k3 = kind in ("k3", "low_var_kl")
    # Autograd adds ρ k and ρ k', which cancel for k3: at d = -18 float32 keeps no digit of the sum.
    # Where ρ overflows the sum is ∞ - ∞. Both cases use the closed form of _TimesRatio.
    extreme = (log_ratio > SPLIT) | (d < FAR_BELOW) if is_k3 else log_ratio > SPLIT
    # Extreme tokens get harmless inputs in the plain product, so that 0 × ∞ cannot arise.
    plain_ratio = torch.where(extreme, 0.0, log_ratio)
    plain_d = torch.where(extreme, 0.0, d)
    plain = kl_estimate(plain_d, torch.zeros_like(d), "k3" if is_k3 else kind) * exp(plain_ratio)
    exact: torch.Tensor = _TimesRatio.apply(log_probs, reference_log_probs, base_log_probs, kind)  # pyright: ignore[reportAssignmentType]
    estimate = torch.where(extreme, exact, plain)
    return estimate.clamp(-10, 10) if kind == "low_var_kl" else estimate


class _TimesRatio(torch.autograd.Function):
    """k ρ of an estimate, with the closed-form gradient ρ (k + k')."""

    @staticmethod
    def forward(ctx, log_probs, reference_log_probs, base_log_probs, kind):
        d = log_probs - reference_log_probs
        log_ratio = log_probs - base_log_probs
        if kind == "k1":
            value = d
            slope = 1 + d
        elif kind == "k2":
            value = d.square() / 2
            slope = d + d.square() / 2
        else:
            value = expm1(-d) + d
            slope = d
        ctx.save_for_backward(log_ratio, slope)
        product = exp(log_ratio, value)
        if kind in ("k3", "low_var_kl"):
            # exp(-d) overflows before the product does. exp(-d) ρ = exp(ℓ_ref - ℓ_base), and the
            # remaining factor is below 1.
            low = d.clamp(max=FAR_BELOW)
            product = torch.where(
                d < FAR_BELOW,
                exp(reference_log_probs - base_log_probs, 1 + (low - 1) * low.exp()),
                product,
            )
        return product

    @staticmethod
    def backward(ctx, *gradients):
        log_ratio, slope = ctx.saved_tensors
        return exp(log_ratio, gradients[0] * slope), None, None, None
