"""`TrainResult` of an iteration, and results of policy and critic combined.

Policy and critic can have separate ranks. `combined_result` and `combined_disk_space` give all of
them the same result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from rlpipe.engines.megatron.checkpoint.disk_space import DiskSpace
from rlpipe.engines.megatron.checkpoint.state import combined_digest
from rlpipe.engines.megatron.critic_exchange import CriticExchange


@dataclass(slots=True)
class TrainResult:
    """Result of one iteration's optimizer steps. Equal on every rank but for `seconds`."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each optimizer step.

    Policy: loss, pg_loss, entropy, clipfrac, ppo_kl, ratio, kl_loss,
    train_rollout_logprob_abs_diff, with use_opsm opsm_clipfrac, with use_tis tis, tis_abs and
    tis_clipfrac, with rejection rs_rejectfrac and rs_vetofrac. Supervised: loss, entropy. A custom
    loss adds its own metrics. All: grad_norm (before clipping), lr, tokens, samples. All but the
    last four are aggregated over tokens like the loss. With a critic also value_loss,
    value_clipfrac, critic_grad_norm and critic_lr. While the critic is trained alone, only those.
    """
    state_digest: str = ""
    """Digest of the state after the last step."""
    proximal_log_probs: np.ndarray | None = None
    """As `PolicySteps.proximal_log_probs`. None on ranks of a critic."""
    seconds: float = 0.0
    """Seconds of the optimizer steps on this rank, without the digest."""


def combined_result(
    exchange: CriticExchange, digest: str, steps: list[dict[str, float]]
) -> TrainResult:
    """Combine the results of policy and critic. Collective over the ranks of both.

    `digest` and `steps`: of the model on this rank. The result is equal on all ranks.
    """
    policy, critic = exchange.exchange({"digest": digest, "steps": steps})
    merged = [mine | other for mine, other in zip(policy["steps"], critic["steps"], strict=True)]
    return TrainResult(merged, combined_digest(policy["digest"], critic["digest"]))


def combined_disk_space(exchange: CriticExchange | None, space: DiskSpace) -> DiskSpace:
    """Combine the disk space of the policy's and the critic's checkpoints.

    Collective over the ranks of both. `space`: of the model on this rank.
    """
    if exchange is None:
        return space
    policy, critic = (DiskSpace(**fields) for fields in exchange.exchange(asdict(space)))
    return policy.combined_with(critic)
