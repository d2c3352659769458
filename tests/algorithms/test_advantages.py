"""Rewards to advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import group_relative, token_advantages
from rlpipe.config.algorithms import AdvantageConfig

groups_and_rewards = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10, width=32)), min_size=1, max_size=40)


def loop(rewards, groups, scale_by_std):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        advantage = reward - np.mean(mates)
        if scale_by_std and len(mates) > 1:
            advantage /= np.std(mates, ddof=1) + 1e-6
        result.append(advantage)
    return result


def test_two_of_four_right():
    advantages = group_relative(np.array([1, 0, 0, 1.0]), np.zeros(4, int), scale_by_std=True)
    assert advantages == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_two_of_four_right_without_the_deviation():
    assert group_relative(np.array([1, 0, 0, 1.0]), np.zeros(4, int), scale_by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_one_of_four_right():
    advantages = group_relative(np.array([1, 0, 0, 0.0]), np.zeros(4, int), scale_by_std=True)
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_a_group_of_one_and_a_group_without_contrast_have_no_advantage():
    advantages = group_relative(np.array([1.0, 0.5, 0.5]), np.array([0, 1, 1]), scale_by_std=True)
    assert advantages.tolist() == [0, 0, 0]


def test_without_centering_the_reward_itself_comes_back():
    assert group_relative(np.array([1.0, 3.0]), np.zeros(2, int), center=False, scale_by_std=True).tolist() == [1, 3]


@given(groups_and_rewards, st.booleans())
def test_it_is_what_a_loop_computes(rows, scale_by_std):
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    found = group_relative(rewards, groups, scale_by_std=scale_by_std)
    assert found == pytest.approx(loop(rewards, groups, scale_by_std), rel=1e-4, abs=1e-5)


@given(groups_and_rewards)
def test_a_groups_centred_advantages_sum_to_zero(rows):
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    advantages = group_relative(rewards, groups, scale_by_std=False)
    for group in set(groups.tolist()):
        assert advantages[groups == group].sum() == pytest.approx(0, abs=1e-4)


def test_unequal_shapes_and_rewards_that_are_not_finite_are_errors():
    with pytest.raises(ValueError, match="one number per sample"):
        group_relative(np.zeros(3), np.zeros(2, int), scale_by_std=True)
    with pytest.raises(ValueError, match="sample 1"):
        group_relative(np.array([0, np.nan]), np.zeros(2, int), scale_by_std=True)


def test_every_token_of_a_response_gets_its_samples_advantage():
    config = AdvantageConfig(grpo_std_normalization=False)
    advantages = token_advantages(np.array([1.0, 5.0, 0.0]), ["b:1", "a:0", "b:1"], np.array([2, 1, 3]), config)
    assert advantages is not None
    assert advantages.tolist() == [0.5, 0.5, 0, -0.5, -0.5, -0.5]
    assert advantages.dtype == np.float32


def test_the_estimator_none_has_no_advantages():
    config = AdvantageConfig(advantage_estimator="none")
    assert token_advantages(np.zeros(1), ["a"], np.array([1]), config) is None
