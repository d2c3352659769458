"""Compute advantages from rewards: per sample, then per token.

    name                           A_t
    grpo, gspo, cispo              (r_i - mean_g) / (std_g + eps)
    Dr.GRPO                        the same without the division by the deviation
    rloo                           R_i - mean of the other R,  R_i = r_i - β Σ_t κ_t
    reinforce_plus_plus            Σ_{s≥t} γ^{s-t} ρ_s, whitened over the batch
    reinforce_plus_plus_baseline   r_i - mean_g - β κ_t
    ppo                            GAE(γ, λ) of the same ρ (`values`)

ρ_s = -β κ_s, plus r_i on the last counted token. κ_t is an estimate of the KL between the scored
policy and the reference, without gradient. After the estimator, `estimate` subtracts
λ_opd (ℓ_t - ℓ_teacher,t) for on-policy distillation, and whitens over the batch if configured.

Computed by NumPy in float64. Every rank computes the whole batch, so the parallel layout cannot
change the result.

Legend: N samples, R response tokens of all samples, sample after sample.

Sources (arXiv): GRPO 2402.03300, GSPO 2507.18071, CISPO 2506.13585, Dr.GRPO 2503.20783, RLOO
2402.14740, REINFORCE++ 2501.03262, PPO 1707.06347, GAE 1506.02438.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.algorithms.divergence import kl_estimate
from rlpipe.algorithms.values import Estimates, gae
from rlpipe.config.algorithms import CENTERED_BY_GROUP, SCALED_BY_GROUP, AdvantageConfig

CustomEstimator = Callable[["ScoredBatch", np.ndarray, np.ndarray], Estimates]
"""User function: (batch, rewards [N] after group normalisation, κ [R]) → estimates."""


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """Inputs of an estimator. Log-probs and values [R] are None if no model computed them."""

    rewards: np.ndarray
    """[N]."""
    group: np.ndarray
    """[N] int64: equal for the samples of one drawn prompt."""
    rollout: np.ndarray
    """[N] int64: equal for samples that one rollout fanned out into, otherwise unique."""
    lengths: np.ndarray
    """[N] response tokens."""
    mask: np.ndarray
    """[R] loss mask: 1 for tokens that count."""
    proximal_log_probs: np.ndarray | None = None
    reference_log_probs: np.ndarray | None = None
    teacher_log_probs: np.ndarray | None = None
    values: np.ndarray | None = None


def estimate(
    batch: ScoredBatch, config: AdvantageConfig, custom: CustomEstimator | None = None
) -> Estimates | None:
    """Return advantages and returns, [R] float32 each.

    Return None for the estimator `none` without a custom estimator.

    Raises: ValueError if a column is missing, shapes differ, or a result is not finite in float32.
    """
    if config.advantage_estimator == "none" and custom is None:
        return None
    rewards = sample_rewards(batch, config)
    kl = divergence(batch, config)
    if custom is not None:
        estimates = custom(batch, rewards, kl)
    else:
        estimates = _builtin_estimates(batch, rewards, kl, config)
    advantages = np.asarray(estimates.advantages, np.float64)
    if config.use_opd:
        policy = _required(batch, "proximal_log_probs")
        teacher = _required(batch, "teacher_log_probs")
        advantages = advantages - config.opd_kl_coef * (policy - teacher)
    if config.normalize_advantages:
        advantages = whiten(advantages, batch.mask)
    return Estimates(_in_float32("advantage", advantages), _in_float32("return", estimates.returns))


def _builtin_estimates(
    batch: ScoredBatch, normalised: np.ndarray, kl: np.ndarray, config: AdvantageConfig
) -> Estimates:
    steps = np.ones_like(batch.mask) if config.discount_masked_tokens else batch.mask
    match config.advantage_estimator:
        case "reinforce_plus_plus":
            rewards = _token_rewards(batch, kl, batch.mask, config)
            advantages = discounted_returns(rewards, batch.lengths, gamma=config.gamma, steps=steps)
        case "reinforce_plus_plus_baseline":
            advantages = np.repeat(normalised, batch.lengths) - config.kl_coef * kl
        case "rloo":
            sample = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
            penalty = np.bincount(sample, kl * batch.mask, minlength=len(batch.lengths))
            rewards = batch.rewards - config.kl_coef * penalty
            rollout = batch.rollout if config.fan_out_baseline == "rollout" else None
            baselined = leave_one_out(rewards, batch.group, rollout=rollout)
            advantages = np.repeat(baselined, batch.lengths)
        case "ppo":
            return gae(
                _token_rewards(batch, kl, steps, config),
                _required(batch, "values"),
                batch.lengths,
                gamma=config.gamma,
                lambd=config.lambd,
                mask=None if config.discount_masked_tokens else batch.mask,
            )
        case "grpo" | "gspo" | "cispo":
            advantages = np.repeat(normalised, batch.lengths)
        case name:
            raise ValueError(f"the estimator {name!r} has no case in _builtin_estimates")
    return Estimates(advantages, advantages)


def _token_rewards(
    batch: ScoredBatch, kl: np.ndarray, mask: np.ndarray, config: AdvantageConfig
) -> np.ndarray:
    """Return ρ [R]: -β κ_t on tokens of the mask, plus the sample's reward on the last of them."""
    return outcome_rewards(batch.rewards, batch.lengths, mask) - config.kl_coef * kl * mask


def sample_rewards(batch: ScoredBatch, config: AdvantageConfig) -> np.ndarray:
    """Return the rewards [N] after the estimator's group normalisation, if it is enabled."""
    name = config.advantage_estimator
    return group_relative(
        batch.rewards,
        batch.group,
        center=config.rewards_normalization and name in CENTERED_BY_GROUP,
        scale_by_std=config.grpo_std_normalization and name in SCALED_BY_GROUP,
        rollout=batch.rollout if config.fan_out_baseline == "rollout" else None,
    )


def divergence(batch: ScoredBatch, config: AdvantageConfig) -> np.ndarray:
    """Return κ [R] float64: the KL of the policy from the reference per token.

    Zeros if the batch has no reference log-probs. Raises: ValueError if `kl_coef` needs them.
    """
    if batch.proximal_log_probs is None or batch.reference_log_probs is None:
        if config.kl_coef:
            raise ValueError("advantage.kl_coef needs proximal and reference log-probs")
        return np.zeros(len(batch.mask))
    # Both log-probs are from the trainer. slime takes the engine's for the policy under
    # use_rollout_logprobs, and so counts numerical differences between engine and trainer as KL.
    policy, reference = (
        torch.from_numpy(np.asarray(column, np.float64))
        for column in (batch.proximal_log_probs, batch.reference_log_probs)
    )
    return kl_estimate(policy, reference, config.kl_type).numpy()


def group_relative(
    rewards: np.ndarray,
    group: np.ndarray,
    *,
    center: bool = True,
    scale_by_std: bool,
    eps: float = 1e-6,
    rollout: np.ndarray | None = None,
) -> np.ndarray:
    """Return the advantage of each sample relative to its group.

    A_i = (r_i - mean_g) / (std_g + eps),  g = group of i, unbiased std.

    A group of one sample has no deviation and is not divided. Equal rewards give exactly 0. Without
    `center`, the rewards are returned unchanged. With `rollout`, mean and deviation are over the
    rollouts of the group, and each rollout has the mean reward of its samples. A rollout with many
    samples then has no more influence on the baseline than another one. Without `rollout` every
    sample counts once, as in slime.

    Shapes: rewards [N] float; group, rollout [N] int64, any numbers; returns [N] float32.
    Raises: ValueError if the shapes differ or a reward is not finite.
    Source: GRPO, arXiv 2402.03300 eq. 3 (which does not give n - 1 and eps; both as in slime).
    Without `scale_by_std`: Dr.GRPO, arXiv 2503.20783. slime finds groups by reshaping and takes the
    whole batch as one group if a sample is missing; here equal ids make a group.
    """
    rewards = _checked_rewards(rewards, group)
    if not center:
        return rewards.astype(np.float32)
    means, rollout_of_sample, first = _rollout_means(rewards, rollout)
    _, member, count = np.unique(np.asarray(group)[first], return_inverse=True, return_counts=True)
    mean = _group_means(means, member)
    group_of_sample = member[rollout_of_sample]
    centered = rewards - mean[group_of_sample]
    if scale_by_std:
        variance = np.bincount(member, (means - mean[member]) ** 2) / np.maximum(count - 1, 1)
        deviation = np.sqrt(variance)[group_of_sample]
        scaled = centered / (deviation + eps)
        centered = np.where((count > 1)[group_of_sample], scaled, centered)
    return centered.astype(np.float32)


def leave_one_out(
    rewards: np.ndarray, group: np.ndarray, *, rollout: np.ndarray | None = None
) -> np.ndarray:
    """Return RLOO's advantage: the reward minus the mean reward of the group's other samples.

    A_i = r_i - 1/(n-1) Σ_{j ≠ i} r_j  over the n samples of i's group; 0 for a group of one.

    With `rollout`, the baseline is the mean over the group's other rollouts, each with the mean
    reward of its samples. Shapes and errors as in `group_relative`. Source: arXiv 2402.14740.
    """
    rewards = _checked_rewards(rewards, group)
    means, rollout_of_sample, first = _rollout_means(rewards, rollout)
    _, member, count = np.unique(np.asarray(group)[first], return_inverse=True, return_counts=True)
    others = (np.bincount(member, means)[member] - means) / np.maximum(count[member] - 1, 1)
    compared = count[member[rollout_of_sample]] > 1
    return np.where(compared, rewards - others[rollout_of_sample], 0.0).astype(np.float32)


def whiten(values: np.ndarray, mask: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """Scale values to mean 0 and variance 1 over the tokens of mask 1.

    A ← (A - μ) / sqrt(σ² + eps),  μ and σ² (n - 1) over tokens of mask 1. Equal values become 0.

    Shapes: values, mask [R]; returns [R] float64, with 0 where the mask is 0.
    Raises: ValueError if no token has mask 1.
    Source: slime's `distributed_masked_whiten`, over all tokens of the rollout, not of an optimizer
    step.
    """
    counted = np.asarray(mask) > 0
    if not counted.any():
        raise ValueError("advantages cannot be whitened: no token has loss mask 1")
    selected = np.asarray(values, np.float64)[counted]
    # Equal values are handled exactly: their rounded mean can differ from them.
    contrast = (selected != selected[0]).any()
    centered = selected - selected.mean() if contrast else np.zeros(len(selected))
    variance = (centered**2).sum() / max(len(selected) - 1, 1)
    result = np.zeros(len(counted))
    result[counted] = centered / np.sqrt(variance + eps)
    return result


def outcome_rewards(rewards: np.ndarray, lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return per-token rewards: the sample's reward on its last token of mask 1, 0 elsewhere.

    A sample without a token of mask 1 contributes no reward.

    Shapes: rewards, lengths [N]; mask [R]; returns [R].
    Source: slime's REINFORCE++, which asserts that no sample is wholly masked.
    """
    rewards = np.asarray(rewards, np.float64)
    lengths = np.asarray(lengths, np.int64)
    result = np.zeros(len(mask))
    counted = np.flatnonzero(np.asarray(mask) > 0)
    ends = np.cumsum(lengths)
    last = np.searchsorted(counted, ends) - 1
    has_counted = last >= np.searchsorted(counted, ends - lengths)
    result[counted[last[has_counted]]] = rewards[has_counted]
    return result


def discounted_returns(
    rewards: np.ndarray, lengths: np.ndarray, *, gamma: float, steps: np.ndarray
) -> np.ndarray:
    """Return the discounted sum of the following rewards for each token of each response.

    G_t = ρ_t + γ G_{t+1} where `steps` is 1;  G_t = ρ_t + G_{t+1} where `steps` is 0.

    Shapes: rewards, steps [R]; lengths [N]; returns [R].
    """
    rewards = np.asarray(rewards, np.float64)
    lengths = np.asarray(lengths, np.int64)
    factor = np.where(np.asarray(steps) > 0, gamma, 1.0)
    returns = np.zeros(len(rewards))
    # One vectorised step per token position, counted from the end; longest responses first, so the
    # responses that reach a position are a prefix.
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths)[order]
    lengths = lengths[order]
    following = np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):
        active = int(np.searchsorted(-lengths, -back, side="right"))
        token = ends[:active] - back
        following[:active] = rewards[token] + factor[token] * following[:active]
        returns[token] = following[:active]
    return returns


def _in_float32(name: str, values: np.ndarray) -> np.ndarray:
    """Return the column in its stored dtype. Raises: ValueError if a value is not finite."""
    # A number beyond float32, such as k3 at d = -100, would be stored as an infinite weight.
    with np.errstate(over="ignore"):
        column = np.asarray(values).astype(np.float32)
    if not np.isfinite(column).all():
        token = int(np.argmin(np.isfinite(column)))
        raise ValueError(
            f"the {name} of response token {token} is {values[token]:g}, "
            "which is not finite in float32"
        )
    return column


def _group_means(values: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Return the mean of each group's values; for equal values exactly that value."""
    # float64 rounds a sum, so the mean of equal values can differ from them in the last digit. That
    # difference would be divided by a deviation of 0 plus eps: seven rewards of 1000000.1 got
    # advantages of 1e-4.
    _, first = np.unique(member, return_index=True)
    different = np.bincount(member, values != values[first][member])
    return np.where(
        different == 0, values[first], np.bincount(member, values) / np.bincount(member)
    )


def _checked_rewards(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.shape != np.shape(group) or rewards.ndim != 1:
        raise ValueError(
            f"rewards {rewards.shape} and group {np.shape(group)} must be one number per sample"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(f"reward of sample {int(np.argmin(np.isfinite(rewards)))} is not finite")
    return rewards


def _rollout_means(
    rewards: np.ndarray, rollout: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (mean reward of each rollout, rollout index of each sample, first sample of each)."""
    if rollout is None:
        identity = np.arange(len(rewards))
        return rewards, identity, identity
    _, first, rollout_of_sample = np.unique(rollout, return_index=True, return_inverse=True)
    means = np.bincount(rollout_of_sample, rewards) / np.bincount(rollout_of_sample)
    return means, rollout_of_sample, first


def _required(batch: ScoredBatch, name: str) -> np.ndarray:
    column = getattr(batch, name)
    if column is None:
        raise ValueError(f"the estimator needs the column {name}, but the batch lacks it")
    return np.asarray(column, np.float64)
