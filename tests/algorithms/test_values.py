"""GAE and the value loss against reference loops and values by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.values import explained_variance, gae, value_loss

NUMBER = st.floats(-3, 3, allow_nan=False, width=32)
ROWS = st.lists(
    st.lists(st.tuples(NUMBER, NUMBER, st.booleans()), max_size=7), min_size=1, max_size=5
)
DISCOUNT = st.floats(0, 1, width=32)


def loop(rewards, values, gamma: float, lambd: float) -> list[float]:
    """Return the estimates of one sample as in the paper: a sum of discounted δ."""
    steps = range(len(rewards))
    after = [*values, 0.0]
    delta = [rewards[t] + gamma * after[t + 1] - values[t] for t in steps]
    return [sum((gamma * lambd) ** (s - t) * delta[s] for s in steps if s >= t) for t in steps]


def flat(rows):
    columns = [np.array([cell[i] for row in rows for cell in row], np.float64) for i in range(3)]
    return *columns, np.array([len(row) for row in rows], np.int64)


@given(ROWS, DISCOUNT, DISCOUNT)
def test_estimates_equal_the_sum_of_the_paper(rows, gamma, lambd):
    rewards, values, _, lengths = flat(rows)
    result = gae(rewards, values, lengths, gamma=gamma, lambd=lambd)
    expected = [
        a for row in rows for a in loop([c[0] for c in row], [c[1] for c in row], gamma, lambd)
    ]
    assert result.advantages == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert result.returns == pytest.approx(np.array(expected) + values, rel=1e-6, abs=1e-6)


@given(ROWS, DISCOUNT, DISCOUNT)
def test_masked_tokens_are_no_steps_and_keep_their_rewards(rows, gamma, lambd):
    rewards, values, mask, lengths = flat(rows)
    result = gae(rewards, values, lengths, gamma=gamma, lambd=lambd, mask=mask)
    expected = []
    for row in rows:
        steps = [i for i, cell in enumerate(row) if cell[2]]
        owned = [0.0] * len(steps)
        for i, cell in enumerate(row):
            if steps:
                owned[max(sum(step <= i for step in steps) - 1, 0)] += cell[0]
        estimates = iter(loop(owned, [row[i][1] for i in steps], gamma, lambd))
        expected += [next(estimates) if cell[2] else 0.0 for cell in row]
    assert result.advantages == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert result.returns == pytest.approx(np.array(expected) + values, rel=1e-5, abs=1e-6)


def test_estimates_by_hand():
    result = gae(np.array([0, 0, 1.0]), np.array([0.5, 0.5, 0.5]), np.array([3]))
    assert result.advantages.tolist() == [0.5, 0.5, 0.5]
    assert result.returns.tolist() == [1, 1, 1]


@given(ROWS)
def test_without_discount_the_return_is_the_sum_of_following_rewards(rows):
    rewards, values, _, lengths = flat(rows)
    result = gae(rewards, values, lengths)
    expected = [sum(cell[0] for cell in row[t:]) for row in rows for t in range(len(row))]
    assert result.returns == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("bad", [np.zeros(2), np.array([0, np.nan, 0])])
def test_values_of_another_length_or_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="values"):
        gae(np.zeros(3), bad, np.array([3]))


def test_the_clipped_value_loss_is_the_larger_error_with_the_exact_gradient():
    random = torch.Generator().manual_seed(0)
    values, old, returns = (
        torch.randn(50, generator=random, dtype=torch.float64) for _ in range(3)
    )
    values.requires_grad_()
    loss, clipped = value_loss(values, old, returns, value_clip=0.2)
    for v, o, r, result, cut in zip(
        values.tolist(),
        old.tolist(),
        returns.tolist(),
        loss.tolist(),
        clipped.tolist(),
        strict=True,
    ):
        limited = o + min(max(v - o, -0.2), 0.2)
        assert result == pytest.approx(max((v - r) ** 2, (limited - r) ** 2))
        assert cut == ((limited - r) ** 2 > (v - r) ** 2)
    assert 0 < clipped.sum() < 50
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, value_clip=0.2).loss, (values,)
    )
    assert torch.equal(
        value_loss(values, old, returns, value_clip=None).loss, (values - returns).square()
    )


def test_explained_variance_is_1_for_exact_values_and_0_for_the_mean():
    returns = np.array([1.0, 2.0, 3.0, 99.0])
    mask = np.array([1, 1, 1, 0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(np.full(4, 2.0), returns, mask) == 0
    assert explained_variance(np.zeros(4), np.ones(4), mask) == 0
