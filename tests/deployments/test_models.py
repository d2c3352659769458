"""Model presets with the architecture of the real models: loading, layout and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlpipe.config.load import PRESETS, load_run, presets
from rlpipe.config.run import RunConfig
from rlpipe.config.text import parse
from rlpipe.engines.megatron.bridges.bridge import LOCAL, with_own_table
from rlpipe.engines.megatron.bridges.hf_config import flat_rope
from rlpipe.engines.megatron.bridges.supported import check_config
from rlpipe.engines.megatron.model.build import split_arguments
from rlpipe.engines.megatron.model.sparse import check_layout
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core.parallel_states import ParallelStates
from megatron.core.transformer.transformer_block import get_num_layers_to_build

GB, STATE_BYTES, SHARDED_BYTES = 10**9, 6, 12
"""A parameter's weight and gradient; its float32 copy and two moments, which the distributed
optimizer shards."""
_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_QWEN3_MOE |= {"num_key_value_heads": 4}
_GLM45 = {"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
_KIMI = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _sizes(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }


_DISTILLED = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "vocab_size": 248320,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def _few_layers(number: int) -> dict[str, Any]:
    """Return the architecture of the first layers of DeepSeek-V3."""
    return {"model_type": "deepseek_v3", "num_hidden_layers": number}


MODELS: dict[str, tuple[float, int, dict[str, Any]]] = {
    "deepseek-v3": (671, 141, {"model_type": "deepseek_v3"}),
    "deepseek-v3-5layer": (26.7, 141, _few_layers(5)),
    "deepseek-v3-20layer": (199, 141, _few_layers(20)),
    "glm4-9b": (9.4, 80, {"model_type": "glm4"}),
    "glm4-32b": (
        32.6,
        141,
        {"model_type": "glm4", "num_key_value_heads": 8, **_sizes(6144, 61, 48, 23040)},
    ),
    "glm4.5-106b-a12b": (107, 141, {**_GLM45}),
    "glm4.5-355b-a32b": (
        353,
        141,
        {
            **_GLM45,
            **_sizes(5120, 92, 96, 12288),
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "first_k_dense_replace": 3,
            "use_qk_norm": True,
        },
    ),
    "glm4.7-30b-a3b": (30, 141, {"model_type": "glm4_moe_lite"}),
    "glm5-744b-a40b": (
        744,
        141,
        {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3},
    ),
    "gpt-oss-20b": (
        20.9,
        80,
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "kimi-k2": (
        1026,
        141,
        {
            **_KIMI,
            **_sizes(7168, 61, 64, 18432),
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
        },
    ),
    "llama3.1-70b": (70.6, 141, {**_LLAMA3, **_sizes(8192, 80, 64, 28672)}),
    "llama3.1-8b": (8.0, 80, {**_LLAMA3, **_sizes(4096, 32, 32, 14336)}),
    "llama3.2-3b": (
        3.2,
        80,
        {
            **_LLAMA3,
            **_sizes(3072, 28, 24, 8192),
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "mimo-7b": (
        7.6,
        80,
        {
            "model_type": "qwen2",
            "vocab_size": 151680,
            "num_key_value_heads": 8,
            **_sizes(4096, 36, 32, 11008),
        },
    ),
    "minimax-m2": (229, 141, {"model_type": "minimax_m2"}),
    "moonlight-16b-a3b": (
        16,
        80,
        {
            **_KIMI,
            **_sizes(2048, 27, 16, 11264),
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
        },
    ),
    "qwen2.5-0.5b": (
        0.49,
        80,
        {**_DISTILLED, **_sizes(896, 24, 14, 4864), "tie_word_embeddings": True},
    ),
    "qwen2.5-1.5b": (
        1.54,
        80,
        {**_DISTILLED, **_sizes(1536, 28, 12, 8960), "tie_word_embeddings": True},
    ),
    "qwen2.5-3b": (
        3.09,
        80,
        {**_DISTILLED, **_sizes(2048, 36, 16, 11008), "tie_word_embeddings": True},
    ),
    "qwen2.5-32b": (
        32.8,
        141,
        {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "num_key_value_heads": 8,
            **_sizes(5120, 64, 40, 27648),
        },
    ),
    "qwen2.5-7b": (
        7.6,
        80,
        {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "num_key_value_heads": 4,
            **_sizes(3584, 28, 28, 18944),
        },
    ),
    "qwen3-0.6b": (0.6, 80, {**_QWEN3, **_sizes(1024, 28, 16, 3072), "tie_word_embeddings": True}),
    "qwen3-1.7b": (1.72, 80, {**_QWEN3, **_sizes(2048, 28, 16, 6144), "tie_word_embeddings": True}),
    "qwen3-14b": (14.8, 80, {**_QWEN3, **_sizes(5120, 40, 40, 17408)}),
    "qwen3-next-80b-a3b": (79.7, 141, {"model_type": "qwen3_next"}),
    "qwen3.5-0.8b": (
        0.75,
        80,
        {
            **_QWEN35,
            **_sizes(1024, 24, 8, 3584),
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-4b": (4.2, 80, {**_QWEN35, **_sizes(2560, 32, 16, 9216), "tie_word_embeddings": True}),
    "qwen3.5-9b": (9.0, 80, {**_QWEN35, **_sizes(4096, 32, 16, 12288)}),
    "qwen3.5-27b": (
        26.9,
        141,
        {**_QWEN35, **_sizes(5120, 64, 24, 17408), "linear_num_value_heads": 48},
    ),
    "qwen3.5-35b-a3b": (34.7, 141, {"model_type": "qwen3_5_moe_text"}),
    "qwen3-235b-a22b": (
        235,
        141,
        {**_QWEN3_MOE, **_sizes(4096, 94, 64, 12288), "moe_intermediate_size": 1536},
    ),
    "qwen3-30b-a3b": (
        30.5,
        141,
        {**_QWEN3_MOE, **_sizes(2048, 48, 32, 6144), "moe_intermediate_size": 768},
    ),
    "qwen3-32b": (32.8, 141, {**_QWEN3, **_sizes(5120, 64, 64, 25600)}),
    "qwen3-4b": (4.0, 80, {**_QWEN3, **_sizes(2560, 36, 32, 9728), "tie_word_embeddings": True}),
    "qwen3-8b": (8.2, 80, {**_QWEN3, **_sizes(4096, 36, 32, 12288)}),
}
"""Preset: billions of parameters; gigabytes of the GPUs that it is for; the model's config.json."""

SLIME_SCRIPTS = {
    "deepseek-v3-20layer": "deepseek-v3-20layer",
    "deepseek-v3-5layer": "deepseek-v3-5layer",
    "deepseek-v3": "deepseek-v3",
    "glm4-32B": "glm4-32b",
    "glm4-9B": "glm4-9b",
    "glm4.5-106B-A12B": "glm4.5-106b-a12b",
    "glm4.5-355B-A32B": "glm4.5-355b-a32b",
    "glm4.7-30B-A3B": "glm4.7-30b-a3b",
    "glm5-744B-A40B": "glm5-744b-a40b",
    "glm5.2-744B-A40B": "glm5-744b-a40b",
    "kimi-k2-thinking": "kimi-k2",
    "kimi-k2": "kimi-k2",
    "llama3.1-8B-Instruct": "llama3.1-8b",
    "llama3.2-3B-Instruct-amd": "llama3.2-3b",
    "llama3.2-3B-Instruct": "llama3.2-3b",
    "mimo-7B-rl": "mimo-7b",
    "minimax-m2": "minimax-m2",
    "moonlight": "moonlight-16b-a3b",
    "qwen2.5-0.5B": "qwen2.5-0.5b",
    "qwen2.5-1.5B": "qwen2.5-1.5b",
    "qwen2.5-32B": "qwen2.5-32b",
    "qwen2.5-3B": "qwen2.5-3b",
    "qwen2.5-7B": "qwen2.5-7b",
    "qwen3-0.6B": "qwen3-0.6b",
    "qwen3-1.7B": "qwen3-1.7b",
    "qwen3-14B": "qwen3-14b",
    "qwen3-235B-A22B": "qwen3-235b-a22b",
    "qwen3-30B-A3B": "qwen3-30b-a3b",
    "qwen3-32B": "qwen3-32b",
    "qwen3-4B-Instruct-2507": "qwen3-4b",
    "qwen3-4B": "qwen3-4b",
    "qwen3-8B": "qwen3-8b",
    "qwen3-next-80B-A3B": "qwen3-next-80b-a3b",
    "qwen3.5-0.8B": "qwen3.5-0.8b",
    "qwen3.5-27B": "qwen3.5-27b",
    "qwen3.5-35B-A3B-vl": None,
    "qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "qwen3.5-4B": "qwen3.5-4b",
    "qwen3.5-9B": "qwen3.5-9b",
}
"""Model script of slime (commit 624b824a) → preset; None: a model type that is refused by name."""

RECIPE = """\
num_rollout: 1
model: {source: {type: huggingface, hf_checkpoint: /models/m}}
data: {prompts: {type: file, paths: [a.jsonl]}}
rollout: {rollout_batch_size: 256, n_samples_per_prompt: 2}
reward: {function: {type: math}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "any.yaml"
    path.write_text(RECIPE)
    return path


def test_every_preset_is_tested_here():
    assert sorted(MODELS) == presets()


def test_every_model_script_of_slime_has_a_preset_or_is_refused():
    assert len(SLIME_SCRIPTS) == 39
    assert {preset for preset in SLIME_SCRIPTS.values() if preset} <= set(presets())
    for kind in ("qwen3_5", "qwen3_5_moe"):
        with pytest.raises(ConfigError, match=rf"(?s){kind}.*tools\.text_model"):
            check_config({"model_type": kind}, "config.json")


@pytest.mark.parametrize("preset", presets())
def test_a_preset_sets_layout_and_no_learning_settings(preset):
    values, _ = parse((PRESETS / f"{preset}.yaml").read_text(), preset)
    assert values.keys() <= {"model", "resources", "engine", "sync", "train"}
    assert values["train"].keys() <= {
        "max_tokens_per_gpu",
        "use_distributed_optimizer",
        "parallel",
        "megatron",
    }
    assert values["model"] == {"dtype": "bfloat16"}


@pytest.mark.parametrize("preset", presets())
def test_a_preset_fits_the_real_model(recipe, preset):
    billions, gpu, architecture = MODELS[preset]
    run = load_run(recipe, [f"preset={preset}"])
    config = _hf_config(architecture)
    for_transformer, _, _ = split_arguments(run.train.megatron)
    parallel = run.train.parallel
    sizes = ParallelStates(
        tp_size=parallel.tensor_model_parallel_size,
        pp_size=parallel.pipeline_model_parallel_size,
        cp_size=parallel.context_parallel_size,
        ep_size=parallel.expert_model_parallel_size,
        etp_size=parallel.expert_tensor_parallel_size,
    )
    bridge = with_own_table(config, torch.bfloat16, parallel_states=sizes)
    bridge.set_extra_args(**LOCAL, sequence_parallel=parallel.sequence_parallel, **for_transformer)
    stages = [
        get_num_layers_to_build(bridge.config, pp_rank=stage) for stage in range(sizes.pp_size)
    ]
    assert sum(stages) == config.num_hidden_layers and min(stages) > 0
    if config.model_type == "glm_moe_dsa":
        check_layout(bridge.config)
    assert config.vocab_size % sizes.tp_size == 0
    dense, experts = _parameters(config)
    assert (dense + experts) / 1e9 == pytest.approx(billions, rel=0.03)
    held = _bytes(run, dense, experts)
    assert held < 0.8 * gpu * GB, f"{held / GB:.0f} GB of state on a GPU of {gpu} GB"


def _hf_config(values: dict[str, Any]) -> Any:
    """Return the configuration as `read_config` reads it."""
    return flat_rope(CONFIG_MAPPING[values["model_type"]].from_dict(values))


def _parameters(config: Any) -> tuple[int, int]:
    """Return the number of parameters outside of experts, and in experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    counted = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in counted.items() if ".mlp.experts." in name)
    return sum(counted.values()) - experts, experts


def _bytes(run: RunConfig, dense: int, experts: int) -> float:
    """Return bytes of weights, gradients and optimizer on one trainer rank."""
    parallel = run.train.parallel
    ranks = run.resources.trainer_ranks
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    expert_split = (
        parallel.expert_model_parallel_size
        * parallel.expert_tensor_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    total = 0.0
    for parameters, parts in ((dense, split), (experts, expert_split)):
        assert ranks % parts == 0
        total += parameters / parts * (STATE_BYTES + SHARDED_BYTES / (ranks // parts))
    return total
