"""Metrics of a batch before it is trained. R response tokens of all samples.

The losses have their own metrics (`rlpipe.engines.megatron.train.step`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlpipe.algorithms.importance import LARGEST_LOG_RATIO
from rlpipe.batch.build import Batch
from rlpipe.batch.columns import BatchColumns

PERCENTILES = (50, 90, 99)
"""Percentiles of the response lengths that are metrics."""
GRAM = 4
"""Tokens of the n-grams of `repetition_ratios`."""
REPETITION_WINDOW = 1024
"""Tokens at the end of a response that are searched. A loop does not end before the response."""
REPETITION_SAMPLES = 1024
"""Most responses that are searched, so that a large batch costs no more than 20 ms."""
HASH_FACTOR = np.uint32(0x9E3779B1)
SHORTEST_LOOP = 128
LOOP_RATIO = 0.9


def batch_metrics(batch: Batch, columns: BatchColumns) -> dict[str, float]:
    """Return rewards, lengths, staleness, and the difference between engine and trainer.

    `rollout/logprob_abs_diff` covers only tokens that the trained weights sampled, where engine and
    trainer differ by rounding. `train/train_rollout_logprob_abs_diff` covers all tokens and
    includes the change of the weights since.
    """
    metrics = length_metrics(columns.response_lengths)
    metrics |= repetition_metrics(columns)
    metrics |= staleness_metrics(batch, columns.loss_mask)
    if columns.advantages is not None:
        metrics["rollout/raw_reward"] = float(batch.rewards.mean())
        metrics["rollout/zero_std_fraction"] = zero_std_fraction(batch)
    metrics |= column_means(columns)
    metrics |= proximal_metrics(columns, batch.staleness)
    return metrics


def length_metrics(lengths: np.ndarray) -> dict[str, float]:
    """Return mean, maximum and percentiles of the response lengths. Shapes: lengths [N]."""
    values = np.percentile(lengths, PERCENTILES)
    return {
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        **{
            f"rollout/response_len/p{percentile}": float(value)
            for percentile, value in zip(PERCENTILES, values, strict=True)
        },
    }


def repetition_metrics(columns: BatchColumns) -> dict[str, float]:
    """Return the mean of `repetition_ratios`, and the share of responses that are mostly repeated.

    Of a batch with more than `REPETITION_SAMPLES` responses, every second, third ... one counts.

    A response is mostly repeated if it has at least `SHORTEST_LOOP` tokens and a ratio of at least
    `LOOP_RATIO`. slime's `repetition_frac` has the same meaning with another measure: zlib
    compresses the last 10,000 characters to less than a tenth.
    """
    chosen = slice(None, None, -(-len(columns) // REPETITION_SAMPLES))
    lengths = columns.response_lengths[chosen]
    ratios = repetition_ratios(columns.tokens, columns.offsets[1:][chosen], lengths)
    loops = (ratios >= LOOP_RATIO) & (lengths >= SHORTEST_LOOP)
    return {
        "rollout/repetition_ratio": float(ratios.mean()),
        "rollout/repetition_frac": float(loops.mean()),
    }


def repetition_ratios(tokens: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the share of each response's 4-grams of tokens that occurred before in the response.

    1 - distinct 4-grams / all 4-grams, of the last `REPETITION_WINDOW` tokens; 0 without a 4-gram.

    Shapes: tokens [S]; ends [N], end of each response in them; lengths [N]; returns [N] float64.
    Source: seq-rep-n, arXiv 1908.04319 section 3, over a window.
    """
    lengths = np.minimum(lengths, REPETITION_WINDOW)
    width = max(int(lengths.max(initial=0)), GRAM)
    tails = np.zeros((len(lengths), width), np.uint32)
    for tail, length, end in zip(tails, lengths.tolist(), ends.tolist(), strict=True):
        if length:
            tail[-length:] = tokens[end - length : end]
    # Two different 4-grams have the same hash once in 2^32 pairs. Four tokens 0 must not have the
    # hash of the places without a 4-gram, which is 0.
    tails += np.uint32(1)
    hashes = tails[:, : 1 - GRAM].copy()
    for shift in range(1, GRAM):
        hashes *= HASH_FACTOR
        hashes += tails[:, shift : width - GRAM + 1 + shift]
    num_grams = np.maximum(lengths - GRAM + 1, 0)
    unused = hashes.shape[1] - num_grams
    hashes[np.arange(hashes.shape[1]) < unused[:, None]] = 0
    hashes.sort(axis=1)
    equal = (hashes[:, 1:] == hashes[:, :-1]).sum(axis=1)
    # The places before a short response hold equal hashes.
    repeated = equal - np.maximum(unused - 1, 0)
    return np.clip(repeated / np.maximum(num_grams, 1), 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class ProximalSums:
    """Sums over the tokens of each sample that count, for the metrics of proximal log-probs.

    A sample's sums depend on its tokens alone, and the metrics add them in the order of the
    samples. So they are equal in all layouts of the ranks that hold the samples.
    """

    values: np.ndarray
    """[N, 6] float64: tokens; proximal − reference; proximal − rollout and its k3; tokens that the
    trained weights sampled, and |proximal − rollout| of these."""
    largest: np.ndarray
    """[N] float64: the largest of these |proximal − rollout|; 0 without such tokens."""
    reference: bool
    """True if the batch has reference log-probs."""
    rollout: bool
    """True if the batch has rollout log-probs."""

    @classmethod
    def of(cls, columns: BatchColumns, staleness: np.ndarray | None) -> ProximalSums:
        """Return the sums of these samples, which have proximal log-probs.

        `staleness`: [R], or None if the trained weights sampled all tokens.
        """
        proximal = columns.proximal_log_probs
        assert proximal is not None
        sample = columns.sample_of
        in_loss = columns.loss_mask > 0
        size = len(columns)

        def summed(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
            return np.bincount(sample[counted], values[counted], minlength=size)

        sums = np.zeros((6, size))
        largest = np.zeros(size)
        sums[0] = summed(np.ones(len(sample)), in_loss)
        if (reference := columns.reference_log_probs) is not None:
            sums[1] = summed(proximal.astype(np.float64) - reference, in_loss)
        if (rollout := columns.rollout_log_probs) is not None:
            d = proximal.astype(np.float64) - rollout
            current = in_loss if staleness is None else in_loss & (staleness == 0)
            sums[2] = summed(d, in_loss)
            sums[3] = summed(np.expm1(np.minimum(d, LARGEST_LOG_RATIO)) - d, in_loss)
            sums[4] = summed(np.ones(len(sample)), current)
            sums[5] = summed(np.abs(d), current)
            np.maximum.at(largest, sample[current], np.abs(d)[current])
        return cls(sums.T, largest, reference is not None, rollout is not None)

    def metrics(self) -> dict[str, float]:
        """Return the metrics that compare proximal with other log-probs.

        kl = mean(ℓ − ℓ_ref),  mismatch_kl = mean(ℓ_roll − ℓ),
        mismatch_k3_kl = mean(exp(d) − 1 − d) with d = ℓ − ℓ_roll, over the tokens that count. The
        last two are the divergence of the sampling distribution from the trained one.

        Source: slime's `--get-mismatch-metrics`, which needs a user function.
        """
        # NumPy adds in an order that depends on the layout in memory.
        sums = np.ascontiguousarray(self.values.T).sum(axis=1)
        tokens, reference, rollout, k3, current, differences = sums.tolist()
        found: dict[str, float] = {}
        if tokens and self.reference:
            found["rollout/kl"] = reference / tokens
        if tokens and self.rollout:
            found["rollout/mismatch_kl"] = -rollout / tokens
            found["rollout/mismatch_k3_kl"] = k3 / tokens
        if current:
            found["rollout/logprob_abs_diff/mean"] = differences / current
            found["rollout/logprob_abs_diff/max"] = float(self.largest.max())
        return found


def proximal_metrics(columns: BatchColumns, staleness: np.ndarray | None) -> dict[str, float]:
    """Return `ProximalSums.metrics` of a whole batch; {} without proximal log-probs.

    `staleness`: as `ProximalSums.of`. The advantage stage reports these metrics; if the optimizer
    step computes the proximal log-probs, the train stage does.
    """
    if columns.proximal_log_probs is None:
        return {}
    return ProximalSums.of(columns, staleness).metrics()


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
