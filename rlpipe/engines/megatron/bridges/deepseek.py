"""DeepSeek's family: V3, V3.1, R1, Moonlight, Kimi K2, and GLM-4.7-Flash with the same layers.

mbridge's bridge supports only the one size of V3, in bf16, with transformers 4. It leaves out
groups of experts, and with transformers 5 also the YaRN rotation. Layers for multi-token prediction
are not trained; an export copies them. The norms of the latents use the config's epsilon, as in
SGLang. transformers always uses 1e-6, but the configs of Moonlight and GLM-4.7-Flash have 1e-5.
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import register_model
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from rlpipe.engines.megatron.bridges.experts import expert_groups
from rlpipe.engines.megatron.bridges.hf_config import rope_of
from rlpipe.engines.megatron.model.layers import distinct_layers, require_own


class DownProjection(torch.nn.Module):
    """A projection [L / TP, 1, H] → [L / TP, 1, size] with the full weight on every rank."""

    def __init__(self, config: MLATransformerConfig, size: int) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(
            torch.empty(size, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and None for Megatron's bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with correct gradients on tensor and sequence parallel ranks.

    Megatron's local layers split the two down projections by columns and gather their outputs. All
    heads read the same rotated part of the keys, each rank has the gradient of its own heads, and
    the gather's backward pass does not sum these gradients. With two ranks a sixth of the gradient
    norm was missing. Here every rank has the full down projections, as in Transformer Engine's
    layers, and Megatron sums over sequence parallel ranks.

    Tensor parallelism without sequence parallelism is not possible: experts do not support it.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.linear_kv_down_proj = DownProjection(
            config, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config, config.q_lora_rank)


def _latent_attention_config(**fields: Any) -> MLATransformerConfig:
    # mbridge 0.15 still uses the name that Megatron-core had before 0.15.
    if "max_position_embeddings" in fields:
        fields["original_max_position_embeddings"] = fields.pop("max_position_embeddings")
    return MLATransformerConfig(**fields)


def _rotation(rope: dict[str, Any]) -> dict[str, Any]:
    if rope.get("rope_type", "default") == "default":
        return {
            "rope_type": "rope",
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


@register_model("deepseek_v3")
class DeepseekV3(DeepseekV3Bridge):
    """mbridge's bridge with groups of experts, all rotations and no multi-token prediction."""

    TransformerConfigClass: Any = staticmethod(_latent_attention_config)

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        fields |= {
            **expert_groups(self.hf_config),
            **_rotation(rope_of(self.hf_config)),
            "mtp_num_layers": None,
        }
        return super()._build_base_config(*args, **fields)

    @staticmethod
    def adapted(block: Any) -> Any:
        """Replace the attention of `layers.block_spec` by `LatentAttention`."""
        for layer in distinct_layers(block):
            require_own("self_attention", layer.submodules.self_attention.module, MLASelfAttention)
            layer.submodules.self_attention.module = LatentAttention
        return block


@register_model("glm4_moe_lite")
class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash."""

    def _build_config(self) -> Any:
        hf_config: Any = self.hf_config
        hf_config.first_k_dense_replace = hf_config.mlp_layer_types.index("sparse")
        return super()._build_config()
