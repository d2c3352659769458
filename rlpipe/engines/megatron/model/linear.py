"""Weight gradients that a matrix product adds to Megatron's buffer.

    main_grad += gradᵀ x,    y = x Wᵀ

Megatron makes a 16-bit gradient of each weight and adds it to its float32 buffer, unless apex is
installed. Here, one product sums in float32 and stores in the buffer: one rounding and two passes
over memory less for each weight and micro-batch. Megatron's layers call `linear` through
`with_fused_gradients`, an import repair of `platform`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import all_reduce


def with_fused_gradients(otherwise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a replacement of `linear_with_grad_accumulation_and_async_allreduce` of Megatron.

    It calls `otherwise`, Megatron's own, with sequence parallelism (which gathers inputs again),
    with apex's kernels, for gradients that are computed later, and for weights without a float32
    buffer.
    """

    def function(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: Any = None,
        *args: Any,
        tp_group: Any = None,
        **keywords: Any,
    ) -> torch.Tensor:
        # Megatron fills a buffer, at first empty, where gradients of a weight are computed later.
        is_special = gradient_accumulation_fusion or sequence_parallel
        if is_special or grad_output_buffer is not None or not accumulates(weight):
            arguments = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
            return otherwise(
                *(input, weight, bias, *arguments, grad_output_buffer, *args),
                tp_group=tp_group,
                **keywords,
            )
        output = linear(input, weight, tp_group if allreduce_dgrad else None)
        return output if bias is None else output + bias

    # An attribute of Megatron's function: whether it has warned.
    function.warned = False  # pyright: ignore[reportFunctionMemberAccess]
    return function


def accumulates(weight: torch.Tensor) -> bool:
    """True for a 16-bit weight on a GPU whose gradients are summed in float32."""
    total = getattr(weight, "main_grad", None)
    return total is not None and total.dtype == torch.float32 and weight.is_cuda


def linear(x: torch.Tensor, weight: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return x Wᵀ [..., out]. The backward pass adds the gradient at W to `weight.main_grad`.

    `group`: ranks over which the gradient at x is summed; None: this rank alone. Shapes: x [...,
    in]; weight [out, in].
    """
    result: Any = _Linear.apply(x, weight, group)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x)
        # Not saved: what hooks of saved tensors return lacks `main_grad`.
        ctx.weight = weight
        ctx.group = group
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        grad = grads[0]
        to_x = grad.matmul(weight)
        work = None
        if ctx.group is not None:
            work = all_reduce(to_x, group=ctx.group, async_op=True)
        rows = grad.reshape(-1, grad.shape[-1])
        if len(rows):
            add_product_(weight.main_grad, rows.t(), x.reshape(-1, x.shape[-1]))
        # The hook of Megatron's buffer then adds nothing. It needs a gradient, whatever its values.
        weight.grad_added_to_main_grad = True
        if work is not None:
            work.wait()
        return to_x, torch.empty_like(weight), None


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add left @ right to `total` in place.

    On CUDA the matrix unit multiplies in 16 bit, sums in float32 and stores float32. Shapes: total
    [m, n] float32; left [m, k]; right [k, n].
    """
    if left.is_cuda and left.dtype != torch.float32:
        return torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    return total.addmm_(left.float(), right.float())
