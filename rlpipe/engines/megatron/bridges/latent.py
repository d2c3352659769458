"""Latent attention (DeepSeek-V3) whose gradients are right on tensor parallel ranks.

Megatron's own, in local layers, shares the two down projections out by columns and gathers what they give. All heads then look
at the same turned part of the keys, each rank sees its own heads' gradient of it, and the gather's backward pass does not sum
them: with two ranks a sixth of the gradient norm was missing. Here the down projections are whole on every rank, as in
Transformer Engine's layers: Megatron then sums over sequence parallel ranks; without these it is done here.

Not here: rotation and core attention, which are Megatron's and `attention`'s.
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class DownProjection(torch.nn.Module):
    """[L, 1, H] → [L, 1, size], the same weight on all tensor parallel ranks; of the last `turned` features each rank has only
    its heads' gradient."""

    def __init__(self, config: MLATransformerConfig, size: int, turned: int = 0) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.empty(size, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self._turned = 0 if config.sequence_parallel or config.tensor_model_parallel_size == 1 else turned

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and Megatron's place for a bias."""
        found = torch.nn.functional.linear(hidden, self.weight)
        if self._turned:
            same, partly = found.split([found.shape[-1] - self._turned, self._turned], -1)
            found = torch.cat([same, copy_to_tensor_model_parallel_region(partly)], -1)
        return found, None


class LatentAttention(MLASelfAttention):
    """Megatron's, with whole down projections."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        turned = config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = DownProjection(config, config.kv_lora_rank + turned, turned)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config, config.q_lora_rank)
