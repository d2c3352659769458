"""`transformer_impl`: layers of Transformer Engine have the names and the results of local layers.

Transformer Engine needs CUDA, also for its import. Without it, Megatron's own specification of
these layers is built from a stand-in of its linear layer with a norm: Megatron's local linear layer
with the additional parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import copy_of_checkpoint, engine, score_and_train
from tests.engines.megatron.test_parallel import TRAIN

# isort: split
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

FUSED = {"megatron": {"transformer_impl": "transformer_engine"}}


class NormAndLinear(ColumnParallelLinear):
    """A linear layer whose norm is its own parameter, as TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        self._eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(
            torch.empty(input_size, dtype=config.params_dtype)
        )

    def forward(self, input_: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        normed = torch.nn.functional.rms_norm(
            input_, input_.shape[-1:], self.layer_norm_weight, self._eps
        )
        return super().forward(normed, *args, **keywords)


class StandIn(LocalSpecProvider):
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return WrappedTorchNorm


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", WrappedTorchNorm, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", StandIn, raising=False)


def alone(job, model: str, *arguments: Any) -> dict:
    return job(0, 1, free_port(), model, *arguments)


@pytest.mark.integration
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
def test_fused_layers_compute_the_same_as_local_layers(models, stand_in, family):
    local = alone(score_and_train, models[family], TRAIN)
    fused = alone(score_and_train, models[family], TRAIN | FUSED)
    assert np.abs(fused["scores"] - local["scores"]).max() < 1e-5
    for found, expected in zip(fused["steps"], local["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert sorted(fused["after"]) == sorted(local["after"])
    for name, weight in local["after"].items():
        assert np.abs(fused["after"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_checkpoints_and_exports_do_not_depend_on_the_layers(
    models, stand_in, tmp_path, family, distributed_optimizer
):
    """Weights and Adam's state of fused layers pass through local layers, bit for bit."""
    train = {"max_tokens_per_gpu": 64, "use_distributed_optimizer": distributed_optimizer}
    ours = engine(models[family], TrainConfig.model_validate(train | FUSED), 0, 1, free_port())
    names = {name for name, _ in ours.trained.last_model.named_parameters()}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.input_layernorm.weight" not in names
    ours.load_hf()
    ours.save_checkpoint(tmp_path / "first", 1)
    ours.close()
    paths = [str(tmp_path / name) for name in ("first", "local", "fused", "last")]
    trained = str(tmp_path / "trained")
    start = alone(copy_of_checkpoint, models[family], train | FUSED, paths[0], paths[1])
    local = alone(copy_of_checkpoint, models[family], train, paths[1], paths[2], trained)
    fused = alone(copy_of_checkpoint, models[family], train | FUSED, trained, paths[2])
    back = alone(copy_of_checkpoint, models[family], train, paths[2], paths[3])
    after = alone(copy_of_checkpoint, models[family], train, trained, paths[3])
    assert (back["digest"], back["trained"]) == (after["digest"], after["trained"])
    assert after["digest"] != local["digest"]
    for one, other in ((start, local), (fused, after)):
        assert sorted(one["weights"]) == sorted(other["weights"])
        for name, weight in one["weights"].items():
            assert np.array_equal(weight, other["weights"][name]), name


def refusal(model: str, **megatron: Any) -> ConfigError:
    train = TrainConfig.model_validate({"megatron": megatron})
    with pytest.raises(ConfigError) as caught:
        engine(model, train, 0, 1, free_port())
    assert caught.value.where == "train.megatron.transformer_impl"
    return caught.value


def test_without_transformer_engine_its_layers_are_refused(models, monkeypatch):
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", False)
    error = refusal(models["qwen3"], transformer_impl="transformer_engine")
    assert "cannot be imported" in error.problem
    assert "transformer_engine[pytorch]" in str(error.do)


def test_other_implementations_and_families_are_refused(models, tmp_path, stand_in):
    error = refusal(models["qwen3"], transformer_impl="inference_optimized")
    assert "local or transformer_engine" in str(error.expected)
    from tests.engines.megatron.families import make

    deepseek: Path = tmp_path / "deepseek"
    make("deepseek_v3", deepseek)
    error = refusal(str(deepseek), transformer_impl="transformer_engine")
    assert "local layers only" in error.problem


@pytest.mark.gpu
@pytest.mark.transformer_engine
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformer_engine_computes_the_same_as_local_layers(models, tmp_path, family):
    found = {}
    for kind, megatron in (("local", {}), ("fused", FUSED["megatron"])):
        train = TRAIN | {"megatron": megatron}
        result = alone(score_and_train, models[family], train, 1, "bfloat16")
        assert result["steps"][0]["grad_norm"] > 0
        found[kind] = result
    assert np.abs(found["fused"]["scores"] - found["local"]["scores"]).mean() < 0.05
    for one, other in zip(found["fused"]["steps"], found["local"]["steps"], strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1)
    for name, weight in found["local"]["after"].items():
        assert np.abs(found["fused"]["after"][name] - weight).max() < 0.02, name
