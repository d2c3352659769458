"""Fused pointwise operations of a layer: `rms_norm`, `swiglu` and `query_key_value`.

Each is one operation with its own backward pass. On CUDA they run the kernels of `kernels`,
elsewhere the same formulas in torch. Within `recomputed_for_backward`, a matrix product does not
save the result of a norm or SwiGLU that it reads. The backward pass recomputes the result from the
norm's or SwiGLU's own input, which is saved anyway.

Legend: L tokens, H hidden size, F feed-forward size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rlpipe.engines.megatron import platform

if platform.CUDA_FOUND:
    from rlpipe.engines.megatron.model import kernels
else:
    kernels: Any = None

# Attribute of a tensor: the function that recomputes it.
_RECOMPUTE = "rlpipe_recompute"


@contextmanager
def recomputed_for_backward(result: torch.Tensor) -> Iterator[None]:
    """Do not save `result`, of `rms_norm` or `swiglu`, for backward passes within the context.

    Other tensors are saved as usual.
    """
    recompute: Callable[[], torch.Tensor] | None = getattr(result, _RECOMPUTE, None)
    if recompute is None or not torch.is_grad_enabled():
        yield
        return

    # The hooks live as long as the saved tensors, so they must not refer to the result itself.
    address = result.data_ptr()
    size = result.numel()

    def pack(saved: torch.Tensor) -> Any:
        is_result = saved.data_ptr() == address and saved.numel() == size
        return partial(_reshaped, recompute, saved.shape) if is_result else saved

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed()

    with saved_tensors_hooks(pack, unpack):
        yield


def _reshaped(recompute: Callable[[], torch.Tensor], shape: torch.Size) -> torch.Tensor:
    return recompute().view(shape)


def _recomputable(
    result: torch.Tensor, function: Callable[..., torch.Tensor], *arguments: Any
) -> torch.Tensor:
    """Attach to `result` the function that recomputes it."""
    if torch.is_grad_enabled():
        detached = [
            value.detach() if isinstance(value, torch.Tensor) else value for value in arguments
        ]
        setattr(result, _RECOMPUTE, partial(function, *detached))
    return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean x² + eps) · weight over the last dimension. `weight` [H]."""
    result: Any = _RMSNorm.apply(x, weight, eps)
    return _recomputable(result, _norm, x, weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if kernels is None:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return kernels.rms_norm(_rows(x), weight, eps).view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows, as the kernels need them.

    A slice of a larger tensor's last dimension is not contiguous.
    """
    return x.reshape(-1, x.shape[-1]).contiguous()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps)

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        function = _norm_backward if kernels is None else kernels.rms_norm_backward
        of_x, of_weight = function(_rows(grads[0]), _rows(x), weight, ctx.eps)
        return of_x.view(x.shape), of_weight, None


def _norm_backward(grad, x, weight, eps):
    values = x.float()
    incoming = grad.float()
    scale = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    normal = values * scale
    of_weight = (incoming * normal).sum(0)
    incoming = incoming * weight.float()
    of_x = scale * (incoming - normal * (incoming * normal).mean(-1, keepdim=True))
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """Return silu(a) · b [..., F] of `both` = (a, b) [..., 2 F]."""
    result: Any = _SwiGLU.apply(both)
    return _recomputable(result, _gated, both)


def _gated(both: torch.Tensor) -> torch.Tensor:
    if kernels is None:
        gate, linear = both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * linear
    return kernels.swiglu(_rows(both)).view(*both.shape[:-1], -1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        return _gated(both)

    @staticmethod
    def backward(ctx, *grads):
        (both,) = ctx.saved_tensors
        function = _gated_backward if kernels is None else kernels.swiglu_backward
        return function(_rows(grads[0]), _rows(both)).view(both.shape)


def _gated_backward(grad: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    gate, linear = both.float().chunk(2, -1)
    incoming = grad.float()
    sigmoid = gate.sigmoid()
    of_gate = incoming * linear * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, incoming * gate * sigmoid], -1).to(both.dtype)


def query_key_value(
    mixed: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split queries [L, heads, D], keys and values [L, groups, D] of the mixed projection.

    Queries and keys are normalised per head (`rms_norm`, if there are weights [D]) and rotated by
    their positions: (a, b) → (a cos - b sin, b cos + a sin). Values may alias `mixed`.

    Shapes: mixed [L, groups, (heads / groups + 2) × D]; cosine and sine [L, D / 2].
    """
    result: Any = _QueryKeyValue.apply(mixed, query_weight, key_weight, cosine, sine, eps)
    return result


class _QueryKeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, query_weight, key_weight, cosine, sine, eps):
        size = 2 * cosine.shape[1]
        group = mixed.shape[2] // size - 2
        ctx.save_for_backward(mixed, query_weight, key_weight, cosine, sine)
        ctx.eps = eps
        ctx.parts = ((group, 0), (1, group * size))
        function = _heads if kernels is None else kernels.heads
        query, key = (
            function(mixed, weight, cosine, sine, group=number, offset=offset, eps=eps)
            for weight, (number, offset) in zip((query_weight, key_weight), ctx.parts, strict=True)
        )
        return query, key, mixed[..., (group + 1) * size :]

    @staticmethod
    def backward(ctx, *grads):
        mixed, *weights, cosine, sine = ctx.saved_tensors
        function = _heads_backward if kernels is None else kernels.heads_backward
        out = torch.empty_like(mixed)
        out[..., -grads[2].shape[-1] :] = grads[2]
        of_weights = [
            function(
                grad.contiguous(),
                mixed,
                weight,
                cosine,
                sine,
                out,
                group=number,
                offset=offset,
                eps=ctx.eps,
            )
            for grad, weight, (number, offset) in zip(grads, weights, ctx.parts, strict=False)
        ]
        return out, *of_weights, None, None, None


def _halves(mixed: torch.Tensor, group: int, offset: int, half: int) -> torch.Tensor:
    """Return a view [L, groups, group, 2, D / 2] of the heads at `offset`."""
    part = mixed[..., offset : offset + group * 2 * half]
    return part.unflatten(-1, (group, 2, half))


def _heads(mixed, weight, cosine, sine, *, group: int, offset: int, eps: float) -> torch.Tensor:
    half = cosine.shape[1]
    part = _halves(mixed, group, offset, half).float()
    if weight is not None:
        part = (
            part
            * (part.square().mean((-2, -1), keepdim=True) + eps).rsqrt()
            * weight.float().view(2, half)
        )
    first, second = part.unbind(-2)
    cos = cosine[:, None, None]
    sin = sine[:, None, None]
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], -2)
    return rotated.to(mixed.dtype).view(len(mixed), -1, 2 * half)


def _heads_backward(
    grad, mixed, weight, cosine, sine, out, *, group: int, offset: int, eps: float
) -> torch.Tensor | None:
    half = cosine.shape[1]
    first, second = grad.float().view(*mixed.shape[:2], group, 2, half).unbind(-2)
    cos = cosine[:, None, None]
    sin = sine[:, None, None]
    of_weight = None
    incoming = torch.stack([first * cos + second * sin, second * cos - first * sin], -2)
    if weight is not None:
        part = _halves(mixed, group, offset, half).float()
        scale = (part.square().mean((-2, -1), keepdim=True) + eps).rsqrt()
        normal = part * scale
        of_weight = (incoming * normal).sum((0, 1, 2)).flatten().to(weight.dtype)
        incoming = incoming * weight.float().view(2, half)
        incoming = scale * (incoming - normal * (incoming * normal).mean((-2, -1), keepdim=True))
    _halves(out, group, offset, half).copy_(incoming)
    return of_weight
