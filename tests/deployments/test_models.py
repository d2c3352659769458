"""Model presets with the architecture of the real models: loading, layout and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlpipe.config.load import PRESETS, load_run, presets
from rlpipe.config.run import RunConfig
from rlpipe.config.text import parse
from rlpipe.engines.megatron.bridges.bridge import BRIDGES, LOCAL, with_own_table
from rlpipe.engines.megatron.bridges.hf_config import flat_rope
from rlpipe.engines.megatron.model.build import split_arguments

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


MODELS: dict[str, tuple[float, int, dict[str, Any]]] = {
    "deepseek-v3": (671, 141, {"model_type": "deepseek_v3"}),
    "glm4-9b": (9.4, 80, {"model_type": "glm4"}),
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
    bridge = with_own_table(
        BRIDGES[config.model_type], config, torch.bfloat16, parallel_states=sizes
    )
    bridge.set_extra_args(**LOCAL, sequence_parallel=parallel.sequence_parallel, **for_transformer)
    stages = [
        get_num_layers_to_build(bridge.config, pp_rank=stage) for stage in range(sizes.pp_size)
    ]
    assert sum(stages) == config.num_hidden_layers and min(stages) > 0
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
