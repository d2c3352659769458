"""A Megatron checkpoint as a model directory (rlpipe.system.megatron_weights)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlpipe.config.model import ModelConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_torch_dist
from rlpipe.errors import ConfigError
from rlpipe.lineage.source_weights import WeightSource, local_directory
from rlpipe.model_dir import directory_here, model_directory

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(folder: Path, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder)
    return folder


def source(origin: Path, checkpoint: Path, step: int | None = None) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "source": {
                "type": "huggingface",
                "hf_checkpoint": str(origin),
                "megatron_checkpoint": str(checkpoint),
                "megatron_checkpoint_step": step,
            }
        }
    )


@pytest.mark.integration
def test_a_checkpoint_is_converted_once_and_has_its_own_weights(tmp_path: Path, capfd):
    origin, other = make_model(tmp_path / "origin", 1), make_model(tmp_path / "other", 2)
    to_torch_dist(other, tmp_path / "dist")
    model = source(origin, tmp_path / "dist")
    directory = model_directory(model, tmp_path / "home", seed=0)
    found = load_file(Path(directory) / "model.safetensors")
    wanted = load_file(other / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
    assert "converting" in capfd.readouterr().err
    assert model_directory(model, tmp_path / "home", seed=0) == directory
    assert "converting" not in capfd.readouterr().err
    assert directory_here(directory, model.source) == directory
    for key in ("reference.ref_load", "teacher.opd_teacher_load", "critic.megatron_checkpoint"):
        source_of_role = WeightSource(key, str(tmp_path / "dist"))
        assert local_directory(source_of_role, str(origin), tmp_path / "home") == directory
    assert local_directory(WeightSource("reference.ref_load", str(other)), "", tmp_path) == str(
        other
    )


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path):
    origin = make_model(tmp_path / "origin", 1)
    for folder in (tmp_path / "nowhere", origin):
        with pytest.raises(ConfigError) as caught:
            model_directory(source(origin, folder), tmp_path / "home", seed=0)
        assert caught.value.where == "model.source.megatron_checkpoint"
