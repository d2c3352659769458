"""Experts whose matrix products are made for all of them at once
(`train.megatron.moe_grouped_gemm`).

Megatron's way without Transformer Engine is one expert after another: with 128 small ones a GPU
mostly waits for the next kernel to be asked for. Here a layer has two grouped products forward and
four backward, by `torch.nn.functional.grouped_mm`: on CUDA CUTLASS kernels for bfloat16, which want
sizes that are multiples of 8. Parameters stay each expert's own, so names, checkpoints, exports and
gradients are those of one after another. The experts' weights of one layer are copied side by side
while it is computed, forward and again backward: that much memory of one layer more.

Not here: which tokens go where (Megatron's router and dispatcher).
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.transformer.moe.experts import SequentialMLP

from rlpipe.engines.megatron.model.fused import swiglu

grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm")  # noqa: B009 - private in older ones


class GroupedExperts(SequentialMLP):
    """SwiGLU experts without biases. Their shards of a tensor parallel group too: the dispatcher
    sums what they answer."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> Any:
        """Tokens of one expert after another, [T, H], how many of each, and what each counts, [T]:
        [T, H], and no bias."""
        tokens = permuted_local_hidden_states
        if not len(tokens) or self.config.moe_apply_probs_on_input:
            return super().forward(tokens, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        experts: Any = self.local_experts
        hidden = swiglu(
            grouped_linear(tokens, ends, [expert.linear_fc1.weight for expert in experts])
        )
        weighted = (hidden * permuted_probs.unsqueeze(-1)).to(hidden.dtype)
        return grouped_linear(
            weighted, ends, [expert.linear_fc2.weight for expert in experts]
        ), None


def grouped_linear(
    tokens: torch.Tensor, ends: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    """tokens [T, K] times the weight [N, K] of the group that each is in: [T, N].

    `ends` [groups] int32: where each group ends.
    """
    result: Any = _GroupedLinear.apply(tokens, ends, *weights)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, ends, *weights):
        ctx.save_for_backward(tokens, ends, *weights)
        return grouped_mm(tokens, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx, *grads):
        tokens, ends, *weights = ctx.saved_tensors
        incoming = grads[0].contiguous()
        to_tokens = (
            grouped_mm(incoming, torch.stack(weights), offs=ends)
            if ctx.needs_input_grad[0]
            else None
        )
        to_weights = grouped_mm(incoming.mT, tokens, offs=ends)
        return to_tokens, None, *to_weights.unbind()
