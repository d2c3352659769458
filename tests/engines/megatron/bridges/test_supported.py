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
from tests.engines.megatron.bridges.published import LATENT_YARN, LLAMA3_ROPE, PUBLISHED
from tests.engines.megatron.ranks import engine, make_batch


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_accepted(name: str):
    check_config(PUBLISHED[name], name)


REQUIRED: dict[str, dict[str, Any]] = {
    "minimax_m2": {"rotary_dim": 64, "use_qk_norm": True, "use_routing_bias": True},
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
    "qwen3_vl": {
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        }
    },
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
    if FAMILIES[family].tower:
        check_config(written | {"text_config": written["text_config"] | REQUIRED[family]}, family)
        written = written["text_config"]
    else:
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
    ("GLM-4-9B-0414", {"rope_scaling": {**LATENT_YARN, "factor": 4.0}}, "rope_scaling.rope_type"),
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
        {"rope_scaling": {**LLAMA3_ROPE, "factor": 8.0, "low_freq_factor": 2.0}},
        "rope_scaling.low_freq_factor",
    ),
    ("Llama-3.1-8B", {"rope_scaling": LLAMA3_ROPE}, "rope_scaling"),
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
        {"rope_scaling": {**LATENT_YARN, "factor": 40, "mscale_all_dim": 0.0, "mscale": 0.7}},
        "mscale",
    ),
    ("DeepSeek-V3", {"rope_scaling": {**LATENT_YARN, "factor": 40, "mscale": None}}, "mscale"),
    (
        "DeepSeek-V3",
        {"rope_scaling": {**LATENT_YARN, "factor": 40, "attention_factor": 2.0}},
        "attention_factor",
    ),
    ("DeepSeek-V3", {"rope_scaling": {**LATENT_YARN, "factor": 40, "truncate": False}}, "truncate"),
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
