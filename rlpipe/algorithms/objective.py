"""The objective of an optimizer step, of the tokens that one rank holds of one micro-batch.

    Σ_t w_t (f_t S_t - c_H H_t + c_KL KL_t),    S the surrogate, f its off-policy factor, w the weight of `reduction`

Every term is a sum over tokens with weights that the whole step has in common, so objectives of
micro-batches and ranks add up. n tokens, all with loss mask 1.

Not here: where columns come from and how gradients and metrics are summed over ranks
(`engines.megatron.train.step`).
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
from rlpipe.algorithms.sequences import Sequences
from rlpipe.config.algorithms import LossConfig

CustomLoss = Callable[["Tokens"], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""tokens → (loss [n], name → [n] to log)."""


class Objective(NamedTuple):
    """The scalar to differentiate, and its part of every metric (name → scalar without
    gradient)."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is known of n tokens; [n] float each."""

    log_probs: torch.Tensor
    """With gradient."""
    entropy: torch.Tensor
    """With gradient where entropy_coef asks for it."""
    weight: torch.Tensor
    """What each token's loss is multiplied with before all are summed."""
    sequences: Sequences
    policy_weight: torch.Tensor | None = None
    """The same for the surrogate, where a reducer of the user says otherwise; None: `weight`."""
    advantages: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    """None: the policy itself before the step, which is what it is in an iteration's first step."""
    behaviour: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    """Of `importance.correct`, or of a function of the user."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Anything else a custom loss may want."""

    @property
    def old(self) -> torch.Tensor:
        """ℓ of the policy before the iteration."""
        return self.log_probs.detach() if self.proximal is None else self.proximal


def objective(tokens: Tokens, loss: LossConfig, custom: CustomLoss | None = None) -> Objective:
    """The objective that `loss` describes. Policy and custom losses need advantages only if they
    read them.

    Metrics: loss, entropy; of a policy pg_loss, clipfrac, ppo_kl, kl_loss, ratio,
    train_rollout_logprob_abs_diff, with use_opsm opsm_clipfrac; of a custom loss those it names.
    """
    match loss.type:
        case "sft":
            per_token = sft_loss(tokens.log_probs) - loss.entropy_coef * tokens.entropy
            return _reduced(tokens, per_token, {"entropy": tokens.entropy})
        case "custom":
            assert custom is not None
            per_token, metrics = custom(tokens)
            return _reduced(tokens, per_token, {"entropy": tokens.entropy, **metrics})
    surrogate, logged = _surrogate(tokens, loss)
    kl = torch.zeros_like(tokens.log_probs)
    if tokens.reference is not None:
        if loss.use_unbiased_kl:
            kl = unbiased_kl(
                tokens.log_probs, tokens.reference, _base(tokens, loss), loss.kl_loss_type
            )
        else:
            kl = kl_estimate(tokens.log_probs, tokens.reference, loss.kl_loss_type)
    others = loss.kl_loss_coef * kl - loss.entropy_coef * tokens.entropy
    logged |= {"entropy": tokens.entropy, "kl_loss": kl}
    if tokens.policy_weight is None:
        return _reduced(tokens, surrogate + others, {"pg_loss": surrogate, **logged})
    found = _reduced(tokens, others, logged)
    policy = (tokens.policy_weight * surrogate).sum()
    total = found.loss + policy
    return Objective(total, {**found.metrics, "loss": total.detach(), "pg_loss": policy.detach()})


def _base(tokens: Tokens, loss: LossConfig) -> torch.Tensor:
    """What the ratio is to: the policy before the iteration, or under bypass the engine's."""
    if loss.use_rollout_logprobs:
        assert tokens.behaviour is not None
        return tokens.behaviour
    return tokens.old


def _surrogate(tokens: Tokens, loss: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[n], and what to log of it."""
    assert tokens.advantages is not None
    base = _base(tokens, loss)
    clip = _policy_loss(tokens, base, tokens.advantages, loss)
    apart = (
        torch.zeros_like(base)
        if tokens.behaviour is None
        else (tokens.old - tokens.behaviour).abs()
    )
    logged = {
        "clipfrac": clip.clipped,
        "ppo_kl": clip.ppo_kl,
        "ratio": exp(-clip.ppo_kl),
        "train_rollout_logprob_abs_diff": apart,
    }
    surrogate = clip.loss
    if loss.use_opsm:
        mask = off_policy_sequence_mask(
            tokens.log_probs, base, tokens.advantages, tokens.sequences, delta=loss.opsm_delta
        )
        surrogate, logged["opsm_clipfrac"] = surrogate * mask, 1 - mask
    if tokens.factor is not None:
        surrogate = surrogate * tokens.factor
    return surrogate, logged


def _policy_loss(
    tokens: Tokens, base: torch.Tensor, advantages: torch.Tensor, loss: LossConfig
) -> PolicyLoss:
    low = loss.eps_clip
    high = loss.eps_clip_high
    if loss.surrogate == "cispo":
        return cispo_loss(tokens.log_probs, base, advantages, eps_clip=low, eps_clip_high=high)
    dual = loss.eps_clip_c
    if loss.surrogate == "gspo":
        return sequence_policy_loss(
            tokens.log_probs,
            base,
            advantages,
            tokens.sequences,
            eps_clip=low,
            eps_clip_high=high,
            eps_clip_c=dual,
        )
    return policy_loss(
        tokens.log_probs, base, advantages, eps_clip=low, eps_clip_high=high, eps_clip_c=dual
    )


def _reduced(tokens: Tokens, per_token: torch.Tensor, logged: dict[str, torch.Tensor]) -> Objective:
    total = (tokens.weight * per_token).sum()
    values = torch.stack([column.detach() for column in logged.values()]) @ tokens.weight
    return Objective(
        total, {"loss": total.detach(), **dict(zip(logged, values.unbind(), strict=True))}
    )
