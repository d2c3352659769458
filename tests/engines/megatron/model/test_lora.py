"""Adapters: equal to plain torch and over ranks; references, exports and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import LORA_TARGETS, LoraConfig, TrainConfig
from rlpipe.engines.megatron.preflight import refused
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import families, reference
from tests.engines.megatron.lora_jobs import (
    fresh_adapters,
    offload_and_score,
    plain_adapters,
    save_adapters,
    train_adapters,
    with_plain_adapters,
)
from tests.engines.megatron.ranks import make_batch, near, save_and_resume
from tests.engines.megatron.test_preflight import given
from tests.parameters import each

LORA = {"rank": 4, "alpha": 8}
TRAIN = {
    "max_tokens_per_gpu": 64,
    "lora": LORA,
    "loss": {"eps_clip": 0.1, "eps_clip_high": 0.1, "entropy_coef": 0.01, "kl_loss_coef": 0.05},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, "adam_eps": 1e-5},
}
LAYOUTS = {
    "data parallel, distributed optimizer": {"use_distributed_optimizer": True},
    "tensor parallel": {"parallel": {"tensor_model_parallel_size": 2}},
    "tensor and sequence parallel": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    },
    "pipeline parallel": {"parallel": {"pipeline_model_parallel_size": 2}},
    "context parallel": {"parallel": {"context_parallel_size": 2}},
}
QUICK = {"tensor and sequence parallel", "pipeline parallel"}


@pytest.fixture(scope="module")
def alone(models):
    return train_adapters(0, 1, free_port(), models["qwen3"], TRAIN)


def plain_run(model_dir: str, found: dict, config: TrainConfig) -> tuple[torch.nn.Module, list]:
    """Take the steps of `train_adapters` in transformers, from the same first adapters."""
    assert config.lora is not None
    model = with_plain_adapters(reference.load(model_dir), config.lora)
    adapters = plain_adapters(model)
    assert set(adapters) == set(found["first"])
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(torch.from_numpy(found["first"][name]))
    trainable = torch.nn.ParameterList(adapters.values())
    optimizer = reference.make_optimizer(trainable, config)
    model_of_clipping = config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"clip_grad": 1e9})}
    )
    steps = []
    for iteration in range(2):
        batch = make_batch().with_columns(
            proximal_log_probs=near(found["scores"], 0.2, 2 * iteration),
            reference_log_probs=near(found["scores"], 0.3, 2 * iteration + 1),
        )
        packing = plan(batch.lengths, global_batch_size=12, max_tokens=64, data_parallel=1)
        steps += reference.train(model, optimizer, batch, packing, model_of_clipping, 0.8)
    return model, steps


@pytest.mark.integration
def test_steps_gradients_and_scores_are_those_of_plain_adapters(models, alone):
    config = TrainConfig.model_validate(TRAIN)
    model, steps = plain_run(models["qwen3"], alone, config)
    for found, expected in zip(alone["steps"], steps, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, parameter in plain_adapters(model).items():
        assert parameter.grad is not None and parameter.grad.norm() > 1e-3, name
        difference = np.linalg.norm(alone["gradients"][name] - parameter.grad.numpy())
        assert difference < 1e-4 * parameter.grad.norm(), name
        assert np.abs(alone["adapters"][name] - parameter.detach().numpy()).max() < 1e-4, name
    after = reference.score(model, make_batch(), 0.8)
    assert np.abs(alone["trained scores"] - after).max() < 1e-4
    assert np.abs(after - alone["scores"]).max() > 0.05


@pytest.mark.integration
def test_only_adapters_have_gradients_and_optimizer_state(alone):
    numbers = alone["numbers"]
    assert numbers["adapters"] == numbers["parameters"] - 67_968 > 0
    assert numbers["gradients"] == numbers["adapters"]
    assert numbers["optimizer"] == 2 * numbers["adapters"]
    assert alone["frozen"]


@pytest.mark.integration
def test_the_reference_is_the_model_without_adapters(models, alone):
    base = reference.score(reference.load(models["qwen3"]), make_batch(), 0.8)
    assert np.abs(alone["reference"] - base).max() < 1e-5
    assert np.array_equal(alone["reference"], alone["scores"])
    policy, ref = alone["both"]
    assert np.array_equal(policy, alone["trained scores"])
    assert np.array_equal(ref, alone["reference"])


@pytest.mark.integration
def test_exported_weights_are_base_plus_adapters(models, alone):
    base = dict(reference.load(models["qwen3"]).named_parameters())
    for name, merged in alone["merged"].items():
        weight = base[name].detach().numpy()
        leaf = name.removeprefix("model.layers.").removesuffix(".weight")
        if f"{leaf}.lora_A" in alone["adapters"]:
            product = alone["adapters"][f"{leaf}.lora_B"] @ alone["adapters"][f"{leaf}.lora_A"]
            assert np.abs(2 * product).max() > 1e-3
            weight = weight + 2 * product
        assert np.abs(merged - weight).max() < 1e-6, name


@pytest.mark.integration
@pytest.mark.parametrize("layout", each(LAYOUTS, QUICK))
def test_two_ranks_train_the_same_adapters_as_one(models, alone, two_ranks, layout):
    first, second = two_ranks.run(train_adapters, models["qwen3"], TRAIN | LAYOUTS[layout])
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"]
    assert first["frozen"] and second["frozen"]
    for found, expected in zip(first["steps"], alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.abs(first["trained scores"] - alone["trained scores"]).max() < 1e-4
    assert np.abs(first["reference"] - alone["reference"]).max() < 1e-5
    for name, weight in alone["merged"].items():
        assert np.abs(first["merged"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "change"),
    each(
        [
            ("qwen2", {}),
            ("llama", {"lora": {**LORA, "target_modules": ["up_proj", "v_proj", "q_proj"]}}),
            ("qwen3", {"lora": {**LORA, "target_modules": ["down_proj"]}}),
            ("qwen3_moe", {"lora": {**LORA, "target_modules": ["q_proj", "k_proj", "o_proj"]}}),
            ("qwen3", {"megatron": {"recompute_granularity": "full"}}),
        ],
        [("qwen3", {"megatron": {"recompute_granularity": "full"}})],
    ),
)
def test_other_models_and_targets_are_those_of_plain_adapters(models, family, change):
    train = TRAIN | change
    found = train_adapters(0, 1, free_port(), models[family], train)
    config = TrainConfig.model_validate(train)
    model, steps = plain_run(models[family], found, config)
    for ours, expected in zip(found["steps"], steps, strict=True):
        assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, parameter in plain_adapters(model).items():
        assert np.abs(found["adapters"][name] - parameter.detach().numpy()).max() < 1e-4, name


@pytest.mark.integration
def test_chunks_of_a_virtual_pipeline_train_the_same_adapters(models, two_ranks):
    wanted = train_adapters(0, 1, free_port(), models["qwen3_deep"], TRAIN)
    chunks = {"virtual_pipeline_model_parallel_size": 2}
    layout = {"parallel": {"pipeline_model_parallel_size": 2}, "megatron": chunks}
    first, _ = two_ranks.run(train_adapters, models["qwen3_deep"], TRAIN | layout)
    for name, weight in wanted["merged"].items():
        assert np.abs(first["merged"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
def test_adapters_train_in_bfloat16(models):
    found = train_adapters(0, 1, free_port(), models["qwen3"], TRAIN, "bfloat16")
    assert found["frozen"]
    assert np.array_equal(found["reference"], found["scores"])
    assert np.abs(found["trained scores"] - found["scores"]).max() > 0.05
    assert found["numbers"]["gradients"] == found["numbers"]["adapters"]


@pytest.mark.integration
@pytest.mark.parametrize("layout", each([None, *LAYOUTS], {"tensor and sequence parallel"}))
def test_a_resumed_training_has_equal_bits(models, two_ranks, tmp_path, layout):
    train = TRAIN | {"loss": {}} | LAYOUTS.get(layout or "", {})
    arguments = (models["qwen3"], train, str(tmp_path))
    if layout is None:
        digests = save_and_resume(0, 1, free_port(), *arguments, free_port())
    else:
        digests, _ = two_ranks.run(save_and_resume, *arguments, free_port())
    assert digests["loaded"] == digests["loaded in place"] == digests["saved"]
    assert digests["resumed"] == digests["resumed in place"] == digests["straight"]
    assert digests["straight"] != digests["saved"]


@pytest.mark.integration
@pytest.mark.parametrize("layout", each([None, *LAYOUTS], QUICK))
def test_checkpoints_convert_to_merged_weights(models, two_ranks, tmp_path, layout):
    from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf

    arguments = (models["qwen3"], TRAIN | LAYOUTS.get(layout or "", {}), str(tmp_path / "saved"))
    if layout is None:
        saved = save_adapters(0, 1, free_port(), *arguments)
    else:
        saved, _ = two_ranks.run(save_adapters, *arguments)
    to_hf(tmp_path / "saved", tmp_path / "merged")
    merged = dict(reference.load(str(tmp_path / "merged")).named_parameters())
    for name, weight in saved["merged"].items():
        difference = np.abs(merged[name].detach().numpy() - weight).max()
        assert difference == 0 if layout is None else difference < 1e-6, name


@pytest.mark.integration
def test_adapters_begin_on_the_weights_of_another_run_and_other_ones_are_refused(models, tmp_path):
    full = {name: value for name, value in TRAIN.items() if name != "lora"}
    save_adapters(0, 1, free_port(), models["qwen3"], full, str(tmp_path / "full"))
    found = fresh_adapters(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path / "full"))
    assert np.abs(found["scores"] - found["saved"]).max() == 0
    assert np.array_equal(found["reference"], found["scores"])
    assert found["digest"] == found["second digest"]
    assert "found:    no adapters" in found["whole state"]
    assert "expected: rank 4, alpha 8" in found["whole state"]

    save_adapters(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path / "saved"))
    for other in (full, TRAIN | {"lora": {"rank": 4, "alpha": 4}}):
        refused = fresh_adapters(
            0, 1, free_port(), models["qwen3"], other, str(tmp_path / "saved"), only_error=True
        )
        assert "the checkpoint has other adapters than the policy" in refused["error"]


@pytest.mark.integration
def test_an_offloaded_policy_and_its_reference_come_back(models):
    train = TRAIN | {"use_distributed_optimizer": True}
    found = offload_and_score(0, 1, free_port(), models["qwen3"], train)
    assert found == {"kept": 0.0, "equal": True, "differs": True}


@pytest.mark.integration
def test_the_first_adapters_depend_on_the_seed_only(models, two_ranks, alone):
    other = train_adapters(0, 1, free_port(), models["qwen3"], TRAIN | {"seed": 1})
    name = "0.self_attn.o_proj.lora_A"
    assert np.abs(other["first"][name] - alone["first"][name]).max() > 0.05
    first, second = two_ranks.run(
        train_adapters, models["qwen3"], TRAIN | LAYOUTS["tensor parallel"]
    )
    halves = [first["first"][name], second["first"][name]]
    assert np.array_equal(np.concatenate(halves, 1), alone["first"][name])
    assert not np.any(alone["first"][name.replace("_A", "_B")])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "train", "problem"),
    [
        ("qwen3_moe", {}, "down_proj, gate_proj, up_proj of experts"),
        ("deepseek_v3", {}, "its attention has other matrices"),
        ("qwen3.5", {}, "its attention has other matrices"),
    ],
)
def test_unsupported_models_are_refused_before_the_start(tmp_path, family, train, problem):
    error = refused(given(families.make(family, tmp_path), lora=LORA, **train))
    assert error is not None
    assert problem in str(ConfigError(**error))


def test_targets_have_one_order_and_no_dropout():
    assert LoraConfig(target_modules=("v_proj", "q_proj")).target_modules == ("q_proj", "v_proj")
    assert LoraConfig().target_modules == LORA_TARGETS
    for key, wrong in {"dropout": 0.1, "target_modules": ["q_proj", "q_proj"], "rank": 0}.items():
        with pytest.raises(ValueError, match=key):
            LoraConfig.model_validate({key: wrong})
