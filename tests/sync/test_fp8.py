"""Weights are quantized in blocks of 128 × 128 (rlpipe.sync.fp8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlpipe.errors import ConfigError
from rlpipe.sync.fp8 import (
    BLOCK,
    QUANTIZATION_CONFIG,
    dequantize_matrix,
    fp8_directory,
    quantize,
    quantize_matrix,
)
from rlpipe.sync.tensors import check_tensors, expected_shapes


def make_wide_model(directory) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 130), (1, 5), (576, 64)])
def test_a_dequantized_matrix_differs_by_at_most_half_an_e4m3_step(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-4, 2, shape[1])
    small, scale_inv = quantize_matrix(weight)
    assert small.shape == shape and small.dtype == torch.float8_e4m3fn and small.is_contiguous()
    assert (
        scale_inv.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        and scale_inv.dtype == torch.float32
    )
    back = dequantize_matrix(small, scale_inv)
    factor = dequantize_matrix(torch.ones_like(small), scale_inv)
    bound = torch.maximum(
        weight.abs() / 16, factor * 2.0**-10
    )  # 3 bits of mantissa; the smallest step is 2^-9
    assert ((back - weight).abs() <= bound * 1.0001).all()


def test_a_block_uses_the_whole_range_and_a_block_of_zeros_stays_zero():
    weight = torch.zeros(256, 128)
    weight[7, 9] = -3.0
    small, scale_inv = quantize_matrix(weight)
    assert small.float().min() == -448 and scale_inv[1, 0] == 1
    assert torch.equal(dequantize_matrix(small, scale_inv), weight)


def test_only_matrices_are_quantized():
    names = [
        ("model.layers.3.self_attn.q_proj.weight", (128, 128), True),
        ("model.layers.3.mlp.experts.11.down_proj.weight", (128, 128), True),
        ("model.layers.3.mlp.gate.weight", (8, 128), False),
        ("model.layers.3.self_attn.q_proj.bias", (128,), False),
        ("model.layers.3.self_attn.q_norm.weight", (128,), False),
        ("model.embed_tokens.weight", (512, 128), False),
        ("lm_head.weight", (512, 128), False),
    ]
    for name, shape, expected in names:
        found = dict(quantize([(name, torch.ones(shape))]))
        assert list(found) == ([name, f"{name}_scale_inv"] if expected else [name])


def test_the_fp8_directory_holds_the_pushed_tensors_and_is_made_once(tmp_path):
    model = make_wide_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    directory = fp8_directory(str(tmp_path / "model"), tmp_path / "made")
    assert fp8_directory(str(tmp_path / "model"), tmp_path / "made") == directory
    assert [path.name for path in (tmp_path / "made").iterdir() if path.is_dir()] == [
        directory.rpartition("/")[2]
    ]
    config = json.loads((tmp_path / "made" / directory / "config.json").read_text())
    assert config["quantization_config"] == QUANTIZATION_CONFIG and config["hidden_size"] == 128
    assert (tmp_path / "made" / directory / "tokenizer.json").exists()
    missing = set(expected := expected_shapes(directory))
    pushed = dict(check_tensors(quantize(model.state_dict().items()), expected, missing))
    assert not missing
    with safe_open(f"{directory}/model.safetensors", framework="pt") as stored:
        for name, tensor in pushed.items():
            assert stored.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(stored.get_tensor(name).float(), tensor.float())


def test_merged_matrices_without_whole_blocks_are_refused(tmp_path):
    narrow = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    Qwen3ForCausalLM(narrow).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ConfigError, match="cannot be quantized in blocks"):
        fp8_directory(str(tmp_path / "narrow"), tmp_path / "made")
    assert not [
        path
        for path in (tmp_path / "made").iterdir()
        if path.is_dir() and not path.name.endswith(".partial")
    ]


def test_a_matrix_of_gate_and_up_projection_is_refused(tmp_path):
    make_wide_model(tmp_path / "model")
    save_file(
        {"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(512, 128)},
        tmp_path / "model" / "more.safetensors",
    )
    with pytest.raises(ConfigError, match="gate and up projection"):
        fp8_directory(str(tmp_path / "model"), tmp_path / "made")


def test_an_fp8_model_is_served_unchanged_and_another_quantization_is_refused(tmp_path):
    make_wide_model(tmp_path / "model")
    first = fp8_directory(str(tmp_path / "model"), tmp_path / "made")
    assert fp8_directory(first, tmp_path / "again") == first
    config = Path(first) / "config.json"
    config.write_text(config.read_text().replace('"fp8"', '"awq"'))
    with pytest.raises(ConfigError, match="cannot train a model with this quantization"):
        fp8_directory(first, tmp_path / "again")
