"""The same batch on one rank and on two, in every layout, gives equal results."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import gloo_threads_left, score_and_train, train_on_any_number
from tests.parameters import each

TRAIN = {
    "max_tokens_per_gpu": 64,
    "loss": {"eps_clip": 0.1, "entropy_coef": 0.01, "kl_loss_coef": 0.05},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-5},
}
LAYOUTS = {
    "data parallel": {},
    "data parallel, distributed optimizer": {"use_distributed_optimizer": True},
    "tensor parallel": {"parallel": {"tensor_model_parallel_size": 2}},
    "tensor and sequence parallel": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    },
    "pipeline parallel": {"parallel": {"pipeline_model_parallel_size": 2}},
    "context parallel": {"parallel": {"context_parallel_size": 2}},
}
EXPERTS = {
    "expert parallel": {"parallel": {"expert_model_parallel_size": 2}},
    "expert parallel, distributed optimizer": {
        "parallel": {"expert_model_parallel_size": 2},
        "use_distributed_optimizer": True,
    },
}
CASES = [(family, layout) for family in ("qwen3", "llama") for layout in LAYOUTS] + [
    ("qwen3_moe", layout) for layout in EXPERTS
]
QUICK = [case for case in CASES if case[0] != "llama"] + [("llama", "pipeline parallel")]
"""Each layout once, and an embedding that is not tied on another stage than the output layer."""


@pytest.fixture(scope="module")
def alone(models):
    return {
        family: score_and_train(0, 1, free_port(), models[family], TRAIN)
        for family in ("qwen3", "llama", "qwen3_moe")
    }


@pytest.mark.integration
@pytest.mark.parametrize(("family", "layout"), each(CASES, QUICK))
def test_two_ranks_compute_the_same_as_one_rank(models, alone, two_ranks, family, layout):
    wanted = alone[family]
    first, second = two_ranks.run(
        score_and_train, models[family], TRAIN | {**LAYOUTS, **EXPERTS}[layout]
    )
    assert np.array_equal(first["scores"], second["scores"])
    assert first["steps"] == second["steps"]
    assert first["digest"] == second["digest"]
    assert np.abs(first["scores"] - wanted["scores"]).max() < 1e-5
    assert np.abs(first["reference"] - wanted["reference"]).max() < 1e-5
    assert len(first["steps"]) == len(wanted["steps"]) == 4
    for found, expected in zip(first["steps"], wanted["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, weight in wanted["after"].items():
        assert np.abs(first["after"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "data parallel"),
        ("qwen3", "data parallel, distributed optimizer"),
        ("qwen3", "pipeline parallel"),
        ("qwen3_moe", "expert parallel, distributed optimizer"),
    ],
)
def test_overlapped_gradient_reduction_gives_equal_gradients(models, two_ranks, family, layout):
    """Megatron reduces after the last micro-batch, for any number of micro-batches."""
    train = TRAIN | {"loss": {}} | {**LAYOUTS, **EXPERTS}[layout]
    wanted, _ = two_ranks.run(train_on_any_number, models[family], train)
    overlapped = train | {"megatron": {"overlap_grad_reduce": True, "bucket_size": 5000}}
    first, second = two_ranks.run(train_on_any_number, models[family], overlapped)
    assert len(set(first["micro-batches"])) == 3
    for found, expected in zip(first["steps"], wanted["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, weight in wanted["after"].items():
        assert np.array_equal(first["after"][name], second["after"][name]), name
        assert np.abs(first["after"][name] - weight).max() < 1e-6, name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", "data parallel, distributed optimizer"), ("qwen3_moe", "expert parallel")],
)
def test_a_closed_engine_leaves_no_threads(models, two_ranks, family, layout):
    for had, left in two_ranks.run(
        gloo_threads_left,
        models[family],
        {"max_tokens_per_gpu": 64} | {**LAYOUTS, **EXPERTS}[layout],
    ):
        assert had > 0 and left == 0
