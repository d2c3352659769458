"""`log_probs_and_entropy`: log-probs of given tokens and the policy's entropy, from hidden states.

For one row with logits z over the vocabulary V, at sampling temperature τ:

    p_v = exp(z_v / τ) / Σ_u exp(z_u / τ),   ℓ = log p_target,   H = - Σ_v p_v log p_v

in float32 from logits in the weights' dtype. Each tensor parallel rank holds V / TP columns. If TP
does not divide the vocabulary, the weight is padded (`bridge.pad_vocabulary`). The caller removes
the padding rows, so the last ranks have fewer columns, or none, and padding never gets probability
or gradient.

Rows are processed `CHUNK_ELEMENTS / V` at a time. The forward pass reads a chunk's logits once (for
the maximum, Σ exp, Σ exp · z and the target's logit) and drops them. The backward pass computes
them again and overwrites them with their gradient. So neither [rows, V] nor a float32 copy of a
chunk exists in memory. The weight's gradient is summed over chunks in float32. A logit of -inf is a
token of probability 0: it adds nothing to the entropy and has no gradient.

Legend: n rows, H hidden size, V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ReduceOp, all_reduce
from torch.nn.functional import linear

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.linear import add_product_

if platform.CUDA_FOUND:
    from rlpipe.engines.megatron.model import kernels
else:
    kernels: Any = None

# Logits in memory at once on one rank: 1 GiB in bfloat16.
CHUNK_ELEMENTS = 2**29
# Lower bound of a rank's largest logit, also if all columns are masked or the rank has none. With
# -inf, -inf - -inf and 0 × -inf would be NaN. `kernels` has the same number.
LOWEST_LOGIT = -1.0e30


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
    """Return the log-prob of each row's target and the entropy of each row's distribution.

    `entropy_gradient`: let gradients flow through the entropy too. `first`: the token of this
    rank's first column; None: all ranks have V columns.

    Shapes: hidden [n, H]; weight [V, H]; targets [n] int64; returns [n] and [n], float32.
    """
    start = group.rank() * weight.shape[0] if first is None else first
    result: Any = _LogProbs.apply(
        hidden, weight, targets, temperature, group, entropy_gradient, start
    )
    return result


class _LogProbs(torch.autograd.Function):
    """ℓ and H of each row. Backward, with G the incoming gradients:

    ∂/∂z_v = (G_ℓ (1[v = target] - p_v) - G_H p_v (log p_v + H)) / τ
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, group, entropy_gradient, first):
        local = _local_columns(targets, weight.shape[0], first)
        statistics = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, weight):
            statistics[:, rows] = _statistics(
                linear(hidden[rows], weight), local[rows], temperature
            )
        top, total, weighted, target = statistics
        highest = _all_reduced(top.clone(), group, ReduceOp.MAX)
        # Rescale this rank's sums from its own maximum to the maximum over all ranks.
        difference = top - highest
        shrink = difference.exp()
        local_target = torch.where(local >= 0, target - highest, 0.0)
        sums = torch.stack([shrink * total, shrink * (weighted + total * difference), local_target])
        total, weighted, target = _all_reduced(sums, group, ReduceOp.SUM)
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
        of_weight = _GradientSum(weight) if ctx.needs_input_grad[1] else None
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
            if of_weight is not None:
                of_weight.add(grad, hidden[rows])
        weight_gradient = None if of_weight is None else of_weight.value()
        return of_hidden, weight_gradient, None, None, None, None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    """Return equal slices of the rows, each of at most CHUNK_ELEMENTS logits."""
    rows = len(hidden)
    most = max(1, CHUNK_ELEMENTS // max(1, weight.shape[0]))
    size = -(-rows // -(-rows // most)) if rows else 1
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _GradientSum:
    """The sum of gradᵀ hidden over chunks, in float32: [V, H]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        if self._total is not None:
            add_product_(self._total, grad.t(), hidden)
        elif grad.is_cuda and grad.dtype != torch.float32:
            self._total = torch.ops.aten.mm.dtype(grad.t(), hidden, torch.float32)
        else:
            self._total = grad.t().float() @ hidden.float()

    def value(self) -> torch.Tensor:
        """Return the sum in the weight's dtype."""
        return (
            torch.zeros_like(self._weight)
            if self._total is None
            else self._total.to(self._weight.dtype)
        )


def _statistics(logits: torch.Tensor, local: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return [4, n] float32 statistics of z = logits / temperature over this rank's columns.

    The maximum, Σ exp(z - maximum), Σ exp(z - maximum) (z - maximum), and the target's z (0 if the
    target is on another rank).
    """
    if logits.shape[1] == 0:
        result = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
        result[0] = LOWEST_LOGIT
        return result
    if kernels is not None:
        return kernels.statistics(logits, local, temperature)
    scaled = logits.float() / temperature
    top = scaled.amax(-1).clamp_min(LOWEST_LOGIT)
    target = torch.where(local >= 0, scaled.gather(1, local.clamp_min(0)[:, None])[:, 0], 0.0)
    below = scaled - top[:, None]
    mass = below.exp()
    below.masked_fill_(mass == 0, 0.0)  # 0 × -inf of a masked token would be NaN.
    return torch.stack([top, mass.sum(-1), (mass * below).sum(-1), target])


def _gradient_(
    logits, local, log_totals, entropies, of_log_probs, of_entropies, temperature: float
) -> torch.Tensor:
    """Return the gradient at logits [n, V] and possibly overwrite them. Other arguments are [n]."""
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


def _local_columns(targets: torch.Tensor, columns: int, first: int) -> torch.Tensor:
    """Return each target's column on this rank; -1 if it is on another rank."""
    local = targets - first
    return torch.where((local >= 0) & (local < columns), local, -1)


def _all_reduced(value: torch.Tensor, group: Any, operation: Any) -> torch.Tensor:
    if group.size() > 1:
        all_reduce(value, op=operation, group=group)
    return value
