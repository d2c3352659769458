"""From hidden states to the log-probs of given tokens and the entropy of the policy, over a vocabulary split across ranks.

For one row with logits z over the vocabulary V, at sampling temperature τ:

    p_v = exp(z_v / τ) / Σ_u exp(z_u / τ),   ℓ = log p_target,   H = - Σ_v p_v log p_v

in float32, each tensor parallel rank holding V / TP columns. Rows are taken `CHUNK_ELEMENTS / V` at a time and, when there
is more than one chunk, recomputed in the backward pass, so [rows, V] is never alive as a whole.

Legend: n rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp, all_reduce
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**28
"""Logits alive at once on one rank: 1 GiB in float32."""


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: torch.distributed.ProcessGroup,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each row's target, and the entropy of each row's distribution.

    Shapes: hidden [n, H]; weight [V / TP, H]; targets [n] int64; returns [n] and [n], float32. The gradient goes to hidden
    and weight; through the entropy only if asked for.
    """
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    if hidden.shape[0] <= rows:
        return _chunk(hidden, weight, targets, temperature, group, entropy_gradient)
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    parts = [
        checkpoint(_chunk, part, weight, ids, temperature, group, entropy_gradient, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else _chunk(part, weight, ids, temperature, group, entropy_gradient)
        for part, ids in chunks
    ]
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def _chunk(hidden, weight, targets, temperature: float, group, entropy_gradient: bool):
    logits = torch.nn.functional.linear(hidden, weight).float()
    log_probs, entropy = _FromLogits.apply(logits, targets, temperature, group)
    return log_probs, entropy if entropy_gradient else entropy.detach()


class _FromLogits(torch.autograd.Function):
    """ℓ and H of this rank's logits columns. Backward, with G the incoming gradients:

    ∂/∂z_v = (G_ℓ (1[v = target] - p_v) - G_H p_v (log p_v + H)) / τ
    """

    @staticmethod
    def forward(ctx, logits, targets, temperature, group):
        scaled = logits / temperature if temperature != 1.0 else logits.clone()
        top = _reduced(scaled.amax(-1) if len(scaled) else scaled.new_zeros(0), group, ReduceOp.MAX)
        scaled -= top[:, None]
        local, here = _local(targets, scaled.shape[1], group)
        target = torch.where(here, scaled.gather(1, local[:, None])[:, 0], 0.0)
        probs = scaled.exp()
        total, target = _reduced(torch.stack([probs.sum(-1), target]), group, ReduceOp.SUM)
        probs /= total[:, None]
        entropy = total.log() - _reduced((probs * scaled).sum(-1), group, ReduceOp.SUM)
        ctx.save_for_backward(probs, local, here, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target - total.log(), entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        probs, local, here, entropy = ctx.saved_tensors
        grad = torch.zeros_like(probs)
        if grad_log_probs is not None:
            torch.mul(probs, -grad_log_probs[:, None], out=grad)
            grad.scatter_add_(1, local[:, None], torch.where(here, grad_log_probs, 0.0)[:, None])
        if grad_entropy is not None:
            log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
            grad -= grad_entropy[:, None] * probs * (log_probs + entropy[:, None])
        return grad / ctx.temperature if ctx.temperature != 1.0 else grad, None, None, None


def _local(targets: torch.Tensor, columns: int, group) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column on this rank (0 where it is another's), and whether it is here."""
    local = targets - group.rank() * columns
    here = (local >= 0) & (local < columns)
    return torch.where(here, local, 0), here


def _reduced(value: torch.Tensor, group, operation) -> torch.Tensor:
    if group.size() > 1:
        value = value.contiguous()
        all_reduce(value, op=operation, group=group)
    return value
