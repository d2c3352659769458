"""Dense families with a bridge of ours: Qwen2 and MiMo, Llama 3 to 3.3, GLM-4 (9B, 32B, Z1).

mbridge treats every `rope_scaling` of a Llama as linear and does not tie embeddings. mbridge has no
dense GLM-4. A GLM-4 differs from Qwen2: the outputs of attention and MLP are normalised before they
are added, half of a head's features are rotated (in pairs of neighbours), and gate and up
projection are one matrix in the checkpoint:

    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default

from rlpipe.engines.megatron.bridges.hf_config import rope_of
from rlpipe.engines.megatron.bridges.prediction_names import PredictionNames, PredictsFurther
from rlpipe.engines.megatron.bridges.registry import own_family
from rlpipe.engines.megatron.model.layers import (
    Attention,
    FeedForward,
    Norm,
    distinct_layers,
    require_own,
)


def _tie_output_layer(bridge: Any) -> None:
    if getattr(bridge.hf_config, "tie_word_embeddings", False):
        bridge._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"


@own_family("llama")
class Llama(LLaMABridge):
    """mbridge's bridge with stretched rotations and tied embeddings."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        rope = rope_of(self.hf_config)
        arguments = LLMBridge._get_gptmodel_args(self)
        if rope.get("rope_type") == "linear":
            arguments["seq_len_interpolation_factor"] = rope["factor"]
        if rope.get("rope_type") == "llama3":
            arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        return arguments

    def _adjust_mapping_for_shared_weights(self) -> None:
        _tie_output_layer(self)

    def _get_hf_shared_weight_keys(self) -> list[str]:
        tied = getattr(self.hf_config, "tie_word_embeddings", False)
        return ["model.embed_tokens.weight"] if tied else []


@own_family("qwen2")
class Qwen2(PredictsFurther, Qwen2Bridge):
    """Qwen2, Qwen2.5, and MiMo-7B with its layers for multi-token prediction."""

    prediction = PredictionNames(
        count_key="num_nextn_predict_layers",
        layer="model.mtp_layers.{number}",
        own=(
            "model.mtp_layers.{number}.token_layernorm.weight",
            "model.mtp_layers.{number}.hidden_layernorm.weight",
            "model.mtp_layers.{number}.input_proj.weight",
            "model.mtp_layers.{number}.final_layernorm.weight",
        ),
        hidden_first=True,
    )


_LAYER = "model.layers.{layer_number}"


class AttentionThenNorm(Attention):
    """Self-attention with a norm of its output."""

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.post_layernorm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *args: Any, **keywords: Any
    ) -> Any:
        output, bias = super().forward(hidden_states, attention_mask, *args, **keywords)
        assert bias is None
        return self.post_layernorm(output), None


class FeedForwardThenNorm(FeedForward):
    """An MLP with a norm of its output."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.post_layernorm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(
        self,
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        output, bias = super().forward(hidden_states, per_token_scale, **keywords)
        assert bias is None
        return self.post_layernorm(output), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> Any:
        # Megatron's MLP calls this method of each of its parts, and torch's norms do not have it.
        norm = self._modules.pop("post_layernorm")
        assert norm is not None
        try:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self._modules["post_layernorm"] = norm
        group: Any = self.tp_group
        return state | sharded_state_dict_default(
            norm, f"{prefix}post_layernorm.", sharded_offsets, metadata, tp_group=group
        )


@own_family("glm4")
class Glm4(LLMBridge):
    """Weight names and settings of a dense GLM-4."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        "self_attention.linear_proj.weight": [f"{_LAYER}.self_attn.o_proj.weight"],
        "self_attention.linear_qkv.layer_norm_weight": [f"{_LAYER}.input_layernorm.weight"],
        "self_attention.post_layernorm.weight": [f"{_LAYER}.post_self_attn_layernorm.weight"],
        "self_attention.linear_qkv.weight": [
            f"{_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"
        ],
        "self_attention.linear_qkv.bias": [
            f"{_LAYER}.self_attn.{part}_proj.bias" for part in "qkv"
        ],
    }
    _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
        "mlp.linear_fc1.weight": [f"{_LAYER}.mlp.gate_up_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": [f"{_LAYER}.post_attention_layernorm.weight"],
        "mlp.linear_fc2.weight": [f"{_LAYER}.mlp.down_proj.weight"],
        "mlp.post_layernorm.weight": [f"{_LAYER}.post_mlp_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        hf_config: Any = self.hf_config
        return self._build_base_config(
            add_qkv_bias=hf_config.attention_bias, rotary_interleaved=True
        )

    def _get_gptmodel_args(self) -> dict[str, Any]:
        hf_config: Any = self.hf_config
        return {**super()._get_gptmodel_args(), "rotary_percent": hf_config.partial_rotary_factor}

    def _adjust_mapping_for_shared_weights(self) -> None:
        _tie_output_layer(self)

    @staticmethod
    def adapted(block: Any) -> Any:
        """Replace attention and MLP of `layers.block_spec` by those with a norm of the output."""
        for layer in distinct_layers(block):
            require_own("self_attention", layer.submodules.self_attention.module, Attention)
            require_own("mlp", layer.submodules.mlp, FeedForward)
            layer.submodules.self_attention.module = AttentionThenNorm
            layer.submodules.mlp = FeedForwardThenNorm
        return block
