"""DeepSeek's family: V3, V3.1, R1, Moonlight, Kimi K2; GLM-4.7-Flash and GLM-5 with its layers.

mbridge's bridge supports only the one size of V3, in bf16, with transformers 4. It leaves out
groups of experts, and with transformers 5 also the YaRN rotation. The norms of the latents use the
config's epsilon, as in SGLang. transformers always uses 1e-6, but the configs of Moonlight and
GLM-4.7-Flash have 1e-5.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from rlpipe.engines.megatron.bridges.experts import expert_groups
from rlpipe.engines.megatron.bridges.hf_config import rope_of
from rlpipe.engines.megatron.bridges.prediction_names import PredictsFurther
from rlpipe.engines.megatron.bridges.registry import own_family
from rlpipe.engines.megatron.model.attention import CoreAttention
from rlpipe.engines.megatron.model.layers import distinct_layers, require_own
from rlpipe.engines.megatron.model.sparse import (
    Indexer,
    SparseCoreAttention,
    check_layout,
    gathered_sequence,
)


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


@own_family("deepseek_v3")
class DeepseekV3(PredictsFurther, DeepseekV3Bridge):
    """mbridge's bridge with groups of experts and all rotations."""

    # Copies of embedding and output layer, which an export writes (`with_untrained_layers`).
    _SHARED_STATE_DICT_MAPPING: ClassVar[dict[str, list[str]]] = {}

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


@own_family("glm4_moe_lite")
class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash."""

    def _build_config(self) -> Any:
        hf_config: Any = self.hf_config
        hf_config.first_k_dense_replace = hf_config.mlp_layer_types.index("sparse")
        return super()._build_config()


class SparseLatentAttention(LatentAttention):
    """Latent attention to the keys that an indexer selects, of this layer or an earlier one."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        settings: Any = config
        full = settings.indexer_types[self.layer_number - 1] == "full"
        self.indexer = Indexer(config) if full else None

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, **keywords: Any) -> Any:
        """Select keys, if this layer has an indexer, and attend to them."""
        layout = keywords["packed_seq_params"]
        if self.indexer is not None and self.indexer.selects(layout):
            layout.selections[self.layer_number] = self._selection(hidden_states.detach(), layout)
        return super().forward(hidden_states, attention_mask, **keywords)

    @torch.no_grad()
    def _selection(self, hidden_states: torch.Tensor, layout: Any) -> list[torch.Tensor]:
        assert self.indexer is not None
        latents = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        return self.indexer.masks(
            gathered_sequence(hidden_states, self.config),
            gathered_sequence(latents, self.config),
            layout,
            layout.angles(self.rotary_pos_emb(int(layout.lengths.max()), packed_seq=True)),
        )


_INDEXER = "model.layers.{layer_number}.self_attn.indexer"


@own_family("glm_moe_dsa")
class Glm5(Glm4MoeLite):
    """GLM-5, 5.2. The indexers are not trained."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **Glm4MoeLite._ATTENTION_MAPPING,
        "self_attention.indexer.wq_b": [f"{_INDEXER}.wq_b.weight"],
        "self_attention.indexer.wk": [f"{_INDEXER}.wk.weight"],
        "self_attention.indexer.weights_proj": [f"{_INDEXER}.weights_proj.weight"],
        # A name is looked up by its first part that is a key.
        "self_attention.indexer.k_norm_bias": [f"{_INDEXER}.k_norm.bias"],
        "self_attention.indexer.k_norm": [f"{_INDEXER}.k_norm.weight"],
    }

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        hf_config: Any = self.hf_config
        fields |= {
            "dsa_indexer_n_heads": hf_config.index_n_heads,
            "dsa_indexer_head_dim": hf_config.index_head_dim,
            "dsa_indexer_topk": hf_config.index_topk,
        }
        config: Any = super()._build_base_config(*args, **fields)
        # Megatron's configuration class has no such fields.
        # Layers for multi-token prediction have indexers of their own.
        own: Any = self
        config.indexer_types = [*hf_config.indexer_types, *["full"] * own.prediction_layers]
        config.indexer_rope_interleave = getattr(hf_config, "indexer_rope_interleave", False)
        return config

    def adapted(self, block: Any) -> Any:
        """Replace the attention of `layers.block_spec` by `SparseLatentAttention`."""
        check_layout(self.config)
        for layer in distinct_layers(block):
            attention = layer.submodules.self_attention
            require_own("self_attention", attention.module, MLASelfAttention)
            require_own("core_attention", attention.submodules.core_attention, CoreAttention)
            attention.module = SparseLatentAttention
            attention.submodules.core_attention = SparseCoreAttention
        return block
