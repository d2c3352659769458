"""A_log of gated delta nets stays float32 in a model of 16 bit (model.gated_delta)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import (
    to_adam_state,
    to_hf,
    to_torch_dist,
)
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.engines.megatron.model.gated_delta import GatedDeltaNet
from rlpipe.sync.transports.bucket_memory import flatten
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import (
    _train,
    engine,
    make_batch,
    offload_and_train,
    save_and_resume,
)
from tests.engines.megatron.slime_checkpoint import adam_tensors

TEMPERATURE = 0.8
FAMILIES = ("qwen3_next", "qwen3.5")


def published(family: str, directory: Path) -> str:
    """Write a model in bfloat16 with A_log in float32, as Qwen3.5's files have it."""
    make(family, directory, dtype=torch.bfloat16)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith(".A_log"):
            weights[name] = torch.empty(weight.shape).normal_(-1.0, 0.3, generator=generator)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def decay_logs(weights: dict[str, Any]) -> dict[str, Any]:
    found = {name: weight for name, weight in weights.items() if name.endswith(".A_log")}
    assert found
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_16_bit_computes_and_exports_the_stored_a_log(family, tmp_path):
    directory = published(family, tmp_path / "model")
    stored = load_file(f"{directory}/model.safetensors")
    ours = engine(directory, TrainConfig(), 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        exported = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
        pushed = dict(flatten(list(exported.items()), torch.device("cpu")).tensors())
        ours.save_hf(tmp_path / "exported")
        scores = ours.score(make_batch())
        modules = ours.trained.last_model.modules()
        layer = next(module for module in modules if isinstance(module, GatedDeltaNet))
        rates = torch.randn(5, layer._key_heads, 2 * layer._values_per_key).bfloat16()
        _, decay = layer._rates(rates)
    finally:
        ours.close()
    written = load_file(tmp_path / "exported" / "model.safetensors")
    for found in (exported, pushed, written):
        assert found.keys() == stored.keys()
        for name, weight in stored.items():
            assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name

    name, log = next(iter(decay_logs(stored).items()))
    bias = stored[name.replace("A_log", "dt_bias")].float()
    values = rates[..., layer._values_per_key :].flatten(1).float()
    # As in transformers' Qwen3NextGatedDeltaNet.
    assert torch.equal(decay, -log.exp() * softplus(values + bias))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    for name, parameter in theirs.named_parameters():
        if name.endswith(".A_log"):
            parameter.data = stored[name]
    expected = reference.score(theirs, make_batch(), TEMPERATURE)
    # bfloat16 alone makes a difference of 0.04 nats.
    assert np.abs(scores - expected).mean() < 0.06


def test_rounded_values_of_a_log_give_other_log_probs(tmp_path):
    directory = published("qwen3.5", tmp_path / "model")
    ours = engine(directory, TrainConfig(), 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        exact = ours.score(make_batch())
        for name, parameter in ours.trained.last_model.named_parameters():
            if name.endswith(".A_log"):
                parameter.data.copy_(parameter.data.bfloat16())
        assert not np.array_equal(ours.score(make_batch()), exact)
    finally:
        ours.close()


@pytest.mark.parametrize("distributed", [True, False])
def test_adam_has_the_state_of_each_parameter_beside_a_float32_one(tmp_path, distributed):
    """Megatron finds the states by positions, which two dtypes in a group would shift."""
    directory = published("qwen3.5", tmp_path / "model")
    train = TrainConfig.model_validate(
        {"use_distributed_optimizer": distributed, "optimizer": {"lr": 1e-6, "clip_grad": 0}}
    )
    ours = engine(directory, train, 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        before = decay_logs({name: t.clone() for name, t in ours.named_hf_tensors()})
        _train(ours, [0])
        (part,) = inner_optimizers(ours.trained.optimizer)
        beta = train.optimizer.adam_beta1
        parameter: Any
        for name, parameter in ours.trained.last_model.named_parameters():
            states, _ = adam_tensors(part, parameter)
            weight = parameter.detach().flatten()
            assert torch.equal(states["fp32_param"].flatten().to(weight.dtype), weight), name
            gradient = parameter.main_grad.flatten()
            moment = states["exp_avg"].flatten()
            assert torch.allclose(moment, (1 - beta) * gradient, rtol=1e-5, atol=1e-12), name
        after = decay_logs(dict(ours.named_hf_tensors()))
        for name, log in before.items():
            # Such a step is too small for bfloat16.
            assert torch.equal(after[name].bfloat16(), log.bfloat16())
            assert not torch.equal(after[name], log)
    finally:
        ours.close()


@pytest.mark.integration
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(
    "layout",
    [{}, pytest.param({"tensor_model_parallel_size": 2}, marks=pytest.mark.long)],
    ids=["data", "tensor"],
)
def test_float32_parameters_are_saved_and_resumed_with_equal_bits(
    two_ranks, tmp_path, distributed, layout
):
    directory = published("qwen3.5", tmp_path / "model")
    train = {
        "max_tokens_per_gpu": 64,
        "use_distributed_optimizer": distributed,
        "parallel": layout,
        "optimizer": {"lr": 1e-3},
    }
    arguments = (directory, train, str(tmp_path / "saved"), free_port(), "bfloat16")
    first, second = two_ranks.run(save_and_resume, *arguments)
    assert first == second
    assert first["loaded"] == first["loaded in place"] == first["saved"]
    assert first["resumed"] == first["resumed in place"] == first["straight"]


@pytest.mark.integration
def test_float32_parameters_are_offloaded_and_restored(tmp_path):
    directory = published("qwen3.5", tmp_path / "model")
    result = offload_and_train(0, 1, free_port(), directory, {}, "bfloat16")
    assert result["before"] == result["after"]


@pytest.mark.integration
@pytest.mark.parametrize("distributed", [True, False])
def test_conversions_keep_a_log_and_its_adam(tmp_path, distributed):
    directory = published("qwen3_next", tmp_path / "model")
    to_torch_dist(Path(directory), tmp_path / "released", dtype="bfloat16")
    to_hf(tmp_path / "released", tmp_path / "back")
    stored = load_file(f"{directory}/model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    assert all(back[name].dtype == stored[name].dtype for name in stored)

    train = TrainConfig(use_distributed_optimizer=distributed)
    digests = []
    for source in (directory, str(tmp_path / "weights")):
        ours = engine(source, train, 0, 1, free_port(), dtype="bfloat16")
        try:
            ours.load_hf()
            if source == directory:
                _train(ours, [0, 1])
                ours.save_checkpoint(tmp_path / "saved", 1)
            else:
                ours.load_adam_state(tmp_path / "adam")
            digests.append((ours.state_digest(), _train(ours, [2])))
        finally:
            ours.close()
        if source == directory:
            to_hf(tmp_path / "saved", tmp_path / "weights")
            to_adam_state(tmp_path / "saved", tmp_path / "adam", origin=Path(directory))
    assert digests[0] == digests[1]
