"""Frozen parameters: equal to torch with the same ones frozen, over ranks and after a resume."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf
from rlpipe.engines.megatron.preflight import refused
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.freezing_jobs import (
    critic_gradients,
    error_of_engine,
    load_with_others,
    train_frozen,
)
from tests.engines.megatron.lora_jobs import save_adapters
from tests.engines.megatron.ranks import make_batch, near, save_and_resume
from tests.engines.megatron.test_preflight import given
from tests.parameters import each

TRAIN = {
    "max_tokens_per_gpu": 64,
    "loss": {"eps_clip": 0.1, "eps_clip_high": 0.1, "entropy_coef": 0.01},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.0, "adam_eps": 1e-5},
}
FREEZE = "freeze_params_name_list"
ONLY = "only_train_params_name_list"
UPPER = {ONLY: [r"decoder\.layers\.1\."]}
RECOMPUTE = {"megatron": {"recompute_granularity": "full"}}
CASES = {
    "tied embedding": ("qwen3", {FREEZE: ["word_embeddings"]}, r"embed_tokens|lm_head"),
    "tied output layer": ("qwen3", {FREEZE: ["output_layer"]}, r"embed_tokens|lm_head"),
    "upper layers": ("qwen3", UPPER, r"layers\.0|embed|\.norm\."),
    "upper layers, recomputed": ("qwen3", UPPER | RECOMPUTE, r"layers\.0|embed|model\.norm"),
    "a layer with its norm": (
        "llama",
        {FREEZE: ["linear_fc1"]},
        r"gate_proj|up_proj|post_attention_layernorm",
    ),
    "biases alone": ("qwen2", {ONLY: [r"\.bias$"]}, r"weight$"),
    "experts alone": ("qwen3_moe", {ONLY: ["experts"]}, r"^(?!.*mlp\.experts)"),
    "routers and output layer": (
        "qwen3_moe",
        {FREEZE: ["router", "^output_layer"]},
        r"mlp\.gate\.|lm_head",
    ),
}
"""Family, keys, and the frozen parameters in transformers' names."""
QUICK = {"tied embedding", "upper layers, recomputed", "biases alone", "experts alone"}


def plain_run(model_dir: str, scores: np.ndarray, frozen: str) -> tuple[torch.nn.Module, list]:
    """Take the steps of `train_frozen` in transformers."""
    model = reference.load(model_dir)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    config = TrainConfig.model_validate(TRAIN)
    optimizer = reference.make_optimizer(model, config)
    without_clipping = config.optimizer.model_copy(update={"clip_grad": 1e9})
    config = config.model_copy(update={"optimizer": without_clipping})
    steps = []
    for iteration in range(2):
        batch = make_batch().with_columns(
            proximal_log_probs=near(scores, 0.2, 2 * iteration),
            reference_log_probs=near(scores, 0.3, 2 * iteration + 1),
        )
        packing = plan(batch.lengths, global_batch_size=12, max_tokens=64, data_parallel=1)
        steps += reference.train(model, optimizer, batch, packing, config, 0.8)
    return model, steps


@pytest.mark.integration
@pytest.mark.parametrize("case", each(CASES, QUICK))
def test_steps_are_those_of_torch_with_the_same_frozen_parameters(models, case):
    family, keys, frozen = CASES[case]
    found = train_frozen(0, 1, free_port(), models[family], TRAIN | keys)
    model, steps = plain_run(models[family], found["scores"], frozen)
    for ours, expected in zip(found["steps"], steps, strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if family != "qwen3_moe":  # transformers has the experts of a layer in one tensor
        assert found["changed"] == trained
    assert not {name for name in found["changed"] if re.search(frozen, name)}
    after = reference.score(model, make_batch(), 0.8)
    assert np.abs(found["trained scores"] - after).max() < 1e-4
    assert np.abs(after - found["scores"]).max() > 0.02
    numbers = found["numbers"]
    assert 0 < numbers["trained"] < numbers["parameters"]
    assert numbers["gradients"] == numbers["trained"]
    assert numbers["optimizer"] == 2 * numbers["trained"]


LOWER = {FREEZE: [r"embedding|layers\.[01]\.", "output_layer"]}
LAYOUTS = {
    "data parallel, distributed optimizer": ("qwen3", UPPER | {"use_distributed_optimizer": True}),
    "tensor and sequence parallel, biases": (
        "qwen2",
        {
            ONLY: [r"\.bias$"],
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        },
    ),
    "pipeline parallel, frozen first stage": (
        "qwen3_deep",
        LOWER | {"parallel": {"pipeline_model_parallel_size": 2}},
    ),
    "pipeline parallel, frozen last stage": (
        "qwen3_deep",
        {ONLY: [r"layers\.0\."], "parallel": {"pipeline_model_parallel_size": 2}},
    ),
    "pipeline parallel, frozen first stage, distributed optimizer": (
        "qwen3_deep",
        LOWER
        | {"use_distributed_optimizer": True, "parallel": {"pipeline_model_parallel_size": 2}},
    ),
    "virtual pipelining": (
        "qwen3_deep",
        LOWER
        | {
            "parallel": {"pipeline_model_parallel_size": 2},
            "megatron": {"virtual_pipeline_model_parallel_size": 2},
        },
    ),
    "context parallel": ("qwen3", UPPER | {"parallel": {"context_parallel_size": 2}}),
    "expert parallel": (
        "qwen3_moe",
        {ONLY: ["experts"], "parallel": {"expert_model_parallel_size": 2}},
    ),
    "expert parallel, one expert": (
        "qwen3_moe",
        {
            ONLY: [r"layers\.1\.mlp\.experts.*weight3$"],
            "parallel": {"expert_model_parallel_size": 2},
        },
    ),
}
QUICK_LAYOUTS = {"pipeline parallel, frozen first stage", "expert parallel, one expert"}


def of_two_ranks(layout: str) -> tuple[str, dict]:
    family, keys = LAYOUTS[layout]
    return family, TRAIN | keys


@pytest.mark.integration
@pytest.mark.parametrize("layout", each(LAYOUTS, QUICK_LAYOUTS))
def test_two_ranks_train_and_freeze_the_same_parameters_as_one(models, two_ranks, layout):
    family, train = of_two_ranks(layout)
    first, second = two_ranks.run(train_frozen, models[family], train)
    one_rank = train | {"parallel": {}, "megatron": {}, "use_distributed_optimizer": False}
    alone = train_frozen(0, 1, free_port(), models[family], one_rank)
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"]
    for found, expected in zip(first["steps"], alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.abs(first["trained scores"] - alone["trained scores"]).max() < 1e-4
    assert first["changed"] == second["changed"] == alone["changed"]
    assert 0 < len(alone["changed"]) < len(alone["after"])
    for name, weight in alone["after"].items():
        assert np.abs(first["after"][name] - weight).max() < 2e-5, name
    for one in (first, second):
        padding = one["numbers"]["gradients"] - one["numbers"]["trained"]
        assert 0 <= padding <= 512 if "distributed optimizer" in layout else padding == 0


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", each(LAYOUTS, QUICK_LAYOUTS))
def test_a_resumed_run_equals_an_uninterrupted_one(models, two_ranks, tmp_path, layout, dtype):
    family, train = of_two_ranks(layout)
    first, second = two_ranks.run(
        save_and_resume, models[family], train, str(tmp_path), free_port(), dtype
    )
    assert first == second
    assert first["loaded"] == first["loaded in place"] == first["saved"]
    assert first["resumed"] == first["resumed in place"] == first["straight"] != first["saved"]


@pytest.mark.integration
@pytest.mark.parametrize("optimizer", [{}, {"use_distributed_optimizer": True}])
def test_a_checkpoint_continues_only_with_the_same_frozen_parameters(models, tmp_path, optimizer):
    train = TRAIN | UPPER | optimizer
    port = free_port()
    found = save_and_resume(0, 1, port, models["qwen3"], train, str(tmp_path), free_port())
    assert found["resumed"] == found["straight"] != found["saved"]
    others = TRAIN | {FREEZE: ["router|embedding"]}
    errors = load_with_others(0, 1, free_port(), models["qwen3"], others, str(tmp_path))
    assert r"only_train_params_name_list: decoder\.layers\.1\." in errors["state"]
    assert errors["weights"] == "no error"
    everything = load_with_others(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path))
    assert "no frozen parameters" in everything["state"]


@pytest.mark.integration
def test_a_checkpoint_converts_to_the_trained_weights(models, tmp_path):
    train = TRAIN | {ONLY: [r"layers\.1\.mlp\.experts.*weight3$"]}
    saved = save_adapters(0, 1, free_port(), models["qwen3_moe"], train, str(tmp_path / "saved"))
    to_hf(tmp_path / "saved", tmp_path / "converted")
    files = (tmp_path / "converted").glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == saved["merged"].keys()
    for name, weight in saved["merged"].items():
        assert np.array_equal(found[name].float().numpy(), weight), name


@pytest.mark.integration
def test_a_critic_freezes_the_same_parameters_but_trains_its_head(models):
    train = TRAIN | {FREEZE: ["embedding", "output_layer", r"layers\.0"]}
    trained = critic_gradients(0, 1, free_port(), models["llama"], train)
    names = {name for name, requires_gradient in trained.items() if requires_gradient}
    assert {"output_layer.weight", "output_layer.bias"} < names
    assert names < set(trained)
    assert not [name for name in names if "embedding" in name or "layers.0." in name]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({FREEZE: ["linear_fc3"]}, r"no parameter has such a name(?s:.*)layers\.1\.mlp\.linear_fc"),
        ({ONLY: [r"layers\.7\."]}, r"layers\\\.7(?s:.*)decoder\.layers\.1\."),
        ({FREEZE: ["weight"]}, "every parameter is frozen"),
    ],
)
def test_patterns_without_a_parameter_or_for_all_are_refused(models, keys, words):
    error = error_of_engine(0, 1, free_port(), models["qwen3"], TRAIN | keys)
    assert re.search(words, error)
    request = given(models["qwen3"], **TRAIN, **keys)
    assert re.search(words, " ".join(map(str, (refused(request) or {}).values())))


def test_names_of_a_whole_model_are_accepted_before_the_start(models):
    for family, keys, _ in CASES.values():
        assert refused(given(models[family], **TRAIN | keys)) is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({FREEZE: ["("]}, "not a regular expression"),
        ({FREEZE: ["a"], ONLY: ["b"]}, "exclude each other"),
        ({FREEZE: ["a"], "lora": {}}, "cannot be used with lora"),
    ],
)
def test_lists_that_cannot_be_used_are_errors_of_the_configuration(keys, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig.model_validate(keys)


def test_the_order_of_patterns_changes_no_record():
    first, second = (
        TrainConfig.model_validate({FREEZE: patterns}) for patterns in (["b", "a"], ["a", "b", "a"])
    )
    assert first.identity() == second.identity()
    assert FREEZE not in TrainConfig().identity()
