"""Metrics of a batch before it is trained. R response tokens of all samples.

The losses have their own metrics (`rlpipe.engines.megatron.train.step`).
"""

from __future__ import annotations

import numpy as np

from rlpipe.algorithms.importance import LARGEST_LOG_RATIO
from rlpipe.batch.build import Batch
from rlpipe.batch.columns import BatchColumns


def batch_metrics(batch: Batch, columns: BatchColumns) -> dict[str, float]:
    """Return rewards, lengths, staleness, and the difference between engine and trainer.

    `rollout/logprob_abs_diff` covers only tokens that the trained weights sampled, where engine and
    trainer differ by rounding. `train/train_rollout_logprob_abs_diff` covers all tokens and
    includes the change of the weights since.
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
    metrics |= column_means(columns)
    metrics |= proximal_metrics(columns, batch.staleness)
    return metrics


def proximal_metrics(columns: BatchColumns, staleness: np.ndarray | None) -> dict[str, float]:
    """Return the metrics that compare proximal with other log-probs; {} without proximal ones.

    `staleness`: [R], or None if the trained weights sampled all tokens. The advantage stage reports
    these metrics; if the optimizer step computes the proximal log-probs, the train stage does.
    """
    return {
        **reference_metrics(columns),
        **mismatch_metrics(columns),
        **_current_differences(columns, staleness),
    }


def reference_metrics(columns: BatchColumns) -> dict[str, float]:
    """Return the mean of proximal − reference log-prob over the tokens that count."""
    if columns.proximal_log_probs is None or columns.reference_log_probs is None:
        return {}
    in_loss = columns.loss_mask > 0
    if not in_loss.any():
        return {}
    kl = columns.proximal_log_probs - columns.reference_log_probs
    return {"rollout/kl": float(kl[in_loss].mean(dtype=np.float64))}


def column_means(columns: BatchColumns) -> dict[str, float]:
    """Return means of advantages, returns and values over the tokens that count."""
    in_loss = columns.loss_mask > 0
    if not in_loss.any():
        return {}
    values = {
        "advantages": columns.advantages,
        "returns": columns.returns,
        "values": columns.values,
    }
    return {
        f"rollout/{name}": float(column[in_loss].mean(dtype=np.float64))
        for name, column in values.items()
        if column is not None
    }


def mismatch_metrics(columns: BatchColumns) -> dict[str, float]:
    """Return the divergence of the sampling distribution from the trained one.

    mismatch_kl = mean(ℓ_roll − ℓ),  mismatch_k3_kl = mean(exp(d) − 1 − d) with d = ℓ − ℓ_roll, over
    the tokens that count. Empty unless both log-probs are there.

    Source: slime's `--get-mismatch-metrics`, which needs a user function.
    """
    if columns.proximal_log_probs is None or columns.rollout_log_probs is None:
        return {}
    if not columns.loss_mask.any():
        return {}
    difference = columns.proximal_log_probs.astype(np.float64) - columns.rollout_log_probs
    d = difference[columns.loss_mask > 0]
    k3 = np.expm1(np.minimum(d, LARGEST_LOG_RATIO)) - d
    return {"rollout/mismatch_kl": float(-d.mean()), "rollout/mismatch_k3_kl": float(k3.mean())}


def zero_std_fraction(batch: Batch) -> float:
    """Return the share of groups whose rewards are all equal, which teach nothing."""
    rewards: dict[str, set[float]] = {}
    for group_id, reward in zip(batch.group_ids, batch.rewards.tolist(), strict=True):
        rewards.setdefault(group_id, set()).add(reward)
    return sum(len(values) == 1 for values in rewards.values()) / len(rewards)


def staleness_metrics(batch: Batch, loss_mask: np.ndarray) -> dict[str, float]:
    """Return the staleness of the tokens that count; empty in a supervised batch.

    `staleness/<n>` is the fraction of these tokens that is n weight versions old.

    Shapes: loss_mask [R].
    """
    if batch.staleness is None:
        return {}
    staleness = batch.staleness[loss_mask > 0]
    ages, counts = np.unique(staleness, return_counts=True)
    return {
        "rollout/staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
        "rollout/staleness/max": float(staleness.max(initial=0)),
        **{
            f"staleness/{age}": float(count / len(staleness))
            for age, count in zip(ages.tolist(), counts.tolist(), strict=True)
        },
    }


def _current_differences(columns: BatchColumns, staleness: np.ndarray | None) -> dict[str, float]:
    if columns.proximal_log_probs is None or columns.rollout_log_probs is None:
        return {}
    difference = np.abs(columns.proximal_log_probs - columns.rollout_log_probs)
    current = columns.loss_mask > 0
    if staleness is not None:
        current &= staleness == 0
    if not current.any():
        return {}
    return {
        "rollout/logprob_abs_diff/mean": float(difference[current].mean()),
        "rollout/logprob_abs_diff/max": float(difference[current].max()),
    }
