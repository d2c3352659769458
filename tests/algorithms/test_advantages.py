"""Advantages from rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import (
    ScoredBatch,
    estimate,
    group_relative,
    leave_one_out,
    whiten,
)
from rlpipe.algorithms.values import Estimates, gae
from rlpipe.config.algorithms import AdvantageConfig
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged

GROUP_OF_FOUR = np.zeros(4, int)


def scored(batch: Ragged, **columns) -> ScoredBatch:
    groups = np.array(batch.groups)
    rollouts = np.array(batch.rollouts)
    return ScoredBatch(
        np.array(batch.rewards), groups, rollouts, batch.lengths, Ragged.flat(batch.mask), **columns
    )


def four(**columns) -> ScoredBatch:
    """Return four samples of two tokens in one group."""
    return ScoredBatch(
        np.array([1, 0, 0, 1.0]), GROUP_OF_FOUR, np.arange(4), np.full(4, 2), np.ones(8), **columns
    )


def advantages_of(batch: ScoredBatch, **config) -> np.ndarray:
    result = estimate(batch, AdvantageConfig.model_validate(config))
    assert result is not None
    assert result.advantages.dtype == np.float32
    return result.advantages


def test_group_relative_advantages_of_two_correct_samples_in_four():
    advantages = group_relative(np.array([1, 0, 0, 1.0]), GROUP_OF_FOUR, scale_by_std=True)
    assert advantages == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_group_relative_advantages_without_division_by_the_deviation():
    assert group_relative(np.array([1, 0, 0, 1.0]), GROUP_OF_FOUR, scale_by_std=False).tolist() == [
        0.5,
        -0.5,
        -0.5,
        0.5,
    ]


def test_group_relative_advantages_of_one_correct_sample_in_four():
    advantages = group_relative(np.array([1, 0, 0, 0.0]), GROUP_OF_FOUR, scale_by_std=True)
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_leave_one_out_subtracts_the_mean_of_the_other_samples():
    assert leave_one_out(np.array([1, 0, 0, 1.0]), GROUP_OF_FOUR) == pytest.approx(
        [2 / 3, -2 / 3, -2 / 3, 2 / 3]
    )
    assert leave_one_out(np.array([3.0]), np.zeros(1, int)).tolist() == [0]


def test_a_group_of_one_and_a_group_of_equal_rewards_have_advantage_0():
    advantages = group_relative(np.array([1.0, 0.5, 0.5]), np.array([0, 1, 1]), scale_by_std=True)
    assert advantages.tolist() == [0, 0, 0]


def test_without_centering_the_rewards_are_unchanged():
    assert group_relative(
        np.array([1.0, 3.0]), np.zeros(2, int), center=False, scale_by_std=True
    ).tolist() == [1, 3]


def test_a_rollout_with_many_samples_counts_once_in_the_baseline():
    rewards = np.array([1.0, 1.0, 1.0, 0.0])
    group = np.zeros(4, int)
    rollout = np.array([0, 0, 0, 1])
    per_rollout = group_relative(rewards, group, scale_by_std=False, rollout=rollout)
    assert per_rollout.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert group_relative(rewards, group, scale_by_std=False).tolist() == [0.25, 0.25, 0.25, -0.75]
    assert leave_one_out(rewards, group, rollout=rollout).tolist() == [1, 1, 1, -1]


@given(ragged(), st.booleans(), st.booleans())
def test_group_advantages_equal_the_reference_loops(batch: Ragged, scale: bool, by_rollout: bool):
    rollouts = np.array(batch.rollouts) if by_rollout else None
    each = batch.rollouts if by_rollout else list(range(len(batch.rewards)))
    rewards = np.array(batch.rewards)
    groups = np.array(batch.groups)
    result = group_relative(rewards, groups, scale_by_std=scale, rollout=rollouts)
    assert result == pytest.approx(
        loops.grpo(batch.rewards, batch.groups, each, scale), rel=1e-6, abs=1e-6
    )
    others = leave_one_out(rewards, groups, rollout=rollouts)
    assert others == pytest.approx(
        loops.rloo(batch.rewards, batch.groups, each), rel=1e-6, abs=1e-6
    )


@given(ragged())
def test_a_groups_centred_advantages_sum_to_zero(batch: Ragged):
    groups = np.array(batch.groups)
    for advantages in (
        group_relative(np.array(batch.rewards), groups, scale_by_std=False),
        leave_one_out(np.array(batch.rewards), groups),
    ):
        for group in set(batch.groups):
            assert advantages[groups == group].sum() == pytest.approx(0, abs=1e-5)


@given(ragged(), st.permutations(range(7)))
def test_the_order_of_samples_does_not_matter(batch: Ragged, order):
    order = [i for i in order if i < len(batch.rewards)]
    rewards = np.array(batch.rewards)
    groups = np.array(batch.groups)
    rollouts = np.array(batch.rollouts)
    for function in (
        lambda r, g, o: group_relative(r, g, scale_by_std=True, rollout=o),
        lambda r, g, o: leave_one_out(r, g, rollout=o),
    ):
        expected = function(rewards, groups, rollouts)[order]
        assert function(rewards[order], groups[order], rollouts[order]) == pytest.approx(
            expected, rel=1e-5, abs=1e-5
        )


def test_unequal_shapes_and_non_finite_rewards_are_refused():
    with pytest.raises(ValueError, match="one number per sample"):
        group_relative(np.zeros(3), np.zeros(2, int), scale_by_std=True)
    with pytest.raises(ValueError, match="sample 1"):
        group_relative(np.array([0, np.nan]), np.zeros(2, int), scale_by_std=True)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_every_token_of_a_response_gets_its_samples_advantage(name: str):
    batch = ScoredBatch(
        np.array([1.0, 5.0, 0.0]),
        np.array([1, 0, 1]),
        np.arange(3),
        np.array([2, 1, 3]),
        np.ones(6),
    )
    result = advantages_of(batch, advantage_estimator=name, grpo_std_normalization=False)
    assert result.tolist() == [0.5, 0.5, 0, -0.5, -0.5, -0.5]


def test_the_estimator_none_has_no_advantages():
    assert estimate(four(), AdvantageConfig(advantage_estimator="none")) is None


def test_reinforce_plus_plus_by_hand():
    log_probs = np.array([-1.0, -2.0])
    batch = ScoredBatch(
        np.array([1.0]),
        np.zeros(1, int),
        np.zeros(1, int),
        np.array([2]),
        np.ones(2),
        log_probs,
        log_probs - 1,
    )
    result = estimate(
        batch,
        AdvantageConfig(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, reference=True),
    )
    assert result is not None
    assert result.returns == pytest.approx([0.8, 0.9])


@given(
    ragged(columns=2),
    st.sampled_from([1.0, 0.9]),
    st.booleans(),
    st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
)
def test_reinforce_plus_plus_equals_the_reference_loop(
    batch: Ragged, gamma: float, every_token: bool, kind: str
):
    policy, reference = batch.columns
    kl = [
        [loops.kl(a, b, kind) for a, b in zip(*rows, strict=True)]
        for rows in zip(policy, reference, strict=True)
    ]
    config = AdvantageConfig.model_validate(
        {
            "advantage_estimator": "reinforce_plus_plus",
            "gamma": gamma,
            "discount_masked_tokens": every_token,
            "kl_coef": 0.3,
            "kl_type": kind,
            "reference": True,
        }
    )
    with_kl = scored(
        batch, proximal_log_probs=Ragged.flat(policy), reference_log_probs=Ragged.flat(reference)
    )
    expected = loops.reinforce_plus_plus(batch.rewards, kl, batch.mask, gamma, 0.3, every_token)
    if not any(map(any, batch.mask)):
        with pytest.raises(ValueError, match="cannot be whitened"):
            estimate(with_kl, config)
        return
    result = estimate(with_kl, config)
    assert result is not None
    assert result.returns == pytest.approx(Ragged.flat(expected), rel=1e-5, abs=1e-5)
    assert result.advantages == pytest.approx(
        Ragged.flat(loops.whiten(expected, batch.mask)), rel=1e-3, abs=2e-4
    )


@given(ragged(columns=2))
def test_reinforce_plus_plus_baseline_subtracts_group_mean_and_token_kl(batch: Ragged):
    policy, reference = (Ragged.flat(column) for column in batch.columns)
    result = estimate(
        scored(batch, proximal_log_probs=policy, reference_log_probs=reference),
        AdvantageConfig(
            advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.2, reference=True
        ).model_copy(update={"normalize_advantages": False}),
    )
    assert result is not None
    rewards = loops.grpo(batch.rewards, batch.groups, batch.rollouts, scale=False)
    expected = np.repeat(rewards, batch.lengths) - 0.2 * (policy - reference)
    assert result.advantages == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(ragged(columns=2))
def test_rloo_subtracts_each_samples_kl_before_the_baseline(batch: Ragged):
    policy, reference = batch.columns
    penalised = []
    for reward, p, r, m in zip(batch.rewards, policy, reference, batch.mask, strict=True):
        penalised.append(reward - 0.2 * sum((a - b) * c for a, b, c in zip(p, r, m, strict=True)))
    result = advantages_of(
        scored(
            batch,
            proximal_log_probs=Ragged.flat(policy),
            reference_log_probs=Ragged.flat(reference),
        ),
        advantage_estimator="rloo",
        kl_coef=0.2,
        reference=True,
    )
    expected = loops.rloo(penalised, batch.groups, batch.rollouts)
    assert result == pytest.approx(np.repeat(expected, batch.lengths), rel=1e-5, abs=1e-5)


@given(ragged(columns=3), st.booleans())
def test_ppo_is_gae_with_kl_on_every_token_and_the_reward_on_the_last(
    batch: Ragged, every_token: bool
):
    values, policy, reference = batch.columns
    rewards = []
    for reward, p, r, m in zip(batch.rewards, policy, reference, batch.mask, strict=True):
        counted = [1.0] * len(m) if every_token else m
        row = [-0.1 * (a - b) * c for a, b, c in zip(p, r, counted, strict=True)]
        if any(counted):
            row[max(t for t, c in enumerate(counted) if c)] += reward
        rewards.append(row)
    flat = [Ragged.flat(column) for column in (values, policy, reference)]
    result = estimate(
        scored(batch, values=flat[0], proximal_log_probs=flat[1], reference_log_probs=flat[2]),
        AdvantageConfig(
            advantage_estimator="ppo",
            gamma=0.9,
            lambd=0.8,
            kl_coef=0.1,
            reference=True,
            discount_masked_tokens=every_token,
        ),
    )
    mask = None if every_token else Ragged.flat(batch.mask)
    expected = gae(Ragged.flat(rewards), flat[0], batch.lengths, gamma=0.9, lambd=0.8, mask=mask)
    assert result is not None
    assert result.advantages == pytest.approx(expected.advantages, rel=1e-5, abs=1e-5)
    assert result.returns == pytest.approx(expected.returns, rel=1e-5, abs=1e-5)


@given(ragged(columns=1, min_length=1))
def test_whitened_advantages_have_mean_0_and_variance_1_over_counted_tokens(batch: Ragged):
    mask = Ragged.flat(batch.mask)
    values = Ragged.flat(batch.columns[0])
    if not mask.any():
        with pytest.raises(ValueError, match="cannot be whitened"):
            whiten(values, mask)
        return
    result = whiten(values, mask)
    assert result == pytest.approx(
        Ragged.flat(loops.whiten(batch.columns[0], batch.mask)), rel=1e-6, abs=1e-9
    )
    assert not result[mask == 0].any()
    assert result[mask > 0].mean() == pytest.approx(0, abs=1e-6)
    if values[mask > 0].std() > 0.1:
        assert result[mask > 0].var(ddof=1) == pytest.approx(1, rel=1e-4)


def test_distillation_lowers_the_advantage_of_tokens_unlikely_for_the_teacher():
    student = np.full(8, -1.0)
    teacher = np.full(8, -1.5)
    result = advantages_of(
        four(proximal_log_probs=student, teacher_log_probs=teacher),
        grpo_std_normalization=False,
        use_opd=True,
        opd_kl_coef=0.5,
    )
    assert result == pytest.approx(np.repeat([0.25, -0.75, -0.75, 0.25], 2))


@pytest.mark.parametrize(
    ("config", "name"),
    [({"use_opd": True}, "proximal_log_probs"), ({"advantage_estimator": "ppo"}, "values")],
)
def test_a_missing_column_is_named(config: dict, name: str):
    with pytest.raises(ValueError, match=name):
        advantages_of(four(), **config)


def test_a_custom_estimator_replaces_the_built_in_one():
    def custom(batch: ScoredBatch, normalised: np.ndarray, kl: np.ndarray) -> Estimates:
        assert normalised.tolist() == [0.5, -0.5, -0.5, 0.5]
        assert not kl.any()
        return Estimates(np.arange(8.0), np.ones(8))

    config = AdvantageConfig(grpo_std_normalization=False, normalize_advantages=True)
    result = estimate(four(), config, custom)
    assert result is not None
    assert result.advantages == pytest.approx(whiten(np.arange(8.0), np.ones(8)))
    assert result.returns.tolist() == [1] * 8


def test_an_advantage_beyond_float32_is_refused_and_its_token_named():
    batch = ScoredBatch(
        rewards=np.array([1.0, 0.0]),
        group=np.array([0, 0]),
        rollout=np.array([0, 1]),
        lengths=np.array([1, 2]),
        mask=np.ones(3),
        proximal_log_probs=np.array([-1.0, -1.0, -150.0]),
        reference_log_probs=np.full(3, -1.0),
    )
    config = AdvantageConfig(
        advantage_estimator="reinforce_plus_plus_baseline",
        kl_coef=0.1,
        kl_type="k3",
        reference=True,
    )
    with pytest.raises(
        ValueError, match=r"response token 2 is -\S+, which is not finite in float32"
    ):
        estimate(batch, config)


def test_an_estimator_without_a_case_is_an_error_and_not_a_default():
    batch = ScoredBatch(
        rewards=np.array([0.0, 1.0]),
        group=np.zeros(2, np.int64),
        rollout=np.arange(2),
        lengths=np.array([1, 1]),
        mask=np.ones(2, np.float32),
    )
    config = AdvantageConfig().model_copy(update={"advantage_estimator": "unknown"})
    with pytest.raises(ValueError, match="'unknown' has no case"):
        estimate(batch, config)
