"""What is worth watching of a batch before it is trained. R response tokens of all samples.

Not here: the losses' own metrics (`engines.megatron.train.step`), or what becomes of a metric
(`observe`).
"""

from __future__ import annotations

import numpy as np

from rlpipe.algorithms.importance import LARGEST_LOG_RATIO
from rlpipe.batch.build import Batch
from rlpipe.batch.packing import BatchColumns


def batch_metrics(batch: Batch, columns: BatchColumns) -> dict[str, float]:
    """What is worth watching of a batch: rewards, lengths, staleness, and how far engine and
    trainer are apart.

    Engine and trainer are compared on tokens that the weights which are trained have sampled: there
    it should be rounding only. (`train/train_rollout_logprob_abs_diff` is that of all tokens, with
    what the weights have learned since.)
    """
    lengths = columns.response_lengths
    metrics = {
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
    }
    metrics |= staleness_metrics(batch, columns.loss_mask)
    if columns.advantages is not None:
        metrics["rollout/raw_reward"] = float(batch.rewards.mean())
        metrics["rollout/zero_std_fraction"] = zero_std_fraction(batch)
    metrics |= column_means(columns) | mismatch_metrics(columns)
    if columns.proximal_log_probs is not None and columns.rollout_log_probs is not None:
        apart = np.abs(columns.proximal_log_probs - columns.rollout_log_probs)
        counted = columns.loss_mask > 0
        current = counted if batch.staleness is None else counted & (batch.staleness == 0)
        if current.any():
            metrics["rollout/logprob_abs_diff/mean"] = float(apart[current].mean())
            metrics["rollout/logprob_abs_diff/max"] = float(apart[current].max())
    return metrics


def column_means(columns: BatchColumns) -> dict[str, float]:
    """Means over the tokens that count: advantages, returns, values, and `kl` = policy - reference
    log-prob."""
    counted = columns.loss_mask > 0
    given = {"advantages": columns.advantages, "returns": columns.returns, "values": columns.values}
    if columns.proximal_log_probs is not None and columns.reference_log_probs is not None:
        given["kl"] = columns.proximal_log_probs - columns.reference_log_probs
    if not counted.any():
        return {}
    return {
        f"rollout/{name}": float(c[counted].mean(dtype=np.float64))
        for name, c in given.items()
        if c is not None
    }


def mismatch_metrics(columns: BatchColumns) -> dict[str, float]:
    """Divergence of what sampled (the engine, maybe with older weights) from what is trained, over
    the tokens that count.

    mismatch_kl = mean(ℓ_roll - ℓ),  mismatch_k3_kl = mean(exp(d) - 1 - d) with d = ℓ - ℓ_roll. Empty without both log-probs.
    Source: slime's `--get-mismatch-metrics`, which needs a function of the user's for it.
    """
    if (
        columns.proximal_log_probs is None
        or columns.rollout_log_probs is None
        or not columns.loss_mask.any()
    ):
        return {}
    d = (columns.proximal_log_probs.astype(np.float64) - columns.rollout_log_probs)[
        columns.loss_mask > 0
    ]
    k3 = np.expm1(np.minimum(d, LARGEST_LOG_RATIO)) - d
    return {"rollout/mismatch_kl": float(-d.mean()), "rollout/mismatch_k3_kl": float(k3.mean())}


def zero_std_fraction(batch: Batch) -> float:
    """Share of groups whose rewards are all equal: they teach nothing."""
    rewards: dict[str, set[float]] = {}
    for group_id, reward in zip(batch.group_ids, batch.rewards.tolist(), strict=True):
        rewards.setdefault(group_id, set()).add(reward)
    return sum(len(values) == 1 for values in rewards.values()) / len(rewards)


def staleness_metrics(batch: Batch, loss_mask: np.ndarray) -> dict[str, float]:
    """How old the tokens are that are trained: `staleness/<n>` is the fraction of them that is n
    weight versions old.

    Shapes: loss_mask [R]. Empty in supervised batches.
    """
    if batch.staleness is None:
        return {}
    counted = batch.staleness[loss_mask > 0]
    ages, numbers = np.unique(counted, return_counts=True)
    return {
        "rollout/staleness/mean": float(counted.mean()) if len(counted) else 0.0,
        "rollout/staleness/max": float(counted.max(initial=0)),
        **{
            f"staleness/{age}": float(number / len(counted))
            for age, number in zip(ages.tolist(), numbers.tolist(), strict=True)
        },
    }
