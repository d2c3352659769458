"""The text model of a Qwen3.5 directory (tools.text_model)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import _BASE, FAMILIES, make
from tests.engines.megatron.ranks import engine, make_batch
from tools.text_model import text_tensors, write_text_model

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def with_vision(kind: str, family: str, directory: Path) -> torch.nn.Module:
    """Write a tiny model with a vision tower and return it."""
    text = {**_BASE, **FAMILIES[family], "tie_word_embeddings": False}
    sections: dict[str, Any] = {"text_config": text, "vision_config": VISION}
    config = CONFIG_MAPPING[kind](**sections)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.12, generator=generator)
            if name.endswith(".A_log"):
                parameter.sub_(1.0)
            if name.endswith("linear_attn.norm.weight"):
                parameter.add_(1.0)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    ("kind", "family"), [("qwen3_5", "qwen3.5"), ("qwen3_5_moe", "qwen3.5_moe")]
)
def test_the_trainer_scores_the_text_model_like_the_whole_model(kind, family, tmp_path):
    whole = with_vision(kind, family, tmp_path / "whole")
    write_text_model(tmp_path / "whole", tmp_path / "text")
    written = load_file(tmp_path / "text" / "model.safetensors")
    assert not [name for name in written if "visual" in name or "language_model" in name]
    ours = engine(str(tmp_path / "text"), TrainConfig(max_tokens_per_gpu=64), 0, 1, free_port())
    batch = make_batch()
    try:
        ours.load_hf()
        assert {name for name, _ in ours.named_hf_tensors()} == set(written)
        scores = ours.score(batch)
    finally:
        ours.close()
    assert np.abs(scores - reference.score(whole, batch, 0.8)).max() < 1e-5


def test_stacked_experts_become_separate_tensors(tmp_path):
    stack = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    name = "model.language_model.layers.3.mlp.experts.gate_up_proj"
    save_file({name: stack, "model.visual.x": stack.clone()}, tmp_path / "a.safetensors")
    found = dict(text_tensors(tmp_path / "a.safetensors"))
    prefix = "model.layers.3.mlp.experts"
    assert sorted(found) == [
        f"{prefix}.{number}.{part}_proj.weight" for number in (0, 1) for part in ("gate", "up")
    ]
    assert torch.equal(found[f"{prefix}.1.up_proj.weight"], stack[1, 3:])


def test_other_models_and_existing_targets_are_refused(tmp_path):
    make("qwen3", tmp_path / "qwen3")
    with pytest.raises(ConfigError, match="model_type"):
        write_text_model(tmp_path / "qwen3", tmp_path / "text")
    assert not (tmp_path / "text").exists()
    with_vision("qwen3_5", "qwen3.5", tmp_path / "whole")
    with pytest.raises(ConfigError, match="exists"):
        write_text_model(tmp_path / "whole", tmp_path / "qwen3")
