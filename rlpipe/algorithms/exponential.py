"""Exponentials with finite gradients wherever the exact gradient is finite.

exp(x) overflows float32 at x = 88.7. An infinite ratio is harmless if a clip, a mask or a zero
weight excludes it. Its gradient is not harmless: autograd multiplies the zero from the clip by
infinity, and 0 × ∞ is NaN.

Up to `SPLIT`, every result and every gradient is bit-identical to torch's own functions. Replays of
stored batches therefore give the same bits.
"""

from __future__ import annotations

import torch

SPLIT = 80.0
"""Above this exponent, exp(x) is computed as exp(SPLIT) × exp(x - SPLIT)."""


def exp(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return scale × exp(x), clamped to the dtype's range, with gradient.

    A product that fits the dtype is exact even if exp(x) alone overflows. The gradient is the exact
    gradient: infinite if it does not fit the dtype, 0 if the incoming gradient is 0.

    Any equal shapes; `scale` None means 1.
    """
    result: torch.Tensor = _Exp.apply(x, scale)  # pyright: ignore[reportAssignmentType]
    return result


def expm1(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) - 1, clamped to the dtype's largest number, with gradient."""
    # Above SPLIT the 1 is far below the last digit, so exp alone is exact.
    large = x > SPLIT
    return torch.where(large, exp(x), torch.expm1(torch.where(large, 0.0, x)))


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        largest = torch.finfo(x.dtype).max
        low = x.clamp(max=SPLIT).exp()
        # The excess is bounded to keep `high` finite: a zero gradient times `high` must be zero.
        high = (x - SPLIT).clamp(0, SPLIT if x.dtype == torch.float32 else 600.0).exp()
        ctx.save_for_backward(low, high, scale)
        product = high * low if scale is None else scale * high * low
        return product.clamp(-largest, largest)

    @staticmethod
    def backward(ctx, *gradients):
        low, high, scale = ctx.saved_tensors
        (incoming,) = gradients
        scaled = incoming if scale is None else incoming * scale
        scale_gradient = incoming * high * low if ctx.needs_input_grad[1] else None
        # Two factors instead of one product: `high * low` alone can be infinite.
        return scaled * high * low, scale_gradient
