"""Latent attention (DeepSeek-V3) whose gradients are right on tensor and sequence parallel ranks.

Megatron's own, in local layers, shares the two down projections out by columns and gathers what
they give. All heads then look at the same turned part of the keys, each rank sees its own heads'
gradient of it, and the gather's backward pass does not sum them: with two ranks a sixth of the
gradient norm was missing. Here the down projections are whole on every rank, as in Transformer
Engine's layers, and Megatron sums over sequence parallel ranks.

Not here: rotation and core attention, which are Megatron's and `attention`'s; tensor without
sequence parallelism, which experts do not have.
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class DownProjection(torch.nn.Module):
    """[L / TP, 1, H] → [L / TP, 1, size]: the same weight on all ranks, each with its part of the
    tokens."""

    def __init__(self, config: MLATransformerConfig, size: int) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(
            torch.empty(size, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and Megatron's place for a bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's, with whole down projections."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.linear_kv_down_proj = DownProjection(
            config, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config, config.q_lora_rank)
