"""Bridges: files they read, files they refuse (rlpipe.engines.megatron.bridges)."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.bridges.deepseek import DownProjection, _rotation
from rlpipe.engines.megatron.bridges.hf_config import read_config
from rlpipe.engines.megatron.bridges.weight_files import (
    MXFP4_SUFFIXES,
    SCALE_SUFFIX,
    WeightFiles,
    from_blocks,
)
from rlpipe.engines.megatron.checkpoint.export import with_untrained_layers
from rlpipe.engines.megatron.preflight import refused
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import engine

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def edit(directory: str | Path, **values: Any) -> None:
    path = Path(directory) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def draft_layer(number: int) -> dict[str, torch.Tensor]:
    """Return a multi-token prediction layer, with the tensors that are read."""
    values = torch.Generator().manual_seed(1)
    shapes = {
        "eh_proj.weight": (8, 16),
        "enorm.weight": (8,),
        "mlp.experts.3.gate_proj.weight": (4, 8),
    }
    return {
        f"model.layers.{number}.{name}": torch.randn(shape, generator=values)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def moonlight(tmp_path_factory) -> str:
    return make("moonlight", tmp_path_factory.mktemp("moonlight"))


@pytest.fixture
def copy(moonlight, tmp_path) -> Path:
    """Copy a directory, to damage the copy."""
    for file in Path(moonlight).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_an_export_copies_draft_layers_with_the_trained_embedding(copy):
    stored = load_file(copy / "model.safetensors")
    draft = draft_layer(2) | {
        "model.layers.2.embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
        "model.layers.2.shared_head.head.weight": stored["lm_head.weight"].clone(),
    }
    save_file(stored | draft, copy / "model.safetensors")
    edit(copy, num_nextn_predict_layers=1)
    ours = engine(str(copy), TrainConfig(), 0, 1, free_port())
    try:
        ours.load_hf()
        ours.save_hf(copy / "same")
        with torch.no_grad():
            ours.trained.last_model.embedding.word_embeddings.weight.add_(1.0)
        ours.save_hf(copy / "other")
    finally:
        ours.close()
    same, other = (load_file(copy / name / "model.safetensors") for name in ("same", "other"))
    assert same.keys() == other.keys() == (stored | draft).keys()
    assert all(torch.equal(same[name], tensor) for name, tensor in (stored | draft).items())
    assert torch.equal(
        other["model.layers.2.embed_tokens.weight"], stored["model.embed_tokens.weight"] + 1
    )
    assert all(torch.equal(other[name], tensor) for name, tensor in draft_layer(2).items())


@pytest.mark.parametrize("prefix", ["model.mtp_layers.0", "mtp.layers.0"])
def test_a_mimo_directory_is_trained_as_a_qwen2_and_keeps_its_prediction_layers(tmp_path, prefix):
    source = Path(make("qwen2", tmp_path / "model"))
    stored = load_file(source / "model.safetensors")
    further = {f"{prefix}.input_proj.weight": torch.randn(64, 128)}
    save_file(stored | further, source / "model.safetensors")
    edit(source, model_type="mimo", num_nextn_predict_layers=1, attention_bias=True)
    ours = engine(str(source), TrainConfig(), 0, 1, free_port())
    try:
        ours.load_hf()
        ours.save_hf(tmp_path / "out")
    finally:
        ours.close()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == (stored | further).keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in (stored | further).items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mimo"


def test_fp8_weights_are_dequantised(copy):
    stored = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    large = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    quantised = {name: large.to(torch.float8_e4m3fn), name + SCALE_SUFFIX: scale}
    save_file(stored | quantised, copy / "model.safetensors")
    files = WeightFiles(str(copy))
    assert set(files.names) == stored.keys()
    found = files.load_one_hf_weight(name)
    assert found.dtype == torch.bfloat16
    for i, j in ((0, 0), (127, 128), (128, 127), (199, 299)):
        assert found[i, j] == (quantised[name][i, j].float() * scale[i // 128, j // 128]).to(
            torch.bfloat16
        )
    assert from_blocks(quantised[name], torch.ones(2, 3)).equal(quantised[name].float())
    assert files.load_one_hf_weight("lm_head.weight").equal(stored["lm_head.weight"])


def test_an_export_of_fp8_weights_has_no_quantization_config(copy):
    edit(copy, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    ours = engine(str(copy), TrainConfig(), 0, 1, free_port())
    try:
        ours.load_hf()
        ours.save_hf(copy / "out")
    finally:
        ours.close()
    assert "quantization_config" not in json.loads((copy / "out" / "config.json").read_text())


def test_mxfp4_weights_are_dequantised_as_by_transformers(tmp_path):
    values = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=values)
    scales = torch.randint(118, 130, (3, 8, 2), dtype=torch.uint8, generator=values)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(
        {f"{name}_blocks": blocks, f"{name}_scales": scales, "model.norm.weight": torch.ones(4)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    files = WeightFiles(str(tmp_path))
    assert set(files.names) == {name, "model.norm.weight"}
    expected = convert_moe_packed_tensors(blocks, scales)
    found = files.load_one_hf_weight(name)
    assert found.dtype == torch.bfloat16 and found.shape == (3, 64, 8)
    assert torch.equal(found, expected)
    assert torch.equal(files.load_one_hf_weight(f"{name}[2]"), expected[2])


def test_an_export_of_a_gpt_oss_in_mxfp4_is_in_bf16(tmp_path):
    # MXFP4 has blocks of 32 numbers.
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2}
    source = Path(make("gpt_oss", tmp_path / "model", changes=sizes, dtype=torch.bfloat16))
    stored = load_file(source / "model.safetensors")
    values = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored[name].shape
        shape = (experts, columns, rows // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=values)
        scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=values)
        stored[name] = convert_moe_packed_tensors(blocks, scales)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    quantised = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    written = {name: weight for name, weight in stored.items() if name not in quantised}
    save_file(written, source / "model.safetensors")
    edit(source, quantization_config={"quant_method": "mxfp4"})
    ours = engine(str(source), TrainConfig(), 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        ours.save_hf(tmp_path / "out")
    finally:
        ours.close()
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert len(quantised) == 4
    assert exported.keys() == {name for name in stored if not name.endswith(MXFP4_SUFFIXES)}
    assert all(torch.equal(exported[name], stored[name]) for name in exported)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"megatron": {"moe_grouped_gemm": True}}, "moe_grouped_gemm"),
        (
            {
                "parallel": {
                    "tensor_model_parallel_size": 2,
                    "sequence_parallel": True,
                    "expert_tensor_parallel_size": 2,
                }
            },
            "expert_tensor_parallel_size",
        ),
    ],
)
def test_settings_for_experts_without_biases_are_refused_for_gpt_oss(tmp_path, train, key):
    model = {"source": {"type": "huggingface", "hf_checkpoint": make("gpt_oss", tmp_path)}}
    request = {"directory": str(tmp_path), "model": model, "deterministic": False}
    assert refused(request | {"train": {}}) is None
    found = refused(request | {"train": train})
    assert found is not None and key in found["where"]


def test_unsupported_quantisations_are_refused(copy):
    edit(copy, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ConfigError, match=r"compressed-tensors"):
        read_config(str(copy))


def test_kimi_is_read_as_deepseek_v3_without_its_own_code(copy):
    edit(
        copy,
        model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    )
    found: Any = read_config(str(copy))
    assert (found.model_type, found.kv_lora_rank, found.rope_theta) == ("deepseek_v3", 16, 50_000)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_an_unsupported_rotation_is_refused(tmp_path, kind):
    directory = make("qwen3", tmp_path)
    edit(directory, rope_parameters={"rope_type": kind, "rope_theta": 1e6, "factor": 4.0})
    with pytest.raises(
        ConfigError, match=rf"(?s)rope_type = '{kind}'.*'default' or 'yarn' for qwen3"
    ):
        read_config(directory)


@pytest.mark.parametrize(
    ("family", "changed", "word"),
    [
        ("moonlight", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("llama3.2", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor"),
        ("llama3.2", {"rope_parameters": {"rope_type": "llama3"}}, "in rope_parameters"),
    ],
)
def test_settings_that_megatron_computes_differently_are_refused(tmp_path, family, changed, word):
    directory = make(family, tmp_path)
    edit(directory, **changed)
    with pytest.raises(ConfigError, match=word):
        engine(directory, TrainConfig(), 0, 1, free_port())


def test_missing_weights_are_named_in_the_error(copy):
    stored = load_file(copy / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, copy / "model.safetensors")
    with pytest.raises(ConfigError, match=r"without model\.norm\.weight"):
        WeightFiles(str(copy)).load_some_hf_weight(["lm_head.weight", "model.norm.weight"])
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        WeightFiles(str(copy))


def test_an_index_that_names_a_missing_file_is_refused(copy):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00001-of-00002"):
        WeightFiles(str(copy)).load_one_hf_weight("lm_head.weight")


def test_a_source_without_draft_layers_adds_nothing(moonlight):
    config = read_config(moonlight)
    tensors = [("lm_head.weight", torch.zeros(1))]
    assert list(with_untrained_layers(tensors, moonlight, config)) == tensors


@pytest.mark.parametrize("shared", [True, False])
def test_down_projections_are_marked_sequence_parallel(shared: bool):
    config: Any = Namespace(hidden_size=4, params_dtype=torch.float32, sequence_parallel=shared)
    projection = DownProjection(config, 3)
    assert projection.weight.sequence_parallel is shared and projection.weight.shape == (3, 4)


def test_rotation_settings_come_from_the_config():
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
    }
    found = _rotation({**scaling, "mscale": 0.7, "mscale_all_dim": 0.5})
    assert [found[name] for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")] == [
        16,
        2,
        0.7,
        0.5,
    ]
    assert [_rotation(scaling)[name] for name in ("mscale", "mscale_all_dim")] == [1.0, 0.0]
