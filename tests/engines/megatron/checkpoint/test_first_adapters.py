"""The first adapters from a directory of PEFT: `model.adapter`."""

from __future__ import annotations

import importlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.config.model import HuggingFaceModel, ModelConfig
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.peft import to_peft
from rlpipe.engines.megatron.preflight import refused
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.lora_jobs import save_adapters
from tests.engines.megatron.ranks import make_batch
from tests.parameters import each

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
TRAIN: dict[str, Any] = {
    "max_tokens_per_gpu": 64,
    "lora": {"rank": 4, "alpha": 8},
    "optimizer": {"lr": 1e-2},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor and sequence parallel": (
        "qwen3",
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    ),
    "pipeline parallel": ("qwen3", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "data parallel": ("qwen3", {"use_distributed_optimizer": True}),
    "expert parallel": (
        "qwen3_moe",
        {
            "parallel": {"expert_model_parallel_size": 2},
            "lora": {"rank": 4, "alpha": 8, "target_modules": ATTENTION},
        },
    ),
}
QUICK = {"tensor and sequence parallel", "pipeline parallel", "expert parallel"}


def made_by_peft(model_dir: str, directory: Path, **settings: Any) -> Any:
    """Write random adapters with PEFT, and return its model."""
    peft = importlib.import_module("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **settings}
    )
    model = peft.get_peft_model(reference.load(model_dir), config)
    model.save_pretrained(directory)
    return model


def adapters_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def verdict(
    model_dir: str, adapter: Path, lora: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the error of the check before a start."""
    source = HuggingFaceModel(type="huggingface", hf_checkpoint=model_dir)
    model = ModelConfig(source=source, dtype="float32", adapter=str(adapter))
    train = TrainConfig.model_validate(TRAIN | {"lora": lora or TRAIN["lora"]})
    return refused(
        {
            "directory": model_dir,
            "model": model.model_dump(mode="json"),
            "train": train.model_dump(mode="json"),
            "deterministic": False,
        }
    )


@pytest.mark.integration
@pytest.mark.peft
@pytest.mark.parametrize("layout", each([None, *LAYOUTS], {None, *QUICK}))
def test_adapters_of_peft_start_a_policy_and_come_back_with_equal_bits(
    models, two_ranks, tmp_path, layout
):
    family, change = LAYOUTS.get(layout or "", ("qwen3", {}))
    targets = ATTENTION if family == "qwen3_moe" else ALL
    theirs = made_by_peft(models[family], tmp_path / "adapter", target_modules=targets)
    job = partial(save_adapters, adapter=str(tmp_path / "adapter"), steps=False)
    arguments = (models[family], TRAIN | change, str(tmp_path / "saved"))
    if layout is None:
        started = job(0, 1, free_port(), *arguments)
    else:
        started, _ = two_ranks.run(job, *arguments)
    expected = reference.score(theirs, make_batch(), 0.8)
    assert np.abs(started["scores"] - expected).max() < 1e-5
    base = reference.score(reference.load(models[family]), make_batch(), 0.8)
    assert np.abs(expected - base).max() > 0.05
    to_peft(tmp_path / "saved", tmp_path / "exported")
    given = adapters_of(tmp_path / "adapter")
    exported = adapters_of(tmp_path / "exported")
    assert exported.keys() == given.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in given.items())


@pytest.mark.integration
@pytest.mark.peft
def test_trained_adapters_continue_where_another_run_ended(models, tmp_path):
    first = save_adapters(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path / "first"))
    to_peft(tmp_path / "first", tmp_path / "adapter")
    arguments = (models["qwen3"], TRAIN, str(tmp_path / "second"))
    second = save_adapters(
        0, 1, free_port(), *arguments, adapter=str(tmp_path / "adapter"), steps=False
    )
    assert np.array_equal(second["scores"], first["scores"])


@pytest.mark.integration
@pytest.mark.peft
@pytest.mark.parametrize(
    ("settings", "found", "advice"),
    [
        ({"r": 8}, "rank 8, alpha 8", "train.lora={rank: 8, alpha: 8, target_modules: [q_"),
        ({"use_rslora": True}, "rank 4, alpha 16", "alpha: 16"),
        ({"target_modules": ["q_proj"]}, "rank 4, alpha 8, q_proj", "[q_proj]"),
        ({"target_modules": [*ALL, "lm_head"]}, "lm_head", None),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern: {'q_proj': 2}", None),
        ({"use_dora": True}, "use_dora: True", None),
        ({"layers_to_transform": [0]}, "layers_to_transform: [0]", None),
    ],
)
def test_other_adapters_than_those_of_the_run_are_refused(
    models, tmp_path, settings, found, advice
):
    made_by_peft(models["qwen3"], tmp_path / "adapter", **settings)
    error = verdict(models["qwen3"], tmp_path / "adapter")
    assert error is not None and found in error["found"], error
    assert "adapter_config.json" in error["where"]
    assert advice is None or advice in error["do"]


@pytest.mark.integration
@pytest.mark.peft
def test_a_rank_stabilized_scale_is_taken_as_it_is(models, tmp_path):
    theirs = made_by_peft(models["qwen3"], tmp_path / "adapter", use_rslora=True)
    train = TRAIN | {"lora": {"rank": 4, "alpha": 16}}
    assert verdict(models["qwen3"], tmp_path / "adapter", train["lora"]) is None
    arguments = (models["qwen3"], train, str(tmp_path / "saved"))
    started = save_adapters(
        0, 1, free_port(), *arguments, adapter=str(tmp_path / "adapter"), steps=False
    )
    expected = reference.score(theirs, make_batch(), 0.8)
    assert np.abs(started["scores"] - expected).max() < 1e-5


@pytest.mark.integration
@pytest.mark.peft
def test_missing_unknown_misshapen_and_damaged_tensors_are_refused(models, tmp_path):
    made_by_peft(models["qwen3"], tmp_path / "adapter")
    assert verdict(models["qwen3"], tmp_path / "adapter") is None
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"

    def error_of(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, file)
        error = verdict(models["qwen3"], tmp_path / "adapter")
        assert error is not None
        return f"{error['where']} {error['found']}"

    without = {key: tensor for key, tensor in tensors.items() if key != name}
    assert f"missing: {name}" in error_of(without)
    deeper = name.replace("layers.1.", "layers.7.")
    assert f"unknown: {deeper}" in error_of({**tensors, deeper: tensors[name].clone()})
    assert f"{name} (3, 4)" in error_of({**tensors, name: tensors[name][:3].contiguous()})
    file.write_bytes(b"no tensors")
    broken = verdict(models["qwen3"], tmp_path / "adapter")
    assert broken is not None and broken["problem"] == "not a safetensors file"
    file.unlink()
    error = verdict(models["qwen3"], tmp_path / "adapter")
    assert error is not None and error["found"] == "no adapter_model.safetensors"


@pytest.mark.integration
@pytest.mark.peft
def test_ranks_refuse_what_changed_after_the_check(models, tmp_path):
    made_by_peft(models["qwen3"], tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 32}))
    arguments = (models["qwen3"], TRAIN, str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="alpha: 32"):
        save_adapters(0, 1, free_port(), *arguments, adapter=str(tmp_path / "adapter"))
    shutil.rmtree(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="not a directory of PEFT"):
        save_adapters(0, 1, free_port(), *arguments, adapter=str(tmp_path / "adapter"))
