"""The objective of an optimizer step: combine the loss terms of a micro-batch's tokens.

    Σ_t w_t (f_t S_t - c_H H_t + c_KL KL_t)

S is the surrogate (`losses`), f its off-policy factor (`importance`), w the token weight
(`reduction`). Every term is a sum over tokens with weights that the whole step shares. The
objectives of micro-batches and ranks therefore add up.

Entry point: `objective`. Legend: n tokens of one micro-batch on one rank, all with loss mask 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rlpipe.algorithms.divergence import kl_estimate, unbiased_kl
from rlpipe.algorithms.exponential import exp
from rlpipe.algorithms.losses import (
    PolicyLoss,
    cispo_loss,
    off_policy_sequence_mask,
    policy_loss,
    sequence_policy_loss,
    sft_loss,
)
from rlpipe.algorithms.preference import dpo_loss, reward_loss
from rlpipe.algorithms.sequences import Sequences
from rlpipe.config.algorithms import LossConfig

CustomLoss = Callable[["TokenBatch"], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""User function: tokens → (loss [n], metric name → values [n])."""


class Objective(NamedTuple):
    """The scalar loss with gradient, and its share of every metric.

    `metrics` maps a name to a scalar without gradient.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Inputs of the objective for n tokens; [n] float each."""

    log_probs: torch.Tensor
    """Of the policy, with gradient."""
    entropy: torch.Tensor
    """With gradient if entropy_coef is not 0."""
    weight: torch.Tensor
    """Weight of each token's loss in the sum."""
    sequences: Sequences
    policy_weight: torch.Tensor | None = None
    """Weight of the surrogate, from a custom reducer. None: `weight`."""
    advantages: torch.Tensor | None = None
    proximal_log_probs: torch.Tensor | None = None
    """None: equal to `log_probs`, as in the first optimizer step of an iteration."""
    rollout_log_probs: torch.Tensor | None = None
    reference_log_probs: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    """Off-policy factor, from `importance.correct` or a custom correction."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns for a custom loss."""

    @property
    def policy_before_step(self) -> torch.Tensor:
        """The proximal log-probs, or the detached log-probs if there are none."""
        if self.proximal_log_probs is None:
            return self.log_probs.detach()
        return self.proximal_log_probs


def objective(tokens: TokenBatch, loss: LossConfig, custom: CustomLoss | None = None) -> Objective:
    """Return the objective of a loss configuration.

    Metrics: loss, entropy; for a policy loss also pg_loss, clipfrac, ppo_kl, kl_loss, ratio,
    train_rollout_logprob_abs_diff, and with use_opsm opsm_clipfrac; for a custom loss its own.
    SFT and custom losses need no advantages, unless the custom loss reads them. DPO has the metrics
    of `dpo_loss`.
    """
    match loss.type:
        case "sft":
            per_token = sft_loss(tokens.log_probs) - loss.entropy_coef * tokens.entropy
            return _weighted_sum(tokens.weight, per_token, {"entropy": tokens.entropy})
        case "custom":
            assert custom is not None
            per_token, metrics = custom(tokens)
            return _weighted_sum(tokens.weight, per_token, {"entropy": tokens.entropy, **metrics})
        case "dpo":
            per_token, metrics = dpo_loss(
                tokens.log_probs, tokens.reference_log_probs, tokens.sequences, loss.dpo
            )
            return _weighted_sum(tokens.weight, per_token, {"entropy": tokens.entropy, **metrics})
    surrogate, metrics = _surrogate(tokens, loss)
    kl = _kl(tokens, loss)
    regularisation = loss.kl_loss_coef * kl - loss.entropy_coef * tokens.entropy
    metrics |= {"entropy": tokens.entropy, "kl_loss": kl}
    if tokens.policy_weight is None:
        return _weighted_sum(
            tokens.weight, surrogate + regularisation, {"pg_loss": surrogate, **metrics}
        )
    # A custom reducer weights the surrogate only.
    regularised = _weighted_sum(tokens.weight, regularisation, metrics)
    policy = (tokens.policy_weight * surrogate).sum()
    total = regularised.loss + policy
    final = {**regularised.metrics, "loss": total.detach(), "pg_loss": policy.detach()}
    return Objective(total, final)


def reward_objective(
    values: torch.Tensor, weight: torch.Tensor, sequences: Sequences, loss: LossConfig
) -> Objective:
    """Return the objective of a reward model. Metrics: loss and those of `reward_loss`.

    Shapes: values [n], of the last token of each sample; weight [n].
    """
    per_sample, metrics = reward_loss(
        values, sequences, center_rewards_coefficient=loss.center_rewards_coefficient
    )
    return _weighted_sum(weight, per_sample, metrics)


def _kl(tokens: TokenBatch, loss: LossConfig) -> torch.Tensor:
    """Return the KL estimate [n] of the policy from the reference; zeros without a reference."""
    reference = tokens.reference_log_probs
    if reference is None:
        return torch.zeros_like(tokens.log_probs)
    if loss.use_unbiased_kl:
        base = _base_log_probs(tokens, loss)
        return unbiased_kl(tokens.log_probs, reference, base, loss.kl_loss_type)
    return kl_estimate(tokens.log_probs, reference, loss.kl_loss_type)


def _base_log_probs(tokens: TokenBatch, loss: LossConfig) -> torch.Tensor:
    """Return the log-probs in the ratio's denominator: proximal, or rollout under bypass."""
    if loss.use_rollout_logprobs:
        assert tokens.rollout_log_probs is not None
        return tokens.rollout_log_probs
    return tokens.policy_before_step


def _surrogate(
    tokens: TokenBatch, loss: LossConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the surrogate [n] with mask and factor applied, and its metrics [n]."""
    assert tokens.advantages is not None
    base = _base_log_probs(tokens, loss)
    clip = _policy_loss(tokens, base, tokens.advantages, loss)
    if tokens.rollout_log_probs is None:
        difference = torch.zeros_like(base)
    else:
        difference = (tokens.policy_before_step - tokens.rollout_log_probs).abs()
    metrics = {
        "clipfrac": clip.clipped,
        "ppo_kl": clip.ppo_kl,
        "ratio": exp(-clip.ppo_kl),
        "train_rollout_logprob_abs_diff": difference,
    }
    surrogate = clip.loss
    if loss.use_opsm:
        mask = off_policy_sequence_mask(
            tokens.log_probs, base, tokens.advantages, tokens.sequences, delta=loss.opsm_delta
        )
        surrogate = surrogate * mask
        metrics["opsm_clipfrac"] = 1 - mask
    if tokens.factor is not None:
        surrogate = surrogate * tokens.factor
    return surrogate, metrics


def _policy_loss(
    tokens: TokenBatch, base: torch.Tensor, advantages: torch.Tensor, loss: LossConfig
) -> PolicyLoss:
    clip: dict[str, Any] = {"eps_clip": loss.eps_clip, "eps_clip_high": loss.eps_clip_high}
    if loss.surrogate == "cispo":
        return cispo_loss(tokens.log_probs, base, advantages, **clip)
    clip["eps_clip_c"] = loss.eps_clip_c
    if loss.surrogate == "gspo":
        return sequence_policy_loss(tokens.log_probs, base, advantages, tokens.sequences, **clip)
    return policy_loss(tokens.log_probs, base, advantages, **clip)


def _weighted_sum(
    weight: torch.Tensor, per_token: torch.Tensor, metrics: dict[str, torch.Tensor]
) -> Objective:
    """Return the weighted sums of the loss and of every metric."""
    total = (weight * per_token).sum()
    # One matrix product for all metrics instead of one reduction each.
    values = torch.stack([column.detach() for column in metrics.values()]) @ weight
    sums = dict(zip(metrics, values.unbind(), strict=True))
    return Objective(total, {"loss": total.detach(), **sums})
