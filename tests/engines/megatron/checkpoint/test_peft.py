"""Adapters of a checkpoint as a directory of PEFT."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import different
from rlpipe.engines.megatron.checkpoint.conversion.peft import to_peft
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.lora_jobs import plain_adapters, save_adapters, with_plain_adapters
from tests.engines.megatron.ranks import make_batch

TRAIN = {"max_tokens_per_gpu": 64, "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 1e-2}}
LORA = LoraConfig(rank=4, alpha=8)
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    {"parallel": {"pipeline_model_parallel_size": 2}},
]


def fill(plain: torch.nn.Module, directory: Path) -> int:
    """Fill plain adapters from a directory of PEFT; return their number."""
    tensors = load_file(directory / "adapter_model.safetensors")
    adapters = plain_adapters(plain)
    assert len(tensors) == len(adapters)
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(tensors[f"base_model.model.model.layers.{name}.weight"])
    return len(tensors)


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_any_layout_are_written_by_pefts_names(models, two_ranks, tmp_path, layout):
    saved, _ = two_ranks.run(
        save_adapters, models["qwen3"], TRAIN | layout, str(tmp_path / "saved")
    )
    report = to_peft(tmp_path / "saved", tmp_path / "adapter", origin=Path(models["qwen3"]))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == models["qwen3"]
    plain = with_plain_adapters(reference.load(models["qwen3"]), LORA)
    assert fill(plain, tmp_path / "adapter") == report.tensors
    assert np.abs(reference.score(plain, make_batch(), 0.8) - saved["scores"]).max() < 1e-5


@pytest.mark.integration
@pytest.mark.peft
def test_peft_loads_the_directory(models, tmp_path):
    peft = importlib.import_module("peft")
    saved = save_adapters(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path / "saved"))
    to_peft(tmp_path / "saved", tmp_path / "adapter")
    base: Any = reference.load(models["qwen3"])
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert np.abs(reference.score(model, make_batch(), 0.8) - saved["scores"]).max() < 1e-5
    assert "already" in to_peft(tmp_path / "saved", tmp_path / "adapter").notes[-1]


@pytest.mark.integration
def test_a_checkpoint_without_adapters_is_refused(models, tmp_path):
    full = {name: value for name, value in TRAIN.items() if name != "lora"}
    save_adapters(0, 1, free_port(), models["qwen3"], full, str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="the checkpoint has no adapters"):
        to_peft(tmp_path / "saved", tmp_path / "adapter")


@pytest.mark.integration
def test_adapters_on_the_weights_of_another_run_name_no_base(models, tmp_path):
    full = {name: value for name, value in TRAIN.items() if name != "lora"}
    save_adapters(0, 1, free_port(), models["qwen3"], full, str(tmp_path / "full"))
    start = str(tmp_path / "full")
    arguments = (models["qwen3"], TRAIN, str(tmp_path / "saved"), start)
    saved = save_adapters(0, 1, free_port(), *arguments)
    report = to_peft(tmp_path / "saved", tmp_path / "adapter", origin=Path(models["qwen3"]))
    assert "--base" in report.notes[0]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None

    to_hf(tmp_path / "saved", tmp_path / "base", with_adapters=False)
    to_hf(tmp_path / "full", tmp_path / "first")
    assert list(different(tmp_path / "base", tmp_path / "first")) == []
    named = to_peft(tmp_path / "saved", tmp_path / "named", origin=tmp_path / "base")
    assert named.notes == []
    plain = with_plain_adapters(reference.load(str(tmp_path / "base")), LORA)
    fill(plain, tmp_path / "named")
    assert np.abs(reference.score(plain, make_batch(), 0.8) - saved["scores"]).max() < 1e-5
