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

from rlpipe.algorithms.exponential import SPLIT, exp, expm1

FAR_BELOW = -4.0
"""Log-prob minus reference below which `unbiased_kl` gives the gradient of k3 itself.

Autograd's has a relative error of 1e-6 there and a larger one below.
"""


def kl_estimate(
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    kind: str,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The estimate named `kind` (k1, k2, k3, low_var_kl), any equal shapes, with gradient.

    With `importance` the estimate is multiplied by it, before low_var_kl's clamp. Gradients of
    `log_probs` and of `importance` are added by autograd: where importance = π / π_old,
    `unbiased_kl` is the exact form.

    Raises: ValueError for another name.
    """
    d = log_probs - reference
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
    log_probs: torch.Tensor, reference: torch.Tensor, base: torch.Tensor, kind: str
) -> torch.Tensor:
    """The estimate k named `kind` times ρ = π / π_old = exp(ℓ - ℓ_old), with the gradient of both;
    `base` is ℓ_old.

    Tokens that older weights sampled then estimate the KL of the current ones, and its gradient,
    without bias.

    The gradient is ρ (k + k'), which is ρ d for k3. Autograd adds ρ k and ρ k', which cancel there:
    at d = -18 float32 keeps none of the sum's digits, and where ρ overflows the sum is ∞ - ∞. In
    both cases the exact gradient is given.

    Raises: ValueError for another name. Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1, with k3.
    """
    log_ratio = log_probs - base
    d = log_probs - reference
    is_k3 = kind in ("k3", "low_var_kl")
    extreme = (log_ratio > SPLIT) | (d < FAR_BELOW) if is_k3 else log_ratio > SPLIT
    # Tokens at which the plain product is not used get harmless numbers there, so that no 0 × ∞
    # arises.
    plain_ratio = torch.where(extreme, 0.0, log_ratio)
    plain_d = torch.where(extreme, 0.0, d)
    plain = kl_estimate(plain_d, torch.zeros_like(d), "k3" if is_k3 else kind) * exp(plain_ratio)
    exact: torch.Tensor = _TimesRatio.apply(log_probs, reference, base, kind)  # pyright: ignore[reportAssignmentType]
    estimate = torch.where(extreme, exact, plain)
    return estimate.clamp(-10, 10) if kind == "low_var_kl" else estimate


class _TimesRatio(torch.autograd.Function):
    """k ρ of an estimate, with the gradient ρ (k + k')."""

    @staticmethod
    def forward(ctx, log_probs, reference, base, kind):
        d = log_probs - reference
        log_ratio = log_probs - base
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
            # exp(-d) overflows before the product does: exp(-d) ρ = exp(ℓ_ref - ℓ_old), and the
            # rest is a factor below 1.
            low = d.clamp(max=FAR_BELOW)
            product = torch.where(
                d < FAR_BELOW, exp(reference - base, 1 + (low - 1) * low.exp()), product
            )
        return product

    @staticmethod
    def backward(ctx, *gradients):
        log_ratio, slope = ctx.saved_tensors
        return exp(log_ratio, gradients[0] * slope), None, None, None
