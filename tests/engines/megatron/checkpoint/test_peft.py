"""Adapters of a checkpoint as a directory of PEFT."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron.checkpoint.conversion.peft import to_peft
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.lora_jobs import plain_adapters, save_adapters, with_plain_adapters
from tests.engines.megatron.ranks import make_batch

TRAIN = {"max_tokens_per_gpu": 64, "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 1e-2}}
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    {"parallel": {"pipeline_model_parallel_size": 2}},
]


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_of_any_layout_are_written_by_pefts_names(models, two_ranks, tmp_path, layout):
    saved, _ = two_ranks.run(
        save_adapters, models["qwen3"], TRAIN | layout, str(tmp_path / "saved")
    )
    report = to_peft(tmp_path / "saved", tmp_path / "adapter", origin=Path(models["qwen3"]))
    plain = with_plain_adapters(reference.load(models["qwen3"]), LoraConfig(rank=4, alpha=8))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    adapters = plain_adapters(plain)
    assert len(tensors) == len(adapters) == report.tensors
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(tensors[f"base_model.model.model.layers.{name}.weight"])
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
    assert "already" in to_peft(tmp_path / "saved", tmp_path / "adapter").notes[0]


@pytest.mark.integration
def test_a_checkpoint_without_adapters_is_refused(models, tmp_path):
    full = {name: value for name, value in TRAIN.items() if name != "lora"}
    save_adapters(0, 1, free_port(), models["qwen3"], full, str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="the checkpoint has no adapters"):
        to_peft(tmp_path / "saved", tmp_path / "adapter")
