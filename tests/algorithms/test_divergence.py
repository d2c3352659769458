"""KL estimates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.divergence import kl_estimate
from tests.algorithms import loops

log_prob = st.floats(-20, 0, width=32)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("k1", 0.1), ("k2", 0.005), ("k3", math.exp(-0.1) - 1 + 0.1), ("low_var_kl", 0.004837418)],
)
def test_values_by_hand_at_a_difference_of_a_tenth(kind, value):
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.1]), kind).item() == pytest.approx(
        value, abs=1e-6
    )


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
def test_except_for_k1_the_gradient_is_0_where_the_policies_agree(kind):
    policy = torch.tensor([-1.5], requires_grad=True)
    kl_estimate(policy, torch.tensor([-1.5]), kind).sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == (1 if kind == "k1" else 0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@given(st.lists(st.tuples(log_prob, log_prob, st.floats(0, 3, width=32)), min_size=1, max_size=20))
def test_estimates_with_and_without_importance_equal_the_reference_loop(rows):
    policy, reference, importance = torch.tensor(rows, dtype=torch.float64).unbind(1)
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        plain = kl_estimate(policy, reference, kind)
        weighted = kl_estimate(policy, reference, kind, importance)
        for i, (a, b, w) in enumerate(rows):
            assert plain[i].item() == pytest.approx(loops.kl(a, b, kind), rel=1e-9, abs=1e-9)
            assert weighted[i].item() == pytest.approx(loops.kl(a, b, kind, w), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_equal_finite_differences(kind, unbiased):
    generator = torch.Generator().manual_seed(0)
    policy, reference, base = (
        torch.randn(10, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    policy.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: kl_estimate(x, reference, kind, (x - base).exp() if unbiased else None), policy
    )


def test_the_unbiased_form_has_the_exact_kl_and_gradient_for_any_sampling_policy():
    """Expectation over a small vocabulary under the sampling policy."""
    logits = torch.randn(
        6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    reference, base = (torch.randn(6, dtype=torch.float64).log_softmax(0) for _ in range(2))
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), logits, retain_graph=True
    )
    estimate = (base.exp() * kl_estimate(policy, reference, "k3", (policy - base).exp())).sum()
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    assert estimate.item() == pytest.approx((policy.exp() * (policy - reference)).sum().item())
    assert torch.allclose(gradient, exact)
    plain = (base.exp() * kl_estimate(policy, reference, "k3")).sum()
    assert not torch.allclose(torch.autograd.grad(plain, logits)[0], exact, atol=1e-3)
