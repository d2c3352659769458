"""Products that add weight gradients to Megatron's buffer (engines.megatron.model.linear)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rlpipe.engines.megatron.model import linear as module
from rlpipe.engines.megatron.model.fused import recomputed_for_backward, rms_norm
from rlpipe.engines.megatron.model.linear import accumulates, linear, with_fused_gradients
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import score_and_train
from tests.engines.megatron.test_parallel import EXPERTS, LAYOUTS, TRAIN


def parameter(rows: int, columns: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    made: Any = torch.nn.Parameter(torch.randn(rows, columns, generator=generator))
    made.main_grad = torch.zeros(rows, columns)
    made.grad_added_to_main_grad = False
    return made


def test_the_buffer_sums_the_gradients_of_all_micro_batches():
    weight = parameter(3, 4)
    wanted = torch.nn.Parameter(weight.detach().clone())
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 1, 4, generator=generator, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        linear(x, weight).square().sum().backward()
        torch.nn.functional.linear(same, wanted).square().sum().backward()
        torch.testing.assert_close(x.grad, same.grad)
        # What is returned for the weight has no meaning: Megatron's hook drops it.
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
    torch.testing.assert_close(weight.main_grad, wanted.grad)


def test_an_input_that_is_not_saved_is_recomputed():
    weight = parameter(3, 4)
    scale = torch.nn.Parameter(torch.full((4,), 2.0))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    normal = rms_norm(x, scale, 1e-6)
    with recomputed_for_backward(normal):
        out = linear(normal, weight)
    out.sum().backward()
    wanted = normal.detach().sum(0).expand(3, 4)
    torch.testing.assert_close(weight.main_grad, wanted)


def test_no_rows_add_nothing():
    weight = parameter(3, 4)
    linear(torch.empty(0, 4, requires_grad=True), weight).sum().backward()
    assert weight.main_grad.eq(0).all()


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, True),
        ({"gradient_accumulation_fusion": True}, False),
        ({"sequence_parallel": True}, False),
        ({"grad_output_buffer": []}, False),
    ],
)
def test_megatrons_own_function_computes_the_other_cases(changes: dict[str, Any], fused: bool):
    calls: list[tuple[Any, ...]] = []

    def own(*arguments: Any, tp_group: Any = None) -> torch.Tensor:
        calls.append((*arguments, tp_group))
        return torch.zeros(0)

    weight = parameter(3, 4)
    x = torch.ones(2, 4)
    bias = torch.full((3,), 5.0)
    arguments = {
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "grad_output_buffer": None,
        **changes,
    }
    with patch.object(module, "accumulates", return_value=True):
        found = with_fused_gradients(own)(x, weight, bias, **arguments, tp_group="group")
    if fused:
        torch.testing.assert_close(found, x @ weight.t() + bias)
        assert not calls
    else:
        assert calls == [(x, weight, bias, *arguments.values(), "group")]


def test_only_16_bit_weights_on_gpus_with_a_float32_buffer_are_fused():
    """A CPU keeps the order of sums that its stored runs have."""
    weight = parameter(3, 4)
    assert not accumulates(weight)
    assert not accumulates(torch.nn.Parameter(torch.zeros(3, 4)))


def trained(fused: bool, *arguments: Any) -> dict[str, Any]:
    """Return what `score_and_train` returns, with fused gradients on a CPU."""
    if not fused:
        return score_and_train(*arguments)
    with patch.object(module, "accumulates", _has_buffer):
        return score_and_train(*arguments)


def trained_fused(*arguments: Any) -> dict[str, Any]:
    return trained(True, *arguments)


def _has_buffer(weight: torch.Tensor) -> bool:
    return getattr(weight, "main_grad", None) is not None


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "data parallel, distributed optimizer"),
        ("qwen3", "tensor parallel"),
        ("qwen3", "pipeline parallel"),
        ("qwen3_moe", "expert parallel"),
    ],
)
def test_layouts_train_as_with_megatrons_own_gradients(models, two_ranks, family, layout):
    megatron = {"overlap_grad_reduce": True} if "distributed" in layout else {}
    train = TRAIN | {**LAYOUTS, **EXPERTS}[layout] | {"megatron": megatron}
    wanted = trained(False, 0, 1, free_port(), models[family], TRAIN)
    first, second = two_ranks.run(trained_fused, models[family], train)
    assert first["digest"] == second["digest"]
    for found, expected in zip(first["steps"], wanted["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for name, weight in wanted["after"].items():
        assert np.abs(first["after"][name] - weight).max() < 2e-5, name
