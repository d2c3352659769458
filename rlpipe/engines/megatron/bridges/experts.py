"""Mixtures of experts: Qwen's, Mixtral and GLM-4.5, with settings that mbridge does not read.

mbridge normalises the weights of chosen experts by model type (Mixtral's never, although the model
does), gives attention biases to every GLM, and leaves out the gate of Qwen2's shared expert. It
supports neither groups of experts nor more than one shared expert. Biases of routers stay constant
during RL. DeepSeek's family is in `deepseek`.
"""

from __future__ import annotations

from typing import Any

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3moe import Qwen3MoEBridge

from rlpipe.engines.megatron.bridges.prediction_names import PredictsFurther
from rlpipe.engines.megatron.bridges.registry import own_family


def expert_groups(hf_config: Any) -> dict[str, Any]:
    """Return Megatron's fields for a router over the best `topk_group` of `n_group` groups."""
    groups = hf_config.n_group or 1
    best = hf_config.topk_group or 1
    limited = best < groups
    return {
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": best if limited else None,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size
        * hf_config.n_shared_experts
        or None,
    }


@own_family("glm4_moe")
class Glm4Moe(PredictsFurther, GLM4MoEBridge):
    """GLM-4.5, 4.5-Air, 4.6, 4.7."""

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        hf_config: Any = self.hf_config
        fields |= {**expert_groups(hf_config), "add_qkv_bias": hf_config.attention_bias}
        return super()._build_base_config(*args, **fields)


def softmax_router(hf_config: Any) -> dict[str, Any]:
    """Return Megatron's fields for a softmax router."""
    # Qwen3.5 always normalises and has no such key.
    return {
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_bias_update_rate": 0.0,
    }


@own_family("mixtral")
class Mixtral(MixtralBridge):
    """Mixtral 8x7B, 8x22B: the weights of the chosen experts sum to 1."""

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        fields |= {"moe_router_pre_softmax": False, "moe_router_bias_update_rate": 0.0}
        return super()._build_base_config(*args, **fields)


@own_family("qwen2_moe")
class Qwen2Moe(Qwen2MoEBridge):
    """Qwen1.5-MoE, Qwen2-57B-A14B: the shared expert has a gate."""

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        hf_config: Any = self.hf_config
        fields |= softmax_router(hf_config) | {
            "moe_shared_expert_gate": True,
            "add_qkv_bias": hf_config.qkv_bias,
        }
        return super()._build_base_config(*args, **fields)


@own_family("qwen3_moe")
class Qwen3Moe(Qwen3MoEBridge):
    """Qwen3-30B-A3B, 235B-A22B."""

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        fields |= softmax_router(self.hf_config)
        return super()._build_base_config(*args, **fields)
