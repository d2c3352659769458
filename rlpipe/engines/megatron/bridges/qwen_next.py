"""Qwen3-Next and the text models of Qwen3.5: layers of gated delta nets, and of gated attention.

mbridge does not have them. Both store norms as their difference to 1. Their query projections hold
a gate next to each head. The two families differ in the projections of the gated delta net:
Qwen3-Next stores two matrices grouped by key head, Qwen3.5 four matrices that are not grouped.

Legend: G key heads, R value heads of a key head, K and V sizes of a key and a value head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge

from rlpipe.engines.megatron.bridges.experts import softmax_router
from rlpipe.engines.megatron.bridges.prediction_names import PredictionNames, PredictsFurther
from rlpipe.engines.megatron.bridges.registry import own_family
from rlpipe.engines.megatron.model.gated_delta import MixedAttention
from rlpipe.engines.megatron.model.layers import Attention, distinct_layers, require_own

_LAYER = "model.layers.{layer_number}"
_DELTA = f"{_LAYER}.linear_attn"
_QKV = "self_attention.linear_qkv.weight"
_DELTA_MAPPING = {
    "self_attention.in_proj_qkvz.weight": [f"{_DELTA}.in_proj_qkvz.weight"],
    "self_attention.in_proj_ba.weight": [f"{_DELTA}.in_proj_ba.weight"],
    "self_attention.conv_weight": [f"{_DELTA}.conv1d.weight"],
    "self_attention.A_log": [f"{_DELTA}.A_log"],
    "self_attention.dt_bias": [f"{_DELTA}.dt_bias"],
    "self_attention.norm_weight": [f"{_DELTA}.norm.weight"],
    "self_attention.out_proj.weight": [f"{_DELTA}.out_proj.weight"],
}


_PREDICTION = PredictionNames(
    count_key="mtp_num_hidden_layers",
    layer="mtp.layers.{number}",
    own=(
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ),
)


class _GatedDeltaBridge(PredictsFurther):
    """Settings, attention and conversion of weights of Qwen3-Next and Qwen3.5."""

    prediction = _PREDICTION

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **Qwen2Bridge._ATTENTION_MAPPING,
        **_DELTA_MAPPING,
        "self_attention.q_layernorm.weight": [f"{_LAYER}.self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": [f"{_LAYER}.self_attn.k_norm.weight"],
    }

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        hf_config: Any = self.hf_config
        fields |= {
            "add_qkv_bias": False,
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [
                int(kind == "linear_attention") for kind in hf_config.layer_types
            ],
            "linear_conv_kernel_dim": hf_config.linear_conv_kernel_dim,
            "linear_key_head_dim": hf_config.linear_key_head_dim,
            "linear_value_head_dim": hf_config.linear_value_head_dim,
            "linear_num_key_heads": hf_config.linear_num_key_heads,
            "linear_num_value_heads": hf_config.linear_num_value_heads,
        }
        return super()._build_base_config(*args, **fields)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        hf_config: Any = self.hf_config
        return {**super()._get_gptmodel_args(), "rotary_percent": hf_config.partial_rotary_factor}

    @staticmethod
    def adapted(block: Any) -> Any:
        """Replace the attention of `layers.block_spec` by `MixedAttention`."""
        for layer in distinct_layers(block):
            require_own("self_attention", layer.submodules.self_attention.module, Attention)
            layer.submodules.self_attention.module = MixedAttention
        return block

    def _weight_to_mcore_format(
        self, mcore_weights_name: str, hf_weights: list[torch.Tensor]
    ) -> torch.Tensor:
        if mcore_weights_name.endswith(".A_log"):
            return hf_weights[0].float()  # mbridge would round it to the model's dtype
        groups, sizes = self._groups(mcore_weights_name, len(hf_weights))
        if not groups:
            return super()._weight_to_mcore_format(mcore_weights_name, hf_weights)
        if mcore_weights_name.endswith(_QKV):
            hf_weights = [self._alternate(hf_weights[0], from_file=True), *hf_weights[1:]]
        parts = [
            part.unflatten(0, (groups, -1))
            for weight, pieces in zip(hf_weights, sizes, strict=True)
            for part in weight.to(self.dtype).split([groups * piece for piece in pieces])
        ]
        return torch.cat(parts, 1).flatten(0, 1)

    def _weight_to_hf_format(
        self, mcore_weights_name: str, mcore_weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        names = self._weight_name_mapping_mcore_to_hf(mcore_weights_name)
        groups, sizes = self._groups(mcore_weights_name, len(names))
        if not groups:
            return super()._weight_to_hf_format(mcore_weights_name, mcore_weights)
        grouped = mcore_weights.unflatten(0, (groups, -1))
        weights = []
        start = 0
        for pieces in sizes:
            parts = grouped[:, start : start + sum(pieces)].split(pieces, 1)
            weights.append(torch.cat([part.flatten(0, 1) for part in parts]))
            start += sum(pieces)
        if mcore_weights_name.endswith(_QKV):
            weights[0] = self._alternate(weights[0], from_file=False)
        return names, weights

    def _groups(self, name: str, files: int) -> tuple[int, list[list[int]]]:
        """Return the number of groups, and the rows of a group's pieces in each file's tensor.

        0 groups: the tensor is in the file as it is here.
        """
        hf_config: Any = self.hf_config
        if name.endswith(_QKV):
            groups = hf_config.num_key_value_heads
            size = hf_config.head_dim
            return groups, [[2 * size * hf_config.num_attention_heads // groups], [size], [size]]
        groups = hf_config.linear_num_key_heads
        values = hf_config.linear_num_value_heads // groups
        query, key = [hf_config.linear_key_head_dim] * 2
        value = values * hf_config.linear_value_head_dim
        if name.endswith("self_attention.conv_weight"):
            return groups, [[query, key, value]]
        if name.endswith("self_attention.in_proj_qkvz.weight") and files > 1:
            return groups, [[query, key, value], [value]]
        if name.endswith("self_attention.in_proj_ba.weight") and files > 1:
            return groups, [[values], [values]]
        return 0, []

    def _alternate(self, weight: torch.Tensor, *, from_file: bool) -> torch.Tensor:
        """Reorder the rows of queries and gates of each group.

        They alternate by head in the file. Here a group has its queries, then its gates.
        """
        hf_config: Any = self.hf_config
        groups = hf_config.num_key_value_heads
        heads = hf_config.num_attention_heads // groups
        order = (groups, heads, 2) if from_file else (groups, 2, heads)
        rows = weight.unflatten(0, (*order, hf_config.head_dim))
        return rows.transpose(1, 2).flatten(0, 3)


class _Experts(_GatedDeltaBridge, Qwen2MoEBridge):
    """A mixture of experts with a gated shared expert in every layer."""

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        fields |= softmax_router(self.hf_config) | {"moe_shared_expert_gate": True}
        return super()._build_base_config(*args, **fields)


_SEPARATE = {
    "self_attention.in_proj_qkvz.weight": [
        f"{_DELTA}.in_proj_qkv.weight",
        f"{_DELTA}.in_proj_z.weight",
    ],
    "self_attention.in_proj_ba.weight": [
        f"{_DELTA}.in_proj_b.weight",
        f"{_DELTA}.in_proj_a.weight",
    ],
}


@own_family("qwen3_next")
class Qwen3Next(_Experts):
    """Qwen3-Next-80B-A3B. The file has one layer for multi-token prediction, the config no key."""

    prediction = replace(_PREDICTION, default_count=1)


@own_family("qwen3_5_text")
class Qwen35(_GatedDeltaBridge, Qwen2Bridge):
    """Dense text models of Qwen3.5."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **_GatedDeltaBridge._ATTENTION_MAPPING,
        **_SEPARATE,
    }


@own_family("qwen3_5_moe_text")
class Qwen35Moe(_Experts):
    """Text models of Qwen3.5 with experts. All layers have them, so there is no dense size."""

    _CONFIG_MAPPING: ClassVar[dict[str, Any]] = {
        **LLMBridge._CONFIG_MAPPING,
        "ffn_hidden_size": "moe_intermediate_size",
    }
    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **_GatedDeltaBridge._ATTENTION_MAPPING,
        **_SEPARATE,
    }
