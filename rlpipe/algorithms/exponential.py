"""Exponentials that keep gradients finite wherever the exact gradient is finite.

exp(x) overflows float32 at x = 88.7. An infinite ratio is harmless where a clip, a mask or a zero
weight leaves it out. Its gradient is not: autograd multiplies the zero that comes from the clip
with infinity, and 0 × ∞ is NaN.

Up to `SPLIT` every result and every gradient has the same bits as torch's own functions, so replays
of stored batches agree.
"""

from __future__ import annotations

import torch

SPLIT = 80.0
"""Above this exponent exp(x) is computed as exp(SPLIT) × exp(x - SPLIT)."""


def exp(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """scale × exp(x), at most the dtype's largest number, with gradient.

    A product that fits into the dtype is exact even where exp(x) alone does not fit. The gradient
    is the exact one: it is infinite where it does not fit into the dtype, and 0 where the incoming
    gradient is 0.

    Any equal shapes; `scale` None is 1.
    """
    result: torch.Tensor = _Exp.apply(x, scale)  # pyright: ignore[reportAssignmentType]
    return result


def expm1(x: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1, at most the dtype's largest number. Above `SPLIT` the 1 is far below the last
    digit."""
    large = x > SPLIT
    return torch.where(large, exp(x), torch.expm1(torch.where(large, 0.0, x)))


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        largest = torch.finfo(x.dtype).max
        low = x.clamp(max=SPLIT).exp()
        # The excess is bounded so that `high` is finite: a zero gradient times `high` must be zero.
        high = (x - SPLIT).clamp(0, SPLIT if x.dtype == torch.float32 else 600.0).exp()
        ctx.save_for_backward(low, high, scale)
        product = high * low if scale is None else scale * high * low
        return product.clamp(-largest, largest)

    @staticmethod
    def backward(ctx, *gradients):
        low, high, scale = ctx.saved_tensors
        (incoming,) = gradients
        scaled = incoming if scale is None else incoming * scale
        of_scale = incoming * high * low if ctx.needs_input_grad[1] else None
        return scaled * high * low, of_scale
