"""Estimates of the KL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.divergence import kl_estimate

log_prob = st.floats(-20, 0, width=32)


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", 0.1), ("k2", 0.005), ("k3", math.exp(-0.1) - 1 + 0.1), ("low_var_kl", 0.004837418)]
)
def test_hand_values_at_a_difference_of_a_tenth(kind, value):
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.1]), kind).item() == pytest.approx(value, abs=1e-6)


def test_low_var_kl_is_clamped_and_k3_is_not():
    far = torch.tensor([-20.0]), torch.tensor([0.0])
    assert kl_estimate(*far, "low_var_kl").item() == 10
    assert kl_estimate(*far, "k3").item() > 1e8


@given(st.lists(st.tuples(log_prob, log_prob), min_size=1, max_size=20))
def test_k2_and_k3_are_never_negative(pairs):
    policy, reference = torch.tensor(pairs).unbind(1)
    assert (kl_estimate(policy, reference, "k2") >= 0).all()
    assert (kl_estimate(policy, reference, "k3") >= -1e-5).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_k1_aside_the_gradient_vanishes_where_the_policies_agree(kind):
    policy = torch.tensor([-1.5], requires_grad=True)
    kl_estimate(policy, torch.tensor([-1.5]), kind).sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == (1 if kind == "k1" else 0)


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
