"""`FAMILIES`: the model types that the trainer computes, with their keys, values and rules.

Each entry was decided by comparing the log-probs of a tiny model in the trainer and in transformers
(`tests/engines/megatron/bridges/test_supported.py`). `supported` checks a config.json against this
table. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.engines.megatron.bridges.family import (
    MROPE,
    WINDOW_DEFAULTS,
    WINDOWS,
    Family,
    Problem,
    check_window,
    check_window_by_layer,
    check_window_of_all_layers,
    words,
)
from rlpipe.engines.megatron.bridges.vision_families import VISION_FAMILIES


def _check_mixtral_window(config: Mapping[str, Any]) -> Iterator[Problem]:
    yield from check_window(config, "sliding_window", "null")


def _check_sigmoid_normalisation(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the normalisation of a sigmoid router.

    Megatron's weights sum to 1 exactly if the router chooses more than one expert.
    """
    chosen = config["num_experts_per_tok"]
    normalised = bool(config["norm_topk_prob"])
    if normalised != (chosen > 1):
        found = f"{config['norm_topk_prob']!r}, with num_experts_per_tok {chosen}"
        expected = "true" if chosen > 1 else "false"
        yield (
            "norm_topk_prob",
            found,
            f"norm_topk_prob: {expected} (weights of several experts sum to 1)",
        )


def _check_softmax_normalisation(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the normalisation of a softmax router.

    Megatron refuses to normalise the weight of a single expert, which would always be 1.
    """
    if config["norm_topk_prob"] and config["num_experts_per_tok"] == 1:
        yield (
            "num_experts_per_tok",
            1,
            "num_experts_per_tok: 2 or more, if weights are normalised",
        )


def _check_minimax(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of MiniMax-M2: settings that transformers takes for granted and SGLang reads."""
    for name in ("use_qk_norm", "use_routing_bias"):
        if config.get(name) is not True:
            yield name, config.get(name), f"{name}: true"
    if set(config.get("attn_type_list") or (1,)) != {1}:
        yield "attn_type_list", config["attn_type_list"], "attn_type_list: 1 for every layer"
    rope = config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = config.get("rotary_dim")
    if rotated is None:
        yield "rotary_dim", None, "rotary_dim, the number of rotated features of a head"
    elif factor is not None and factor * config["head_dim"] != rotated:
        yield "rotary_dim", rotated, f"rotary_dim: {factor} of head_dim {config['head_dim']}"


def _check_gpt_oss(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of gpt-oss: a window, and one number of experts under both names."""
    window = config.get("sliding_window", 128)
    if not isinstance(window, int) or window < 1:
        yield "sliding_window", window, "sliding_window: a number of tokens"
    chosen = config["num_experts_per_tok"]
    if chosen < 2:
        yield "num_experts_per_tok", chosen, "num_experts_per_tok: 2 or more"
    if config.get("experts_per_token", chosen) != chosen:
        yield "experts_per_token", config["experts_per_token"], f"experts_per_token: {chosen}"


def _check_expert_groups(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the groups of experts.

    Megatron ranks groups by their best k // topk_group experts, the models by their best two.
    """
    groups = config["n_group"] or 1
    best = config["topk_group"] or 1
    chosen = config["num_experts_per_tok"]
    if best < groups and chosen // best != 2:
        found = f"{chosen}, with topk_group {best} of n_group {groups}"
        yield "num_experts_per_tok", found, f"num_experts_per_tok: {2 * best}, twice topk_group"


def _check_experts_in_all_layers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of Qwen: all layers have experts."""
    if config.get("mlp_only_layers"):
        yield "mlp_only_layers", config["mlp_only_layers"], "mlp_only_layers: []"
    if config["decoder_sparse_step"] != 1:
        yield "decoder_sparse_step", config["decoder_sparse_step"], "decoder_sparse_step: 1"


def _check_dense_layers_first(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of GLM-4.7-Flash: some dense layers, then only layers with experts.

    transformers reads the list `mlp_layer_types`, not the number `first_k_dense_replace`.
    """
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (
        config["num_hidden_layers"] - 1
    )
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if dense == len(kinds) or set(kinds[dense:]) != {"sparse"} or set(kinds[:dense]) - {"dense"}:
        yield "mlp_layer_types", kinds, "mlp_layer_types: 'dense' layers, then 'sparse' layers"
    elif config.get("first_k_dense_replace", dense) != dense:
        yield (
            "first_k_dense_replace",
            config["first_k_dense_replace"],
            f"first_k_dense_replace: {dense}, as in mlp_layer_types",
        )


def _check_leading_dense_layers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of GLM-5: as of GLM-4.7-Flash, but the number is the default of the list."""
    dense = config["first_k_dense_replace"]
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
    yield from _check_dense_layers_first({**config, "mlp_layer_types": kinds})


def _check_indexers(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of GLM-5: the first layer selects keys for the layers without an indexer."""
    kinds = config.get("indexer_types") or ["full"]
    if kinds[0] != "full" or set(kinds) - {"full", "shared"}:
        yield "indexer_types", kinds, "indexer_types: 'full', then 'full' or 'shared'"


def _check_some_layer_has_experts(config: Mapping[str, Any]) -> Iterator[Problem]:
    if config["first_k_dense_replace"] > config["num_hidden_layers"]:
        found = config["first_k_dense_replace"]
        most = config["num_hidden_layers"]
        yield (
            "first_k_dense_replace",
            found,
            f"first_k_dense_replace: at most num_hidden_layers, {most}",
        )


def _check_latent_head_sizes(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Check sizes that follow from other sizes. transformers' `head_dim` is the rotation's."""
    rotated = config["qk_rope_head_dim"]
    unrotated = config["qk_nope_head_dim"]
    for name, size in (("head_dim", rotated), ("qk_head_dim", rotated + unrotated)):
        if config.get(name) not in (None, size):
            yield name, config[name], f"{name}: {size}, or no such key"


_QWEN_EXPERTS = words(
    "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts_per_tok"
)
_EXPERT_COUNTS = words("num_experts num_local_experts")
_SIGMOID_EXPERTS = words("""
    first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok num_local_experts routed_scaling_factor topk_group
""")
_LATENT = words("kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim")
_LATENT_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "moe_layer_freq": (1,),
    "rope_interleave": (None, True),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
_QWEN_EXPERTS_DEFAULTS = {
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "max_position_embeddings": 32768,
}
_GATED_DELTA = words("""
    full_attention_interval head_dim linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim mtp_num_hidden_layers
    partial_rotary_factor
""")
_GATED_DELTA_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attn_output_gate": (None, True),
    "mamba_ssm_dtype": (None, "float32"),
    "mtp_use_dedicated_embeddings": (None, False),
    "output_gate_type": (None, "swish"),
}
_GATED_DELTA_TYPES = ("full_attention", "linear_attention")
_LATENT_RULES = (_check_sigmoid_normalisation, _check_expert_groups, _check_latent_head_sizes)

FAMILIES: dict[str, Family] = {
    **VISION_FAMILIES,
    "deepseek_v3": Family(
        reads=_SIGMOID_EXPERTS | _LATENT,
        only=_LATENT_ONLY,
        ropes=("default", "yarn"),
        rules=(*_LATENT_RULES, _check_some_layer_has_experts),
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 8,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "topk_group": 4,
        },
    ),
    "glm4": Family(reads=words("attention_bias partial_rotary_factor")),
    "glm4_moe": Family(
        reads=_SIGMOID_EXPERTS | words("attention_bias partial_rotary_factor use_qk_norm"),
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        rules=(_check_sigmoid_normalisation, _check_expert_groups, _check_some_layer_has_experts),
        defaults={
            "first_k_dense_replace": 1,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "topk_group": 1,
        },
    ),
    "glm4_moe_lite": Family(
        reads=_SIGMOID_EXPERTS | _LATENT | {"mlp_layer_types"},
        only=_LATENT_ONLY,
        ropes=("default", "yarn"),
        rules=(*_LATENT_RULES, _check_dense_layers_first),
        defaults={
            "n_group": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 47,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "topk_group": 1,
        },
    ),
    "glm_moe_dsa": Family(
        reads=_SIGMOID_EXPERTS
        | _LATENT
        | words("""
            index_head_dim index_n_heads index_share_for_mtp_iteration index_skip_topk_offset
            index_topk index_topk_freq index_topk_pattern indexer_rope_interleave indexer_types
            mlp_layer_types num_experts
        """),
        only=_LATENT_ONLY,
        layer_types=("deepseek_sparse_attention",),
        rules=(*_LATENT_RULES, _check_leading_dense_layers, _check_indexers),
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 78,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "topk_group": 1,
        },
    ),
    "gpt_oss": Family(
        # YaRN has the initial length, too.
        reads=_EXPERT_COUNTS
        | words("experts_per_token initial_context_length num_experts_per_tok sliding_window"),
        only={"attention_bias": (None, True), "swiglu_limit": (None, 7)},
        ropes=("default", "yarn"),
        rope_keys=frozenset({"truncate"}),
        layer_types=("full_attention", "sliding_attention"),
        quantizations=("mxfp4",),
        rules=(_check_gpt_oss,),
        defaults={"head_dim": 64, "num_experts_per_tok": 4},
    ),
    "llama": Family(
        only={"attention_bias": (None, False), "mlp_bias": (None, False)},
        ropes=("default", "linear", "llama3", "yarn"),
    ),
    "minimax_m2": Family(
        reads=words("""
            attn_type_list mlp_intermediate_size mtp_transformer_layers num_experts_per_tok
            num_local_experts num_mtp_modules partial_rotary_factor rotary_dim shared_moe_mode
            use_mtp use_qk_norm use_routing_bias
        """),
        only={
            "layernorm_full_attention_beta": (None, 1),
            "layernorm_linear_attention_beta": (None, 1),
            "layernorm_mlp_beta": (None, 1),
            "qk_norm_type": (None, "per_layer"),
            "router_jitter_noise": (None, 0),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (None, 0),
        },
        rules=(_check_minimax, _check_sigmoid_normalisation),
        defaults={"head_dim": 128, "norm_topk_prob": True, "num_experts_per_tok": 8},
    ),
    "mixtral": Family(
        reads=_EXPERT_COUNTS | words("num_experts_per_tok sliding_window"),
        only={"router_jitter_noise": (None, 0)},
        rules=(_check_mixtral_window, _check_softmax_normalisation),
        defaults={
            "max_position_embeddings": 131072,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2": Family(
        ropes=("default", "yarn"),
        reads=WINDOWS,
        only={"attention_bias": (None, False, True), "qkv_bias": (None, True)},
        rules=(check_window_by_layer,),
        defaults=WINDOW_DEFAULTS,
    ),
    "qwen2_moe": Family(
        ropes=("default", "yarn"),
        reads=WINDOWS
        | _QWEN_EXPERTS
        | _EXPERT_COUNTS
        | words("qkv_bias shared_expert_intermediate_size"),
        rules=(check_window_by_layer, _check_softmax_normalisation, _check_experts_in_all_layers),
        defaults={
            **WINDOW_DEFAULTS,
            **_QWEN_EXPERTS_DEFAULTS,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
        },
    ),
    "qwen3": Family(
        source="mbridge",
        ropes=("default", "yarn"),
        reads=WINDOWS,
        only={"attention_bias": (None, False), "use_qk_norm": (None, True)},
        rules=(check_window_by_layer,),
        defaults=WINDOW_DEFAULTS,
    ),
    "qwen3_5_moe_text": Family(
        reads=_GATED_DELTA
        | _QWEN_EXPERTS
        | _EXPERT_COUNTS
        | words("shared_expert_intermediate_size"),
        only=_GATED_DELTA_ONLY,
        rope_keys=MROPE,
        layer_types=_GATED_DELTA_TYPES,
        rules=(_check_experts_in_all_layers,),
        defaults={"decoder_sparse_step": 1},
    ),
    "qwen3_5_text": Family(
        reads=_GATED_DELTA,
        only=_GATED_DELTA_ONLY,
        rope_keys=MROPE,
        layer_types=_GATED_DELTA_TYPES,
    ),
    "qwen3_next": Family(
        reads=_GATED_DELTA
        | _QWEN_EXPERTS
        | _EXPERT_COUNTS
        | words("shared_expert_intermediate_size"),
        only=_GATED_DELTA_ONLY,
        layer_types=_GATED_DELTA_TYPES,
        rules=(_check_softmax_normalisation, _check_experts_in_all_layers),
        defaults={"decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts_per_tok": 10},
    ),
    "qwen3_moe": Family(
        ropes=("default", "yarn"),
        reads=WINDOWS | _QWEN_EXPERTS | _EXPERT_COUNTS,
        only={"attention_bias": (None, False), "use_qk_norm": (None, True)},
        rules=(
            check_window_of_all_layers,
            _check_softmax_normalisation,
            _check_experts_in_all_layers,
        ),
        defaults={**_QWEN_EXPERTS_DEFAULTS, "num_experts_per_tok": 8},
    ),
}
"""transformers' model type → its support."""
