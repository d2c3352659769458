"""Models that read images against transformers: scores, training, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.batch.packing import plan
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.engines.megatron.bridges.supported import check_config
from rlpipe.engines.megatron.checkpoint.conversion.convert import to_hf
from rlpipe.engines.megatron.preflight import refused
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference, vision_models
from tests.engines.megatron.ranks import engine
from tests.engines.megatron.test_preflight import given
from tests.engines.megatron.vision_models import score_and_train_images
from tests.parameters import each

TEMPERATURE = 0.8
TRAIN = {
    "max_tokens_per_gpu": 96,
    "loss": {"eps_clip_high": 0.28, "entropy_coef": 0.01},
    "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "adam_eps": 1e-5},
}
SIZES = [
    [(4, 6)],
    [],
    [(2, 2), (8, 4)],
    [(10, 10)],
    [(2, 8)],
    [(6, 2), (4, 4), (2, 2)],
    [],
    [(4, 4)],
]
"""Patches of the images of each sample."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": False}},
    "sequence": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "context": {"parallel": {"context_parallel_size": 2}},
    "data": {"megatron": {"overlap_grad_reduce": True, "bucket_size": 5000}},
    "pipeline": {"parallel": {"pipeline_model_parallel_size": 2}},
}
QUICK = (("qwen3_vl", "sequence"), ("qwen2_5_vl", "context"), ("qwen3_vl", "data"))
FROZEN = {"freeze_params_name_list": [r"^vision\."]}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_a_model_scores_trains_and_exports_images_like_transformers(family, tied, tmp_path):
    train = TrainConfig.model_validate(TRAIN)
    directory = vision_models.make(family, tmp_path / "model", tied=tied)
    ours = engine(directory, train, 0, 1, free_port())
    model = vision_models.load(directory)
    batch = vision_models.make_batch(model, SIZES)
    theirs = vision_models.Reads(model, batch)
    try:
        ours.load_hf()
        stored = load_file(f"{directory}/model.safetensors")
        found = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)

        scores = ours.score(batch)
        expected = reference.score(theirs, batch, TEMPERATURE)
        assert np.abs(scores - expected).max() < 1e-5

        batch = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=96, data_parallel=1)
        assert len(packing.steps[0][0]) > 1
        step = ours.train(batch, packing).steps[0]
        (wanted,) = reference.train(
            theirs, reference.make_optimizer(theirs, train), batch, packing, train, TEMPERATURE
        )
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        expected = reference.score(theirs, batch, TEMPERATURE)
        assert np.abs(ours.score(batch) - expected).max() < 2e-4

        ours.save_hf(tmp_path / "export")
        written = vision_models.Reads(vision_models.load(str(tmp_path / "export")), batch)
        assert np.abs(reference.score(written, batch, TEMPERATURE) - expected).max() < 2e-4
    finally:
        ours.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {
        family: vision_models.make(family, tmp_path_factory.mktemp(family))
        for family in vision_models.FAMILIES
    }


@pytest.mark.parametrize(
    ("family", "layout"),
    each(
        [
            (family, layout)
            for family in vision_models.FAMILIES
            for layout in LAYOUTS
            if (family, layout) != ("qwen3_vl", "pipeline")
        ],
        QUICK,
    ),
)
def test_two_ranks_read_images_like_one_rank(models, two_ranks, family, layout):
    batch = vision_models.make_batch(vision_models.load(models[family]), SIZES)
    wanted = score_and_train_images(0, 1, free_port(), models[family], TRAIN, batch)
    found, other = two_ranks.run(
        score_and_train_images, models[family], TRAIN | LAYOUTS[layout], batch
    )
    assert found["digest"] == other["digest"]
    assert np.abs(found["scores"] - wanted["scores"]).max() < 1e-5
    for step, expected in zip(found["steps"], wanted["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, weight in wanted["after"].items():
        assert np.abs(found["after"][name] - weight).max() < 2e-5, name


def test_a_frozen_tower_keeps_its_weights(models):
    family = "qwen3_vl"
    batch = vision_models.make_batch(vision_models.load(models[family]), SIZES)
    before = load_file(f"{models[family]}/model.safetensors")
    result = score_and_train_images(0, 1, free_port(), models[family], TRAIN | FROZEN, batch)
    changed = {
        name for name, weight in result["after"].items() if (weight != before[name].numpy()).any()
    }
    assert changed and not any("visual" in name for name in changed)
    assert {name for name in before if "visual" not in name} == changed


def test_recomputed_layers_have_the_same_gradients(models):
    family = "qwen2_5_vl"
    batch = vision_models.make_batch(vision_models.load(models[family]), SIZES)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
    wanted, found = (
        score_and_train_images(0, 1, free_port(), models[family], TRAIN | {"megatron": more}, batch)
        for more in ({}, {**recompute, "recompute_num_layers": 1})
    )
    assert found["digest"] == wanted["digest"]


def test_a_checkpoint_holds_the_tower(models, tmp_path):
    train = TrainConfig.model_validate(TRAIN)
    ours = engine(models["qwen3_vl"], train, 0, 1, free_port())
    try:
        ours.load_hf()
        ours.save_checkpoint(tmp_path, 1)
        digest = ours.state_digest()
    finally:
        ours.close()
    to_hf(tmp_path, tmp_path / "export")
    fresh = engine(models["qwen3_vl"], train, 0, 1, free_port())
    try:
        fresh.load_checkpoint(tmp_path)
        assert fresh.state_digest() == digest
    finally:
        fresh.close()
    found, wanted = (
        load_file(f"{folder}/model.safetensors")
        for folder in (tmp_path / "export", models["qwen3_vl"])
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("family", "train", "key"),
    [
        ("qwen2_5_vl", {"lora": {"rank": 4}}, "train.lora"),
        (
            "qwen3_vl",
            {"parallel": {"pipeline_model_parallel_size": 2}},
            "train.parallel.pipeline_model_parallel_size",
        ),
        (
            "qwen3_vl",
            {"megatron": {"recompute_granularity": "full"}},
            "train.megatron.recompute_granularity",
        ),
    ],
)
def test_what_images_do_not_have_is_refused_before_the_start(models, family, train, key):
    error = refused(given(models[family], **train))
    assert error is not None and error["where"] == key


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"vision_config": {"depth": 2, "adapter": 1}}, "vision_config.adapter"),
        ({"rope_parameters": {"mrope_section": [2, 3]}}, "mrope_section"),
    ],
)
def test_a_key_that_images_do_not_have_is_refused(models, change, key):
    config = json.loads((Path(models["qwen2_5_vl"]) / "config.json").read_text())
    text = config["text_config"]
    check_config(config, "config.json")
    changed = {**config, **change}
    if "rope_parameters" in change:
        changed = {**config, "text_config": {**text, **change}}
    with pytest.raises(ConfigError, match=key):
        check_config(changed, "config.json")


def test_a_critic_of_a_model_that_reads_images_is_refused(models):
    train = TrainConfig.model_validate(TRAIN)
    with pytest.raises(ConfigError, match="a critic cannot read images"):
        engine(models["qwen3_vl"], train, 0, 1, free_port(), critic=CriticConfig())
