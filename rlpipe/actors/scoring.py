"""The advantage stage on a trainer rank: what every model says about the batch.

| column              | model                           | asked for by                             |
|---------------------|---------------------------------|------------------------------------------|
| proximal_log_probs  | the policy before the iteration | `advantage.score_proximal`               |
| reference_log_probs | the reference                   | `advantage.reference`                    |
| values              | the critic before the iteration | `advantage.advantage_estimator: ppo`     |

Not here: which samples are in the batch and what the estimator makes of it (`rlpipe.batch`).
"""

from __future__ import annotations

from rlpipe.actors.trainer_spec import TrainerSpec
from rlpipe.algorithms.values import explained_variance
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.packing import BatchColumns


def scored(engine: MegatronEngine, columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """The batch with the columns of all models that the run asks. Collective; the same on every rank."""
    limit = spec.advantage.log_probs_max_tokens_per_gpu
    return columns.with_columns(
        proximal_log_probs=engine.score(columns, max_tokens=limit) if spec.advantage.score_proximal else None,
        reference_log_probs=engine.score(columns, model="reference", max_tokens=limit) if spec.advantage.reference else None,
        values=engine.values(columns, max_tokens=limit) if spec.critic is not None else None,
    )


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
