"""FLOPs of models, peaks of GPUs and their metrics (rlpipe.observe.flops)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlpipe.observe.flops import flops_of, model_flops, peak_flops, speed_metrics

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "llama": SIZES,
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 8, "mlp_only_layers": [1]},
    "qwen2_moe": {
        **SIZES,
        **EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
    },
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT},
    "deepseek_v3 without q_lora_rank": {**SIZES, **EXPERTS, **LATENT, "q_lora_rank": None},
}
TOKENS = 20


def counted_flops(kind: str, sizes: dict[str, Any]) -> int:
    """Return the FLOPs of transformers' forward pass, as torch counts its matrix products."""
    config = AutoConfig.for_model(kind.split()[0], **sizes)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None] % 96)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", MODELS)
def test_a_forward_pass_has_the_flops_that_torch_counts(kind: str):
    sizes = MODELS[kind]
    model = flops_of({"model_type": kind.split()[0], **sizes})
    assert model is not None
    length = np.array([TOKENS])
    # transformers multiplies all pairs of tokens, and only half of them count.
    all_pairs = model.attention(length) * TOKENS**2 / (TOKENS * (TOKENS + 1) / 2)
    expected = model.matrices(length, length) + all_pairs
    # Qwen2-MoE's gate of the shared expert and the rotation's angles are not counted here.
    assert counted_flops(kind, sizes) == pytest.approx(expected, rel=2e-3)


def test_attention_counts_the_pairs_of_tokens_that_the_window_leaves():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = flops_of({**SIZES, "layer_types": kinds, "sliding_window": 5})
    assert model is not None
    lengths = [3, 5, 17]
    pairs = 0
    for kind in kinds:
        for length in lengths:
            for token in range(length):
                seen = token + 1
                pairs += min(seen, 5) if kind == "sliding_attention" else seen
    assert model.attention(np.array(lengths)) == pairs * 2 * (2 * 4 * 8)


def test_a_training_step_is_three_passes_or_two_through_frozen_matrices():
    model = flops_of(SIZES)
    assert model is not None
    lengths, responses = np.array([9, 20]), np.array([4, 15])
    matrices, attention = model.matrices(lengths, responses), model.attention(lengths)
    assert model.train(lengths, responses) == 3 * (matrices + attention)
    frozen = model.train(lengths, responses, frozen_matrices=True)
    assert frozen == 2 * matrices + 3 * attention


def test_sampling_computes_the_tokens_after_the_cached_ones():
    model = flops_of(SIZES)
    assert model is not None
    total = 0.0
    for start, end in [(0, 12), (5, 9), (7, 7)]:
        for token in range(start, end):
            total += model.token + model.logits + (token + 1) * sum(model.pairs.values())
    assert model.sampled([(0, 12), (5, 9), (7, 7)]) == pytest.approx(total)
    assert model.sampled([]) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"layer_types": ["linear_attention"] * 3},
        {"linear_num_value_heads": 4},
        {"index_topk": 16},
    ],
)
def test_other_layers_have_no_flops(other: dict[str, Any]):
    assert flops_of({**SIZES, **other}) is None


def test_a_directory_without_sizes_has_no_flops(tmp_path: Path):
    assert model_flops(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert model_flops(f"{tmp_path}/") is None


@pytest.mark.parametrize(
    ("gpu", "peak", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 1979e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H200", 989e12, 1979e12),
        ("NVIDIA H20", 148e12, 296e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA GB200", 2500e12, 5000e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA L4", 121e12, 242e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12),
        ("Some Accelerator", None, None),
    ],
)
def test_the_peak_follows_from_the_name_of_the_gpu(gpu: str, peak: float | None, fp8: float | None):
    assert peak_flops(gpu) == peak
    assert peak_flops(gpu, fp8=True) == fp8


def test_speed_is_per_device_and_a_cpu_has_no_mfu():
    on_gpu = speed_metrics("train", 4e15, 2.0, devices=4, gpu="NVIDIA H100 80GB HBM3")
    assert on_gpu == {"perf/train_tflops": 500.0, "perf/train_mfu": pytest.approx(500 / 989)}
    assert speed_metrics("train", 4e12, 2.0, devices=1, gpu=None) == {"perf/train_tflops": 2.0}
    assert speed_metrics("train", 4e12, 2.0, devices=1, gpu="GPU X") == {"perf/train_tflops": 2.0}
    assert speed_metrics("train", 0.0, 2.0, devices=1, gpu=None) == {}
    assert speed_metrics("train", 1.0, 0.0, devices=1, gpu=None) == {}
