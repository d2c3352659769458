"""Every family of models against transformers: scores, training, exports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.preflight import refused
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import FAMILIES, make
from tests.engines.megatron.ranks import (
    engine,
    make_batch,
    save_and_resume,
    score_and_train,
    weights_of_checkpoint,
)
from tests.engines.megatron.routing_jobs import refusal
from tests.parameters import each

TEMPERATURE = 0.8
TRAIN = TrainConfig.model_validate(
    {
        "max_tokens_per_gpu": 64,
        "loss": {"eps_clip_high": 0.28, "entropy_coef": 0.01},
        "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "adam_eps": 1e-5},
    }
)


QUICK = ("qwen2_moe", "llama3.2", "glm4", "deepseek_v3")
"""Families of `make test`: dense and with experts, with each kind of attention."""


@pytest.mark.parametrize("family", each(FAMILIES, QUICK))
def test_a_family_scores_trains_and_exports_like_transformers(family, tmp_path):
    directory = make(family, tmp_path / "model")
    ours = engine(directory, TRAIN, 0, 1, free_port())
    theirs = reference.load(directory)
    try:
        ours.load_hf()
        stored = load_file(f"{directory}/model.safetensors")
        found = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)

        batch = make_batch()
        scores = ours.score(batch)
        assert np.abs(scores - reference.score(theirs, batch, TEMPERATURE)).max() < 1e-5

        batch = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        step = ours.train(batch, packing).steps[0]
        (wanted,) = reference.train(
            theirs, reference.make_optimizer(theirs, TRAIN), batch, packing, TRAIN, TEMPERATURE
        )
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert np.abs(ours.score(batch) - reference.score(theirs, batch, TEMPERATURE)).max() < 2e-4
    finally:
        ours.close()


def test_a_gated_delta_net_keeps_its_state_over_chunks_and_drops_it_between_samples(tmp_path):
    directory = make("qwen3.5", tmp_path)
    values = np.random.default_rng(0).integers(0, 96, 400).tolist()
    # Megatron's formula works on chunks of 64 tokens.
    batch = BatchColumns.from_lists(
        [values[:3], values[200:203], values[:9]],
        [values[3:170], values[203:300], values[350:360]],
        loss_mask=[[1] * 167, [1] * 97, [1] * 10],
    )
    ours = engine(directory, TrainConfig(max_tokens_per_gpu=512), 0, 1, free_port())
    try:
        ours.load_hf()
        scores = ours.score(batch)
    finally:
        ours.close()
    expected = reference.score(reference.load(directory), batch, TEMPERATURE)
    assert np.abs(scores - expected).max() < 1e-5


def test_an_indexer_with_interleaved_rotation_selects_the_same_keys(tmp_path):
    directory = Path(make("glm5", tmp_path))
    expected = reference.score(reference.load(str(directory)), make_batch(), TEMPERATURE)
    weights = load_file(directory / "model.safetensors")
    size, rotated = 16, 8
    order = torch.cat([torch.arange(rotated).view(2, -1).T.flatten(), torch.arange(rotated, size)])
    for name, weight in weights.items():
        if ".indexer.k_norm" in name or ".indexer.wk." in name:
            weights[name] = weight[order].contiguous()
        elif ".indexer.wq_b." in name:
            weights[name] = weight.unflatten(0, (-1, size))[:, order].flatten(0, 1).contiguous()
    save_file(weights, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"indexer_rope_interleave": True}))
    ours = engine(str(directory), TRAIN, 0, 1, free_port())
    try:
        ours.load_hf()
        scores = ours.score(make_batch())
    finally:
        ours.close()
    assert np.abs(scores - expected).max() < 1e-5


TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "glm4": TENSOR,
    "llama3.2": {"pipeline_model_parallel_size": 2},
    "deepseek_v3": {**TENSOR, "expert_model_parallel_size": 2},
    "glm5": {**TENSOR, "expert_model_parallel_size": 2},
    "gpt_oss": {**TENSOR, "expert_model_parallel_size": 2},
    "minimax_m2": {**TENSOR, "expert_model_parallel_size": 2},
    "qwen3_next": {**TENSOR, "expert_model_parallel_size": 2},
    "qwen3.5": {"tensor_model_parallel_size": 2},
}
QUICK_LAYOUTS = ("glm4", "llama3.2", "deepseek_v3", "qwen3.5")
"""Families of `make test`: each layout once, and linear attention."""
SAVED = ("glm4", "deepseek_v3", "glm5", "gpt_oss", "minimax_m2", "qwen3_next")


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_scores_and_trains_in_bfloat16(family, tmp_path):
    directory = make(family, tmp_path / "model")
    precise = engine(directory, TRAIN, 0, 1, free_port())
    try:
        precise.load_hf()
        batch = make_batch()
        wanted = precise.score(batch)
    finally:
        precise.close()
    ours = engine(directory, TRAIN, 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        scores = ours.score(batch)
        assert np.abs(scores - wanted).mean() < 0.15
        batch = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        assert ours.train(batch, packing).steps[0]["grad_norm"] > 0
    finally:
        ours.close()


@pytest.mark.parametrize("family", each(LAYOUTS, QUICK_LAYOUTS))
def test_two_ranks_compute_the_same_as_one_rank(family, two_ranks, tmp_path):
    directory = make(family, tmp_path)
    train = TRAIN.model_dump() | {"loss": {"kl_loss_coef": 0.05}}
    alone = score_and_train(0, 1, free_port(), directory, train, 1)
    together = two_ranks.run(score_and_train, directory, train | {"parallel": LAYOUTS[family]}, 1)[
        0
    ]
    assert np.abs(together["scores"] - alone["scores"]).max() < 1e-5
    for found, expected in zip(together["steps"], alone["steps"], strict=True):
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, weight in alone["after"].items():
        assert np.abs(together["after"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
@pytest.mark.parametrize("family", each(SAVED, ("deepseek_v3", "qwen3_next")))
def test_custom_layers_are_saved_in_one_layout_and_loaded_in_another(family, two_ranks, tmp_path):
    directory = make(family, tmp_path / "model")
    train = {"max_tokens_per_gpu": 64, "parallel": LAYOUTS[family]}
    first, second = two_ranks.run(
        save_and_resume, directory, train, str(tmp_path / "saved"), free_port()
    )
    assert first == second
    assert first["loaded"] == first["saved"] and first["resumed"] == first["straight"]
    together = two_ranks.run(weights_of_checkpoint, directory, train, str(tmp_path / "saved"))[0][
        "weights"
    ]
    alone = weights_of_checkpoint(0, 1, free_port(), directory, {}, str(tmp_path / "saved"))[
        "weights"
    ]
    assert all(np.array_equal(alone[name], weight) for name, weight in together.items())


@pytest.mark.integration
def test_a_pipeline_stage_needs_the_selection_of_its_own_layers(two_ranks, tmp_path, monkeypatch):
    kinds = ["full", "full", "shared", "full"]
    monkeypatch.setitem(FAMILIES, "changed", FAMILIES["glm5"] | {"indexer_types": kinds})
    layout = {"pipeline_model_parallel_size": 2}
    for why in two_ranks.run(refusal, make("changed", tmp_path), {"parallel": layout}):
        assert "layer 3 begins a stage and uses layer 2" in why


@pytest.mark.parametrize(
    ("family", "size", "key"),
    [
        ("glm5", {"context_parallel_size": 2}, "context_parallel_size"),
        ("qwen3.5", {"context_parallel_size": 2}, "context_parallel_size"),
        (
            "minimax_m2",
            {
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
                "expert_tensor_parallel_size": 4,
            },
            "tensor_model_parallel_size",
        ),
    ],
)
def test_layouts_that_a_family_cannot_have_are_refused_before_the_start(
    family: str, size: dict, key: str, tmp_path
):
    model = {"source": {"type": "huggingface", "hf_checkpoint": make(family, tmp_path)}}
    request = {"directory": str(tmp_path), "model": model, "deterministic": False}
    assert refused(request | {"train": {}}) is None
    found = refused(request | {"train": {"parallel": size}})
    assert found is not None and key in f"{found['where']}: {found['found']}"


@pytest.mark.integration
def test_experts_on_tensor_parallel_ranks_without_sequence_parallelism_are_refused(
    two_ranks, tmp_path
):
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    for why in two_ranks.run(refusal, make("moonlight", tmp_path), {"parallel": layout}):
        assert "train.parallel.sequence_parallel" in why
