"""Grouped experts equal Megatron's experts (`train.megatron.moe_grouped_gemm`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.model.layers import GroupedExperts, grouped_linear
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine, score_and_train
from tests.engines.megatron.test_parallel import TRAIN

TOGETHER = {"moe_grouped_gemm": True}
LAYOUTS = {
    "expert parallel": {"expert_model_parallel_size": 2},
    "tensor and sequence parallel": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
}


def test_each_group_is_multiplied_by_its_own_weight():
    random = torch.Generator().manual_seed(0)
    tokens, *weights = (
        torch.randn(*shape, generator=random).requires_grad_()
        for shape in ((10, 16), *[(8, 16)] * 4)
    )
    ends = torch.tensor([4, 4, 9, 10], dtype=torch.int32)
    parts = zip(tokens.split([4, 0, 5, 1]), weights, strict=True)
    towards = torch.randn(10, 8, generator=random)
    found = grouped_linear(tokens, ends, weights)
    wanted = torch.cat([part @ weight.T for part, weight in parts])
    torch.testing.assert_close(found, wanted)
    gradients = [
        torch.autograd.grad(result, (tokens, *weights), towards) for result in (found, wanted)
    ]
    torch.testing.assert_close(*gradients)
    assert not gradients[0][2].any()


@pytest.fixture(scope="module")
def one_after_another(models):
    return score_and_train(0, 1, free_port(), models["qwen3_moe"], TRAIN)


def assert_same(found: dict, wanted: dict) -> None:
    assert np.abs(found["scores"] - wanted["scores"]).max() < 1e-5
    for step, expected in zip(found["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for name, weight in wanted["after"].items():
        assert np.abs(found["after"][name] - weight).max() < 2e-5, name


def test_grouped_experts_score_and_train_like_sequential_experts(models, one_after_another):
    assert_same(
        score_and_train(0, 1, free_port(), models["qwen3_moe"], TRAIN | {"megatron": TOGETHER}),
        one_after_another,
    )


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_experts_equal_sequential_experts_on_two_ranks(
    models, one_after_another, two_ranks, layout
):
    train = TRAIN | {"megatron": TOGETHER, "parallel": LAYOUTS[layout]}
    first, second = two_ranks.run(score_and_train, models["qwen3_moe"], train)
    assert first["digest"] == second["digest"]
    assert_same(first, one_after_another)


def test_grouped_experts_are_used_only_if_configured(models):
    for asked in (False, True):
        config = TrainConfig.model_validate(TRAIN | {"megatron": TOGETHER if asked else {}})
        ours = engine(models["qwen3_moe"], config, 0, 1, free_port())
        try:
            found = [
                module
                for module in ours.trained.last_model.modules()
                if isinstance(module, GroupedExperts)
            ]
            assert len(found) == (2 if asked else 0)
        finally:
            ours.close()
