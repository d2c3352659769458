"""DeepSeek's family: V3, V3.1, R1, Moonlight, Kimi K2; and GLM-4.7-Flash, which has the same layers
under another name.

mbridge's bridge is for the one size of V3 in bf16 with transformers 4: it leaves out groups of
experts, and with transformers 5 the stretched rotation too. Layers that predict further tokens are
not trained; `kept` carries them through an export. The norms of the latents have the config's
epsilon, as in SGLang; transformers takes 1e-6 whatever it says (Moonlight, GLM-4.7-Flash: 1e-5).

Not here: reading FP8 (`files`).
"""

from __future__ import annotations

from typing import Any

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import register_model
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from rlpipe.engines.megatron.bridges.experts import groups
from rlpipe.engines.megatron.bridges.hf_config import rope_of
from rlpipe.engines.megatron.bridges.latent import LatentAttention
from rlpipe.engines.megatron.model.layers import distinct_layers, require_own


def _latent_attention_config(**fields: Any) -> MLATransformerConfig:
    """mbridge 0.15 calls it `max_position_embeddings`, Megatron-core since 0.15
    `original_max_position_embeddings`."""
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
    """mbridge's, mended."""

    TransformerConfigClass: Any = staticmethod(_latent_attention_config)

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        fields |= {
            **groups(self.hf_config),
            **_rotation(rope_of(self.hf_config)),
            "mtp_num_layers": None,
        }
        return super()._build_base_config(*args, **fields)

    @staticmethod
    def adapted(block: Any) -> Any:
        """A stage's layers as `layers.block_spec` makes them, with attention that tensor parallel
        ranks can share."""
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
