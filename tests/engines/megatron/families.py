"""Tiny random models of every family, with the layers, routers and rotations of the real ones.

Weights are large enough that logits differ. Biases of attention and of routers, which transformers
leaves at 0, are random too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM

from tests.engines.megatron.sizes import SIZES

_BASE: dict[str, Any] = {**SIZES, "tie_word_embeddings": False}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_SIGMOID = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_LATENT = {
    **_SIGMOID,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_YARN = {
    "rope_type": "yarn",
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
_GATED_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        **_EXPERTS,
        "norm_topk_prob": True,
    },
    "qwen3_moe_unnormalised": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        **_EXPERTS,
        "norm_topk_prob": False,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        # Most samples of the tests have more tokens.
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.5,
        },
        "rotary_dim": 8,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_GATED_DELTA,
        "num_experts": 4,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3.5": {"model_type": "qwen3_5_text", **_GATED_DELTA, "tie_word_embeddings": True},
    "qwen3.5_moe": {
        "model_type": "qwen3_5_moe_text",
        **_GATED_DELTA,
        "num_experts": 4,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
    },
    "llama3": {"model_type": "llama", "rope_theta": 500_000.0},
    "llama3.2": {
        "model_type": "llama",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        "rope_scaling": {**_LLAMA3, "factor": 32.0},
    },
    "glm4": {
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-07,
        "pad_token_id": None,
    },
    "glm4.5": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        **_SIGMOID,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "glm4.5_air": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        **_SIGMOID,
        "attention_bias": True,
        "use_qk_norm": False,
    },
    "glm4.7_flash": {"model_type": "glm4_moe_lite", **_LATENT, "rms_norm_eps": 1e-6},
    "glm5": {
        "model_type": "glm_moe_dsa",
        **_LATENT,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full", "shared"],
        "index_head_dim": 16,
        # With few heads, many scores are exactly 0, and the choice among them is arbitrary.
        "index_n_heads": 16,
        # Most samples of the tests have more tokens.
        "index_topk": 5,
        "rms_norm_eps": 1e-6,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "num_hidden_layers": 3,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": {**_YARN, "factor": 40.0, "beta_fast": 32, "beta_slow": 1},
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 50_000.0,
    },
    "kimi_k2": {
        "model_type": "deepseek_v3",
        **_LATENT,
        "n_routed_experts": 12,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 50_000.0,
        "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
}
"""What differs from `_BASE`, by the name of the model that it is like."""
ZERO_CENTRED = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
"""Norms that Qwen3-Next and Qwen3.5 store as their difference to 1."""


def make(
    family: str,
    directory: Path,
    seed: int = 0,
    *,
    changes: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.12,
) -> str:
    """Write a random model of this family and return its directory.

    `changes`: keys of config.json. `spread`: standard deviation of weights.
    """
    values = {**_BASE, **FAMILIES[family], **(changes or {})}
    config = CONFIGS[values.pop("model_type")](**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, spread, generator=generator)
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "proj_bias", ".sinks")):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif name.endswith(".A_log"):
                # The states of earlier tokens fade slowly enough to change later ones.
                parameter.normal_(-1.0, 0.3, generator=generator)
            elif "linear_num_key_heads" in values and name.endswith(ZERO_CENTRED):
                parameter.normal_(0.0, 0.12, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    model.to(dtype).save_pretrained(directory)
    return str(directory)
