"""Model flags of slime's scripts/models, compared with the config.json of their model
(rlpipe.slime.megatron_flags)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.load import load_run
from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of

DENSE = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention "
    "--use-rotary-position-embeddings"
)
EXPERTS = (
    "--moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --moe-grouped-gemm "
    "--moe-permute-fusion --moe-aux-loss-coeff 0"
)
SIGMOID = (
    f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-pre-softmax "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-router-bias-update-rate 0"
)
LATENT = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    f"{SIGMOID} --multi-latent-attention --kv-lora-rank 512 --qk-layernorm "
    "--attention-softmax-in-fp32 --no-rope-fusion --untie-embeddings-and-output-weights"
)
V3 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "head_dim": 64,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_scaling": {"type": "yarn", "factor": 40},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-9B": (
        f"--spec slime_plugins.models.glm4 get_glm_spec {DENSE} --num-layers 40 "
        "--hidden-size 4096 --num-query-groups 2 --norm-epsilon 1e-5 --post-self-attn-layernorm "
        "--post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5",
        {
            "num_hidden_layers": 40,
            "hidden_size": 4096,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama3.1-8B-Instruct": (
        f"{DENSE} --num-attention-heads 32 --hidden-size 4096 --kv-channels 128 "
        "--use-rope-scaling --rotary-scaling-factor 8.0",
        {
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        },
    ),
    "qwen3-30B-A3B": (
        f"{DENSE} {EXPERTS} --moe-router-score-function softmax --moe-token-drop-policy probs "
        "--qk-layernorm --num-experts 128",
        {"num_experts": 128},
    ),
    "deepseek-v3": (
        f"{LATENT} --hidden-size 7168 --num-attention-heads 128 --kv-channels 128 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --rotary-scaling-factor 40 --mscale 1.0 "
        "--mscale-all-dim 1.0 --moe-layer-freq [0]*3+[1]*58 "
        "--moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5",
        V3,
    ),
    "glm4.7-30B-A3B": (
        f"{LATENT} --hidden-size 2048 --num-attention-heads 20 --add-qkv-bias "
        "--no-position-embedding --kv-channels 192 --q-lora-rank 768 "
        "--qk-head-dim 192 --v-head-dim 256 --make-vocab-size-divisible-by 64",
        {
            "hidden_size": 2048,
            "num_attention_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
        },
    ),
}
"""Model family → special flags of its script, and the same settings in config.json."""


def read(folder: Path, flags: str, config: dict[str, Any]):
    (folder / "config.json").write_text(json.dumps(config))
    batch = "--rollout-batch-size 8 --n-samples-per-prompt 2"
    rest = f"--hf-checkpoint {folder} --prompt-data a.jsonl --num-rollout 1 {batch} --rm-type math"
    return load_run(BASE, overrides_of(read_flags(f"{flags} {rest}".split())))


@pytest.mark.parametrize("script", FAMILIES)
def test_the_flags_of_a_family_are_accepted_and_those_of_config_json_not_passed_on(
    tmp_path, script
):
    config = read(tmp_path, *FAMILIES[script])
    passed = {
        "attention_softmax_in_fp32",
        "moe_token_dispatcher_type",
        "moe_token_drop_policy",
        "moe_router_dtype",
    }
    assert config.train.megatron.keys() <= passed | {
        "moe_router_bias_update_rate",
        "make_vocab_size_divisible_by",
    }


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (
            "--rotary-scaling-factor 8",
            r"--rotary-scaling-factor 8\.0, but rope_scaling\.factor is 40",
        ),
        ("--moe-router-num-groups 1", "--moe-router-num-groups 1, but n_group is 8"),
        ("--moe-router-topk-scaling-factor 1.8", "routed_scaling_factor is 2"),
        ("--moe-aux-loss-coeff 0.001", "no auxiliary loss"),
    ],
)
def test_flags_of_another_model_are_refused(tmp_path, flags, word):
    with pytest.raises(ConfigError, match=word):
        read(tmp_path, flags, V3)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (
            "--num-layers-per-virtual-pipeline-stage 2",
            "num_layers_per_virtual_pipeline_stage",
            2,
        ),
        ("--num-virtual-stages-per-pipeline-rank 4", "virtual_pipeline_model_parallel_size", 4),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 8",
            "microbatch_group_size_per_vp_stage",
            8,
        ),
        ("--transformer-impl transformer_engine", None, None),
    ],
)
def test_flags_of_layers_and_their_chunks_set_keys(flags, key, value):
    megatron = [
        one for one in overrides_of(read_flags(flags.split())) if one.startswith("train.megatron.")
    ]
    assert megatron == ([] if key is None else [f"train.megatron.{key}={value}"])
