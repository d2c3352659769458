"""From hidden states to the log-probs of given tokens and the entropy of the policy, over a
vocabulary split across ranks.

For one row with logits z over the vocabulary V, at sampling temperature τ:

    p_v = exp(z_v / τ) / Σ_u exp(z_u / τ),   ℓ = log p_target,   H = - Σ_v p_v log p_v

in float32 from logits in the weights' dtype, each tensor parallel rank holding V / TP columns.
Where TP does not divide the vocabulary the weight is padded (`bridge.pad_vocabulary`); padding rows
are left out before they come here, so the last ranks have fewer columns, or none, and padding never
gets probability or gradient. Rows are taken `CHUNK_ELEMENTS / V` at a time. A chunk's logits are
read once (their largest, Σ exp, Σ exp · z and the target's come out) and dropped; the backward pass
makes them again and overwrites them with their own gradient. So [rows, V] is never alive as a
whole, nor a float32 copy of a chunk. The weight's gradient is summed over chunks in float32. A
logit of -inf is a token of probability 0: it adds nothing to the entropy and has no gradient.

Legend: n rows, H hidden size, V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ReduceOp, all_reduce
from torch.nn.functional import linear

from rlpipe.engines.megatron import platform

if platform.CUDA_FOUND:
    from rlpipe.engines.megatron.model import kernels
else:
    kernels: Any = None

CHUNK_ELEMENTS = 2**29
"""Logits alive at once on one rank: 1 GiB in bfloat16."""
_LOWEST = -1.0e30
"""The largest of no logits. Not -inf: it is multiplied by a sum of 0."""
LEAST = -1.0e30
"""Taken for the largest logit where all columns of a rank are masked: -inf - -inf would be NaN. The
same as in `kernels`."""


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: torch.distributed.ProcessGroup,
    entropy_gradient: bool,
    first: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each row's target, and the entropy of each row's distribution.

    Shapes: hidden [n, H]; weight [V, H]; targets [n] int64; returns [n] and [n], float32. The
    gradient goes to hidden and weight; through the entropy only if asked for. `first`: the token of
    this rank's first column; None: all ranks have V columns.
    """
    start = group.rank() * weight.shape[0] if first is None else first
    found: Any = _LogProbs.apply(
        hidden, weight, targets, temperature, group, entropy_gradient, start
    )
    return found


class _LogProbs(torch.autograd.Function):
    """ℓ and H of each row. Backward, with G the incoming gradients:

    ∂/∂z_v = (G_ℓ (1[v = target] - p_v) - G_H p_v (log p_v + H)) / τ
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, group, entropy_gradient, first):
        local = _local(targets, weight.shape[0], first)
        found = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, weight):
            found[:, rows] = _statistics(linear(hidden[rows], weight), local[rows], temperature)
        top, total, weighted, target = found
        highest = _reduced(top.clone(), group, ReduceOp.MAX)
        shrink = (top - highest).exp()
        apart = top - highest
        here = torch.where(local >= 0, target - highest, 0.0)
        sums = torch.stack([shrink * total, shrink * (weighted + total * apart), here])
        total, weighted, target = _reduced(sums, group, ReduceOp.SUM)
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, local, highest + total.log(), entropy)
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target - total.log(), entropy

    @staticmethod
    def backward(ctx, *grads):
        hidden, weight, local, log_totals, entropy = ctx.saved_tensors
        of_log_probs = torch.zeros_like(entropy) if grads[0] is None else grads[0]
        of_entropy = grads[1] if ctx.entropy_gradient else None
        of_hidden = torch.empty_like(hidden)
        of_weight = _Sum(weight)
        for rows in _chunks(hidden, weight):
            grad = _gradient_(
                linear(hidden[rows], weight),
                local[rows],
                log_totals[rows],
                entropy[rows],
                of_log_probs[rows],
                None if of_entropy is None else of_entropy[rows],
                ctx.temperature,
            )
            torch.mm(grad, weight, out=of_hidden[rows])
            of_weight.add(grad, hidden[rows])
        return of_hidden, of_weight.value(), None, None, None, None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    """Equal parts of the rows, each of at most CHUNK_ELEMENTS logits."""
    rows = len(hidden)
    most = max(1, CHUNK_ELEMENTS // max(1, weight.shape[0]))
    size = -(-rows // -(-rows // most)) if rows else 1
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _Sum:
    """Σ gradᵀ hidden over chunks, in float32: [V, H]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        if grad.is_cuda and grad.dtype != torch.float32:
            self._add_wide(grad.t(), hidden)
        elif self._total is None:
            self._total = grad.t().float() @ hidden.float()
        else:
            self._total.addmm_(grad.t().float(), hidden.float())

    def _add_wide(self, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """16-bit factors, products summed in float32 by the matrix unit and stored as they are."""
        if self._total is None:
            self._total = torch.ops.aten.mm.dtype(grad, hidden, torch.float32)
        else:
            torch.ops.aten.addmm.dtype_out(
                self._total, grad, hidden, torch.float32, out=self._total
            )

    def value(self) -> torch.Tensor:
        """In the weight's dtype."""
        return (
            torch.zeros_like(self._weight)
            if self._total is None
            else self._total.to(self._weight.dtype)
        )


def _statistics(logits: torch.Tensor, local: torch.Tensor, temperature: float) -> torch.Tensor:
    """[4, n] float32 of z = logits / temperature, over this rank's columns: the largest, Σ exp(z -
    largest), Σ exp(z - largest) (z - largest), and the target's (0 where it is another rank's)."""
    if logits.shape[1] == 0:
        found = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
        found[0] = _LOWEST
        return found
    if kernels is not None:
        return kernels.statistics(logits, local, temperature)
    scaled = logits.float() / temperature
    top = scaled.amax(-1).clamp_min(LEAST)
    target = torch.where(local >= 0, scaled.gather(1, local.clamp_min(0)[:, None])[:, 0], 0.0)
    below = scaled - top[:, None]
    mass = below.exp()
    below.masked_fill_(mass == 0, 0.0)  # 0 × -inf of a masked token would be NaN
    return torch.stack([top, mass.sum(-1), (mass * below).sum(-1), target])


def _gradient_(
    logits, local, log_totals, entropies, of_log_probs, of_entropies, temperature: float
) -> torch.Tensor:
    """The gradient at logits [n, V], which it may overwrite; everything else is [n]."""
    if logits.shape[1] == 0:
        return logits
    if kernels is not None:
        return kernels.gradient_(
            logits, local, log_totals, entropies, of_log_probs, of_entropies, temperature
        )
    log_probs = logits.float() / temperature - log_totals[:, None]
    probs = log_probs.exp()
    grad = -of_log_probs[:, None] * probs
    if of_entropies is not None:
        log_probs.masked_fill_(probs == 0, 0.0)
        grad -= of_entropies[:, None] * probs * (log_probs + entropies[:, None])
    grad.scatter_add_(
        1, local.clamp_min(0)[:, None], torch.where(local >= 0, of_log_probs, 0.0)[:, None]
    )
    return (grad / temperature).to(logits.dtype)


def _local(targets: torch.Tensor, columns: int, first: int) -> torch.Tensor:
    """Each target's column on this rank; -1 where it is another's."""
    local = targets - first
    return torch.where((local >= 0) & (local < columns), local, -1)


def _reduced(value: torch.Tensor, group: Any, operation: Any) -> torch.Tensor:
    if group.size() > 1:
        all_reduce(value, op=operation, group=group)
    return value
