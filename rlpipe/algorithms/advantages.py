"""From rewards to advantages: per sample, then per token.

    name                            A_t                                                   paper
    grpo, gspo, cispo               (r_i - mean_g) / (std_g + eps)                        2402.03300, 2507.18071, 2506.13585
    Dr.GRPO                         the same without the deviation                        2503.20783
    rloo                            R_i - mean of the others' R,  R_i = r_i - β Σ_t κ_t   2402.14740
    reinforce_plus_plus             Σ_{s≥t} γ^{s-t} ρ_s,  ρ_s = -β κ_s, at the end + r_i  2501.03262
    reinforce_plus_plus_baseline    r_i - mean_g - β κ_t                                  2501.03262
    ppo                             GAE(γ, λ) of the same ρ (`values`)                    1707.06347, 1506.02438

κ_t is an estimate of the KL between the policy that is scored and the reference, without gradient.
Then, for every estimator: minus λ_opd (ℓ_t - ℓ_t of the teacher) (on-policy distillation), then
whitening over the batch, if asked for.

NumPy in float64, because this is a stage of its own on rows of a store: on every rank the whole
batch, so no layout can matter. Legend: N samples, R response tokens of all of them. Not here: which
groups are in the batch, and the log-probs of any model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.algorithms.divergence import kl_estimate
from rlpipe.algorithms.returns import discounted_returns, outcome_rewards
from rlpipe.algorithms.values import Estimates, gae
from rlpipe.config.algorithms import CENTERED, AdvantageConfig

SCALED = ("grpo", "gspo", "cispo")
Custom = Callable[["Scored", np.ndarray, np.ndarray], Estimates]
"""(batch, rewards [N] after group normalisation, κ [R]) → estimates: a function of the user."""


@dataclass(frozen=True, eq=False)
class Scored:
    """What an estimator reads. Log-probs and values are None where no model was asked for them."""

    rewards: np.ndarray
    """[N]."""
    group: np.ndarray
    """[N] int64, any numbers: samples of one prompt draw."""
    rollout: np.ndarray
    """[N] int64, any numbers: samples that one rollout fanned out into have the same; elsewhere
    every sample has its own."""
    lengths: np.ndarray
    """[N] response tokens."""
    mask: np.ndarray
    """[R] 1 where a token counts."""
    proximal: np.ndarray | None = None
    reference: np.ndarray | None = None
    teacher: np.ndarray | None = None
    values: np.ndarray | None = None


def estimate(
    batch: Scored, config: AdvantageConfig, custom: Custom | None = None
) -> Estimates | None:
    """Advantages and returns [R] float32; None for the estimator `none` (unless `custom` is there
    in its place).

    Raises: ValueError if a column is missing, shapes do not fit, or a token's result is not finite
    in float32.
    """
    if config.advantage_estimator == "none" and custom is None:
        return None
    normalised = sample_rewards(batch, config)
    kl = divergence(batch, config)
    found = custom(batch, normalised, kl) if custom else _builtin(batch, normalised, kl, config)
    advantages = np.asarray(found.advantages, np.float64)
    if config.use_opd:
        advantages = advantages - config.opd_kl_coef * (
            _needed(batch, "proximal") - _needed(batch, "teacher")
        )
    if config.normalize_advantages:
        advantages = whiten(advantages, batch.mask)
    return Estimates(_in_float32("advantage", advantages), _in_float32("return", found.returns))


def _builtin(
    batch: Scored, normalised: np.ndarray, kl: np.ndarray, config: AdvantageConfig
) -> Estimates:
    steps = np.ones_like(batch.mask) if config.discount_masked_tokens else batch.mask
    match config.advantage_estimator:
        case "reinforce_plus_plus":
            rewards = (
                outcome_rewards(batch.rewards, batch.lengths, batch.mask)
                - config.kl_coef * kl * batch.mask
            )
            advantages = discounted_returns(rewards, batch.lengths, gamma=config.gamma, steps=steps)
        case "reinforce_plus_plus_baseline":
            advantages = np.repeat(normalised, batch.lengths) - config.kl_coef * kl
        case "rloo":
            sample = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
            paid = np.bincount(sample, kl * batch.mask, minlength=len(batch.lengths))
            rewards = batch.rewards - config.kl_coef * paid
            rollout = batch.rollout if config.fan_out_baseline == "rollout" else None
            advantages = np.repeat(
                leave_one_out(rewards, batch.group, rollout=rollout), batch.lengths
            )
        case "ppo":
            counted = np.ones_like(batch.mask) if config.discount_masked_tokens else batch.mask
            rewards = (
                outcome_rewards(batch.rewards, batch.lengths, counted)
                - config.kl_coef * kl * counted
            )
            mask = None if config.discount_masked_tokens else batch.mask
            values = _needed(batch, "values")
            return gae(
                rewards, values, batch.lengths, gamma=config.gamma, lambd=config.lambd, mask=mask
            )
        case _:
            advantages = np.repeat(normalised, batch.lengths)
    return Estimates(advantages, advantages)


def sample_rewards(batch: Scored, config: AdvantageConfig) -> np.ndarray:
    """[N] rewards after the group normalisation that belongs to the estimator, if it is on."""
    name = config.advantage_estimator
    return group_relative(
        batch.rewards,
        batch.group,
        center=config.rewards_normalization and name in CENTERED,
        scale_by_std=config.grpo_std_normalization and name in SCALED,
        rollout=batch.rollout if config.fan_out_baseline == "rollout" else None,
    )


def divergence(batch: Scored, config: AdvantageConfig) -> np.ndarray:
    """κ [R] float64: the KL of the scored policy from the reference per token; zeros where there is
    no reference.

    Always between two log-probs of the trainer. (slime takes the engine's for the policy under
    use_rollout_logprobs, and so counts what engine and trainer compute differently as divergence.)
    """
    if batch.proximal is None or batch.reference is None:
        if config.kl_coef:
            raise ValueError("kl_coef needs proximal and reference log-probs")
        return np.zeros(len(batch.mask))
    policy, reference = (
        torch.from_numpy(np.asarray(column, np.float64))
        for column in (batch.proximal, batch.reference)
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
    """Advantage of each sample relative to its group.

    A_i = (r_i - mean_g) / (std_g + eps),  g = group of i, unbiased std.

    A group of one has no deviation: it is not divided. Rewards that are all equal give exactly 0.
    Without `center` the reward itself is returned. With `rollout`, mean and deviation are over the
    rollouts of the group, each with the mean reward of its samples, so that a rollout that fanned
    out into many samples does not pull the baseline to itself; without it every sample counts once,
    as in slime. Shapes: rewards [N] float; group, rollout [N] int64, any numbers; returns [N]
    float32. Raises: ValueError if the shapes differ or a reward is not finite. Source: GRPO, arXiv
    2402.03300 eq. 3 (which leaves the deviation's n - 1 and eps open; slime has both); without
    `scale_by_std` Dr. GRPO, arXiv 2503.20783. slime finds groups by reshaping, and takes the whole
    batch for one group where a sample is missing; here a group is what has the same id.
    """
    rewards = _checked(rewards, group)
    if not center:
        return rewards.astype(np.float32)
    means, owner, first = _of_rollouts(rewards, rollout)
    _, member, count = np.unique(np.asarray(group)[first], return_inverse=True, return_counts=True)
    mean = _group_means(means, member)
    centered = rewards - mean[member[owner]]
    if scale_by_std:
        variance = np.bincount(member, (means - mean[member]) ** 2) / np.maximum(count - 1, 1)
        several = (count > 1)[member[owner]]
        deviation = np.sqrt(variance)[member[owner]]
        centered = np.where(several, centered / (deviation + eps), centered)
    return centered.astype(np.float32)


def leave_one_out(
    rewards: np.ndarray, group: np.ndarray, *, rollout: np.ndarray | None = None
) -> np.ndarray:
    """REINFORCE with the mean of the others as the baseline (RLOO).

    A_i = r_i - 1/(n-1) Σ_{j ≠ i} r_j  over the n members of i's group; 0 for a group of one, which has no other.

    With `rollout` the others are the group's other rollouts, each with the mean reward of its
    samples. Shapes and errors as `group_relative`. Source: arXiv 2402.14740.
    """
    rewards = _checked(rewards, group)
    means, owner, first = _of_rollouts(rewards, rollout)
    _, member, count = np.unique(np.asarray(group)[first], return_inverse=True, return_counts=True)
    others = (np.bincount(member, means)[member] - means) / np.maximum(count[member] - 1, 1)
    return np.where(count[member[owner]] > 1, rewards - others[owner], 0.0).astype(np.float32)


def whiten(values: np.ndarray, mask: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """Mean 0 and variance 1 over the tokens that count.

    A ← (A - μ) / sqrt(σ² + eps),  μ and σ² (n - 1) over tokens of mask 1; values that are all equal become 0.

    Shapes: values, mask [R]; returns [R] float64, with 0 where the mask is 0. Raises: ValueError if
    no token counts. Source: slime's `distributed_masked_whiten` (all tokens of the rollout, not of
    an optimizer step).
    """
    counted = np.asarray(mask) > 0
    if not counted.any():
        raise ValueError("no token counts, so there is nothing to whiten")
    of = np.asarray(values, np.float64)[counted]
    centered = of - of.mean() if (of != of[0]).any() else np.zeros(len(of))
    variance = (centered**2).sum() / max(len(of) - 1, 1)
    result = np.zeros(len(counted))
    result[counted] = centered / np.sqrt(variance + eps)
    return result


def _in_float32(name: str, values: np.ndarray) -> np.ndarray:
    """The column as it is stored. A number beyond float32, such as k3 at d = -100, must not become
    an infinite weight."""
    with np.errstate(over="ignore"):
        column = np.asarray(values).astype(np.float32)
    if not np.isfinite(column).all():
        token = int(np.argmin(np.isfinite(column)))
        raise ValueError(
            f"the {name} of response token {token} is {values[token]:g}, which is not finite in float32"
        )
    return column


def _group_means(values: np.ndarray, member: np.ndarray) -> np.ndarray:
    """Mean of each group's values; of equal values exactly that value.

    float64 rounds a sum, so the mean of equal values can differ from them in the last digit. The
    difference would be divided by a deviation of 0 plus eps: seven rewards of 1000000.1 had
    advantages of 1e-4.
    """
    _, first = np.unique(member, return_index=True)
    different = np.bincount(member, values != values[first][member])
    return np.where(
        different == 0, values[first], np.bincount(member, values) / np.bincount(member)
    )


def _checked(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.shape != np.shape(group) or rewards.ndim != 1:
        raise ValueError(
            f"rewards {rewards.shape} and group {np.shape(group)} must be one number per sample"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(f"reward of sample {int(np.argmin(np.isfinite(rewards)))} is not finite")
    return rewards


def _of_rollouts(
    rewards: np.ndarray, rollout: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean reward of every rollout, each sample's rollout as a number into that, and one sample of
    every rollout."""
    if rollout is None:
        each = np.arange(len(rewards))
        return rewards, each, each
    _, first, owner = np.unique(rollout, return_index=True, return_inverse=True)
    return np.bincount(owner, rewards) / np.bincount(owner), owner, first


def _needed(batch: Scored, name: str) -> np.ndarray:
    column = getattr(batch, name)
    if column is None:
        raise ValueError(f"the estimator needs the column {name}, which this batch has not")
    return np.asarray(column, np.float64)
