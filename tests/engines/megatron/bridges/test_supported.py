"""Check of config.json against the trainer's layers (rlpipe.engines.megatron.bridges.supported)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.bridges.hf_config import read_config
from rlpipe.engines.megatron.bridges.supported import SAME_AS, check_config, check_supported
from rlpipe.engines.megatron.bridges.supported_families import FAMILIES
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import families, reference
from tests.engines.megatron.ranks import engine, make_batch

_FILE: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
_QWEN = {
    **_FILE,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_QWEN3 = {
    **_QWEN,
    "attention_bias": False,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
}
_DEEPSEEK = {
    **_FILE,
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 64,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
_YARN = {
    "type": "yarn",
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_GLM = {
    **_FILE,
    "attention_bias": True,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336],
}
_GATED_DELTA = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_LLAMA = {
    **_FILE,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {**_QWEN, "model_type": "qwen2", "num_hidden_layers": 28, "use_mrope": False},
    "MiMo-7B-RL": {
        **_QWEN,
        "model_type": "mimo",
        "attention_bias": True,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "num_nextn_predict_layers": 1,
        "rope_theta": 640000,
    },
    "Qwen2.5-0.5B": {
        **_QWEN,
        "model_type": "qwen2",
        "num_hidden_layers": 24,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {**_QWEN3, "model_type": "qwen3", "num_hidden_layers": 36, "max_window_layers": 36},
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "Qwen3-8B-FP8": {
        **_QWEN3,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "quantization_config": _FP8,
    },
    "Qwen1.5-MoE-A2.7B": {
        **_QWEN,
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
    },
    "Mixtral-8x7B": {
        **_FILE,
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "Llama-3-8B": {**_LLAMA, "model_type": "llama", "rope_scaling": None},
    "Llama-3.1-8B": {**_LLAMA, "model_type": "llama", "rope_scaling": {**_LLAMA3, "factor": 8.0}},
    "Llama-3.2-1B": {
        **_LLAMA,
        "model_type": "llama",
        "head_dim": 64,
        "rope_scaling": {**_LLAMA3, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        **_LLAMA,
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "GLM-4-9B-0414": {
        **_GLM,
        "model_type": "glm4",
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
    },
    "GLM-4.5": {
        **_GLM,
        "model_type": "glm4_moe",
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 92,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "GLM-4.7-Flash": {
        **{
            name: value
            for name, value in _DEEPSEEK.items()
            if name not in ("auto_map", "ep_size", "scoring_func", "seq_aux")
        },
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "qk_nope_head_dim": 192,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    "GLM-5": {
        **{
            name: value
            for name, value in _DEEPSEEK.items()
            if name not in ("auto_map", "aux_loss_alpha", "seq_aux")
        },
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "n_group": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    "DeepSeek-V3": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "quantization_config": _FP8,
        "rope_scaling": {**_YARN, "factor": 40, "beta_fast": 32, "beta_slow": 1},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    "Moonlight-16B-A3B": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
    },
    "Qwen3-Next-80B-A3B": {
        **_FILE,
        **_GATED_DELTA,
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
    "Qwen3.5-9B, text": {
        **_FILE,
        **_GATED_DELTA,
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": 32,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "MiniMax-M2.5": {
        **_FILE,
        "model_type": "minimax_m2",
        "attn_type_list": [1, 1],
        "head_dim": 128,
        "layernorm_full_attention_beta": 1.0,
        "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": _FP8,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "Kimi-K2": {
        **_DEEPSEEK,
        "model_type": "kimi_k2",
        "n_group": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 0,
        "quantization_config": _FP8,
        "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
    },
}
"""As published, but for sizes that matter to no check."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_accepted(name: str):
    check_config(PUBLISHED[name], name)


REQUIRED: dict[str, dict[str, Any]] = {
    "minimax_m2": {"rotary_dim": 64, "use_qk_norm": True, "use_routing_bias": True}
}
"""Keys of the published models that transformers does not have and SGLang reads."""


CONSTANT = {
    ("minimax_m2", "norm_topk_prob"),
    ("mixtral", "norm_topk_prob"),
    ("qwen3_5_moe_text", "decoder_sparse_step"),
}
"""Settings of a family that transformers has no key for."""


@pytest.mark.parametrize("family", FAMILIES)
def test_default_configs_of_transformers_are_accepted(family: str):
    written = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    check_config(written | REQUIRED.get(family, {}), family)
    known = {
        name: value
        for name, value in FAMILIES[family].defaults.items()
        if (family, name) not in CONSTANT
    }
    assert known == {name: written[name] for name in known}


def test_transformers_does_not_have_the_renamed_model_types():
    assert not SAME_AS.keys() & set(CONFIG_MAPPING)


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen2.5-7B", {"model_type": "gemma2"}, "model_type"),
    ("Qwen2.5-7B", {"model_type": "gemma3"}, "model_type"),
    ("Qwen2.5-7B", {"model_type": None}, "model_type"),
    ("Qwen2.5-7B", SLIDING, "use_sliding_window"),
    (
        "Qwen2.5-7B",
        SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types",
    ),
    (
        "Qwen2.5-7B",
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "dual_chunk_attention_config",
    ),
    ("Qwen2.5-7B", {"hidden_act": "gelu"}, "hidden_act"),
    ("Qwen2.5-7B", {"attention_dropout": 0.1}, "attention_dropout"),
    ("Qwen2.5-7B", {"is_causal": False}, "is_causal"),
    ("Qwen2.5-7B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ("Qwen2.5-7B", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type"),
    ("GLM-4-9B-0414", {"rope_scaling": {**_YARN, "factor": 4.0}}, "rope_scaling.rope_type"),
    (
        "Qwen2.5-7B",
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "rope_scaling.rope_type",
    ),
    (
        "Qwen2.5-7B",
        {"rope_scaling": {"type": "default", "mrope_section": [16]}},
        "rope_scaling.mrope_section",
    ),
    (
        "Qwen2.5-7B",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters",
    ),
    ("Qwen2.5-7B", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
    ("Qwen2.5-7B", {"num_attention_sinks": 4}, "num_attention_sinks"),
    ("Qwen2.5-7B", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("Qwen2.5-7B", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ("Qwen2.5-7B", {"logits_scaling": 8.0}, "logits_scaling"),
    ("Qwen2.5-7B", {"something_new": 0.7}, "something_new"),
    ("Qwen2.5-7B", {"something_new": True}, "something_new"),
    ("Qwen2.5-7B", {"max_window_layers": "28"}, "Qwen2.5-7B"),
    ("Qwen2.5-7B", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("Qwen3-8B", SLIDING, "use_sliding_window"),
    ("Qwen3-8B", {"attention_bias": True}, "attention_bias"),
    ("Qwen3-30B-A3B", {**SLIDING, "max_window_layers": 48}, "use_sliding_window"),
    ("Qwen3-30B-A3B", {"attention_bias": True}, "attention_bias"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("Qwen3-30B-A3B", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("Mixtral-8x7B", {"sliding_window": 4096}, "sliding_window"),
    ("Mixtral-8x7B", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("Mixtral-8x7B", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("Qwen3-Next-80B-A3B", {"layer_types": ["chunked_attention"]}, "layer_types"),
    ("Qwen3-Next-80B-A3B", {"attention_bias": True}, "attention_bias"),
    ("Qwen3-Next-80B-A3B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
    ("Qwen3.5-9B, text", {"attn_output_gate": False}, "attn_output_gate"),
    ("Qwen3-8B", {"layer_types": ["linear_attention"]}, "layer_types"),
    ("MiniMax-M2.5", {"use_routing_bias": False}, "use_routing_bias"),
    ("MiniMax-M2.5", {"use_qk_norm": None}, "use_qk_norm"),
    ("MiniMax-M2.5", {"attn_type_list": [0, 1]}, "attn_type_list"),
    ("MiniMax-M2.5", {"rotary_dim": None}, "rotary_dim"),
    ("MiniMax-M2.5", {"partial_rotary_factor": 0.25}, "rotary_dim"),
    ("Llama-3-8B", {"attention_bias": True}, "attention_bias"),
    ("Llama-3-8B", {"mlp_bias": True}, "mlp_bias"),
    (
        "Llama-3-8B",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_scaling.rope_type",
    ),
    (
        "Llama-3.1-8B",
        {"rope_scaling": {**_LLAMA3, "factor": 8.0, "low_freq_factor": 2.0}},
        "rope_scaling.low_freq_factor",
    ),
    ("Llama-3.1-8B", {"rope_scaling": _LLAMA3}, "rope_scaling"),
    ("GLM-4.5", {"num_experts_per_tok": 1}, "norm_topk_prob"),
    ("GLM-4.5", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("GLM-4.5", {"n_group": 8, "topk_group": 2}, "num_experts_per_tok"),
    ("GLM-4.5", {"scoring_func": "softmax"}, "scoring_func"),
    ("GLM-4.5", {"first_k_dense_replace": 100}, "first_k_dense_replace"),
    ("GLM-4.7-Flash", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    ("GLM-4.7-Flash", {"mlp_layer_types": ["dense", "dense"]}, "mlp_layer_types"),
    ("GLM-4.7-Flash", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    ("GLM-5", {"indexer_types": ["shared", "full"]}, "indexer_types"),
    ("GLM-5", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "first_k_dense_replace"),
    ("GLM-5", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("DeepSeek-V3", {"attention_bias": True}, "attention_bias"),
    ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave"),
    ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func"),
    ("DeepSeek-V3", {"topk_method": "group_limited_greedy"}, "topk_method"),
    ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("DeepSeek-V3", {"head_dim": 128}, "head_dim"),
    ("DeepSeek-V3", {"qk_head_dim": 128}, "qk_head_dim"),
    ("DeepSeek-V3", {"num_experts_per_tok": 4}, "num_experts_per_tok"),
    (
        "DeepSeek-V3",
        {"rope_scaling": {**_YARN, "factor": 40, "mscale_all_dim": 0.0, "mscale": 0.7}},
        "mscale",
    ),
    ("DeepSeek-V3", {"rope_scaling": {**_YARN, "factor": 40, "mscale": None}}, "mscale"),
    (
        "DeepSeek-V3",
        {"rope_scaling": {**_YARN, "factor": 40, "attention_factor": 2.0}},
        "attention_factor",
    ),
    ("DeepSeek-V3", {"rope_scaling": {**_YARN, "factor": 40, "truncate": False}}, "truncate"),
    ("DeepSeek-V3", {"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling"),
]


@pytest.mark.parametrize(("model", "changed", "key"), REFUSED)
def test_unsupported_keys_are_refused_by_name(model: str, changed: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as caught:
        check_config({**PUBLISHED[model], **changed}, model)
    assert key in str(caught.value.where)


def test_one_error_names_all_unsupported_keys():
    with pytest.raises(
        ConfigError, match=r"(?s)attention_bias, mlp_bias.*attention_bias = True; mlp_bias = True"
    ):
        check_config(
            {**PUBLISHED["Llama-3-8B"], "attention_bias": True, "mlp_bias": True}, "config.json"
        )


def test_the_check_needs_neither_torch_nor_transformers():
    program = (
        "import sys, rlpipe.engines.megatron.bridges.supported; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == "set()"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {**SLIDING, "max_window_layers": 2}),
    ("qwen2", {**SLIDING, "sliding_window": 256}),
    ("qwen2", {**SLIDING, "use_sliding_window": False}),
    ("qwen2", {"head_dim": 32, "hidden_act": "swish", "rope_theta": 1000.0, "rms_norm_eps": 0.01}),
    ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "head_dim": 32}),
    ("llama3", {"rope_scaling": {**families._YARN, "factor": 4.0}}),
    ("qwen2", {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    ("qwen3", {"rope_scaling": {**families._YARN, "factor": 4.0, "mscale": 0.7}}),
    ("qwen3_moe", {"rope_scaling": YARN}),
    ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    ("glm4", {"partial_rotary_factor": 0.25, "tie_word_embeddings": True}),
    ("glm4.5", {"partial_rotary_factor": 0.25, "attention_bias": False}),
    ("glm4.5", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("glm4.5", {"n_group": 4, "topk_group": 4, "n_shared_experts": 2}),
    (
        "glm4.5",
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "tie_word_embeddings": True},
    ),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False, "tie_word_embeddings": True}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen2_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    ("mixtral", {"head_dim": 32, "tie_word_embeddings": True}),
    (
        "deepseek_v3",
        {"rope_scaling": {**families._YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    (
        "deepseek_v3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    ("moonlight", {"tie_word_embeddings": True, "first_k_dense_replace": 0}),
]


def test_a_rotation_under_its_new_name_alone_is_used(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "glm4", "rope_parameters": rope})
    )
    found: Any = read_config(str(tmp_path))
    assert (found.partial_rotary_factor, found.rope_theta) == (0.25, 1000.0)


@pytest.mark.parametrize(("family", "changed"), COMPUTED)
def test_accepted_configs_score_like_transformers(
    family: str, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(families.FAMILIES, "changed", {**families.FAMILIES[family], **changed})
    directory = families.make("changed", tmp_path)
    check_supported(tmp_path, "model")
    ours = engine(directory, TrainConfig(max_tokens_per_gpu=64), 0, 1, free_port())
    batch = make_batch()
    try:
        ours.load_hf()
        difference = np.abs(
            ours.score(batch) - reference.score(reference.load(directory), batch, 0.8)
        ).max()
    finally:
        ours.close()
    assert difference < 1e-5
