"""Per-token losses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.losses import policy_loss, sft_loss

number = st.floats(-3, 3, width=32)


def at_ratio(ratio: float, advantage: float, **clip) -> tuple[float, float]:
    new = torch.tensor([math.log(ratio)])
    found = policy_loss(new, torch.zeros(1), torch.tensor([advantage]), **{"eps_clip": 0.2, **clip})
    return found.loss.item(), found.clipped.item()


def test_a_good_token_that_moved_too_far_is_clipped():
    assert at_ratio(1.5, 1.0) == pytest.approx((-1.2, 1))


def test_clip_higher_lets_it_move_further():
    assert at_ratio(1.25, 1.0, eps_clip_high=0.28) == pytest.approx((-1.25, 0))
    assert at_ratio(1.5, 1.0, eps_clip_high=0.28) == pytest.approx((-1.28, 1))


def test_a_bad_token_that_became_rare_is_clipped_below():
    assert at_ratio(0.5, -1.0) == pytest.approx((0.8, 1))


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    assert at_ratio(5.0, -1.0)[0] == pytest.approx(5)
    assert at_ratio(5.0, -1.0, eps_clip_c=3.0)[0] == pytest.approx(3)
    assert at_ratio(5.0, 1.0, eps_clip_c=3.0)[0] == pytest.approx(-1.2)


def test_on_policy_the_gradient_is_the_advantage_and_nothing_is_clipped():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = policy_loss(new, new.detach(), torch.tensor([0.5, -0.25]), eps_clip=0.2)
    found.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-0.5, 0.25]
    assert found.clipped.tolist() == [0, 0]
    assert found.ppo_kl.tolist() == [0, 0]


def test_a_clipped_token_gets_no_gradient():
    new = torch.tensor([math.log(1.5)], requires_grad=True)
    policy_loss(new, torch.zeros(1), torch.ones(1), eps_clip=0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == 0


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=20), st.booleans())
def test_it_is_what_a_loop_computes(rows, dual):
    new, old, advantage = torch.tensor(rows).unbind(1)
    found = policy_loss(new, old, advantage, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=3.0 if dual else None)
    for i, (a, b, c) in enumerate(rows):
        ratio = math.exp(a - b)
        value = max(-ratio * c, -min(max(ratio, 0.8), 1.3) * c)
        if dual and c < 0:
            value = min(value, -3.0 * c)
        assert found.loss[i].item() == pytest.approx(value, rel=1e-4, abs=1e-5)
        assert found.ppo_kl[i].item() == pytest.approx(b - a, abs=1e-5)


def test_the_supervised_loss_is_the_negative_log_likelihood():
    assert sft_loss(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]
