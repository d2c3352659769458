"""The advantage stage on a trainer rank: what every model says about the batch, and what the estimator makes of it.

| column              | model                           | asked for by                             |
|---------------------|---------------------------------|------------------------------------------|
| proximal_log_probs  | the policy before the iteration | every run                                |
| reference_log_probs | the reference                   | `advantage.reference`                    |
| values              | the critic before the iteration | `advantage.advantage_estimator: ppo`     |

Not here: which samples are in the batch (`rlpipe.batch`), the estimators (`algorithms`).
"""

from __future__ import annotations

import numpy as np

from rlpipe.actors.trainer_spec import TrainerSpec
from rlpipe.algorithms.advantages import token_advantages
from rlpipe.algorithms.values import explained_variance, gae
from rlpipe.batch import Batch
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.packing import BatchColumns


def scored(engine: MegatronEngine, columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """The batch with the columns of all models that the run asks. Collective; the same on every rank."""
    limit = spec.advantage.log_probs_max_tokens_per_gpu
    return columns.with_columns(
        proximal_log_probs=engine.score(columns, max_tokens=limit),
        reference_log_probs=engine.score(columns, model="reference", max_tokens=limit) if spec.advantage.reference else None,
        values=engine.values(columns, max_tokens=limit) if spec.critic is not None else None,
    )


def estimated(batch: Batch, columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """The scored batch with advantages, and with a critic returns."""
    lengths, advantage = columns.response_lengths, spec.advantage
    if columns.values is None:
        advantages = token_advantages(batch.rewards, batch.group_ids, lengths, advantage)
        return columns.with_columns(advantages=advantages)
    rewards = np.zeros(len(columns.values))
    rewards[columns.response_offsets[1:] - 1] = batch.rewards
    mask = None if advantage.discount_masked_tokens else columns.loss_mask
    found = gae(rewards, columns.values, lengths, gamma=advantage.gamma, lambd=advantage.lambd, mask=mask)
    return columns.with_columns(advantages=found.advantages, returns=found.returns)


def critic_metrics(columns: BatchColumns) -> dict[str, float]:
    """Means of values and returns over tokens that count, and how much of the returns the critic explains; empty without one."""
    if columns.values is None or columns.returns is None:
        return {}
    counted = columns.loss_mask > 0
    return {
        "rollout/values": float(columns.values[counted].mean()) if counted.any() else 0.0,
        "rollout/returns": float(columns.returns[counted].mean()) if counted.any() else 0.0,
        "rollout/explained_variance": explained_variance(columns.values, columns.returns, columns.loss_mask),
    }
