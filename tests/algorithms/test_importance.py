"""Truncated importance sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.importance import truncated_importance

number = st.floats(-4, 4, width=32)
bound = st.floats(0, 5, width=32)


def at_ratio(ratio: float, **clip: float) -> tuple[float, float, float]:
    found = truncated_importance(torch.tensor([math.log(ratio)]), torch.zeros(1), **{"tis_clip": 2.0, **clip})
    return found.weight.item(), found.ratio.item(), found.clipped.item()


def test_a_token_that_the_engine_found_unlikely_is_weighted_up_to_the_bound():
    assert at_ratio(1.5) == pytest.approx((1.5, 1.5, 0))
    assert at_ratio(3.0) == pytest.approx((2.0, 3.0, 1))


def test_a_token_that_the_engine_found_too_likely_is_weighted_down_to_the_lower_bound():
    assert at_ratio(0.25) == pytest.approx((0.25, 0.25, 0))
    assert at_ratio(0.25, tis_clip_low=0.5) == pytest.approx((0.5, 0.25, 1))


def test_on_policy_every_weight_is_exactly_1():
    log_probs = torch.linspace(-20, 0, 101)
    found = truncated_importance(log_probs, log_probs.clone(), tis_clip=2.0)
    assert found.weight.unique().tolist() == found.ratio.unique().tolist() == [1.0]
    assert found.clipped.sum() == 0


def test_no_gradient_flows_through_the_weights():
    log_probs = torch.tensor([-1.0, -3.0], requires_grad=True)
    assert not truncated_importance(log_probs, torch.zeros(2), tis_clip=2.0).weight.requires_grad


@given(st.lists(st.tuples(number, number), min_size=1, max_size=20), bound, bound)
def test_it_is_what_a_loop_computes(rows: list[tuple[float, float]], first: float, second: float):
    low, high = sorted((first, second))
    proximal, behaviour = torch.tensor(rows).unbind(1)
    found = truncated_importance(proximal, behaviour, tis_clip=high, tis_clip_low=low)
    for i, (ours, theirs) in enumerate(rows):
        ratio = float(np.exp(np.float64(ours) - np.float64(theirs)))
        weight = ratio
        if weight > high:
            weight = high
        if weight < low:
            weight = low
        assert found.weight[i].item() == pytest.approx(weight, rel=1e-5)
        assert found.ratio[i].item() == pytest.approx(ratio, rel=1e-5)
        if abs(ratio - low) > 1e-4 and abs(ratio - high) > 1e-4:
            assert found.clipped[i].item() == float(not low <= ratio <= high)
