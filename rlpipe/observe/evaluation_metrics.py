"""Compute the metrics of one evaluation of one held-out set.

| metric `eval/<name>/...` | meaning |
|---|---|
| `accuracy` | mean reward of the scored responses |
| `pass@<k>` | probability of a correct one in k responses, k = 1, 2, 4 ... responses per prompt |
| `truncated_ratio`, `response_len/mean` | over all responses |
| `error_ratio` | share of responses that could not be scored; no other metric counts these |
| `reward_parts/<part>` | mean of a reward part |

`pass@<k>` exists only with several responses per prompt. Entry point: `evaluation_metrics`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlpipe.types import Sample


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Return the probability that k of `total` responses include a correct one.

    1 - C(total - correct, k) / C(total, k): drawn without replacement, and therefore unbiased,
    unlike 1 - (1 - correct/total)^k.

    Raises: ValueError unless 0 ≤ correct ≤ total and 1 ≤ k ≤ total.
    Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    if not (0 <= correct <= total and 1 <= k <= total):
        raise ValueError(f"pass@{k} of {correct} correct responses in {total} is undefined")
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def evaluation_metrics(
    name: str,
    samples: Sequence[Sample],
    rewards: Sequence[float | None],
    parts: Sequence[Mapping[str, float]],
    *,
    pass_threshold: float,
) -> dict[str, float]:
    """Return the metrics of the module's table.

    `rewards` and `parts` are in the order of the samples; a reward None was not scored. A response
    is correct if its reward is at least `pass_threshold`.
    """
    scored = [reward for reward in rewards if reward is not None]
    count = max(1, len(samples))
    metrics = {
        "accuracy": fmean(scored) if scored else 0.0,
        "truncated_ratio": sum(sample.truncated for sample in samples) / count,
        "error_ratio": (len(samples) - len(scored)) / count,
        "response_len/mean": sum(len(sample.response_ids) for sample in samples) / count,
        **_pass_rates(samples, rewards, pass_threshold),
        **{f"reward_parts/{part}": value for part, value in _part_means(parts).items()},
    }
    return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}


def _pass_rates(
    samples: Sequence[Sample], rewards: Sequence[float | None], threshold: float
) -> dict[str, float]:
    correct_by_group: dict[str, list[bool]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is not None:
            correct_by_group[sample.group_id].append(reward >= threshold)
    largest = max(map(len, correct_by_group.values()), default=0)
    rates: dict[str, float] = {}
    k = 1
    while largest > 1 and k <= largest:
        # Groups with fewer scored responses than k do not count in pass@k.
        probabilities = [
            pass_at_k(sum(correct), len(correct), k)
            for correct in correct_by_group.values()
            if len(correct) >= k
        ]
        rates[f"pass@{k}"] = fmean(probabilities)
        k *= 2
    return rates


def _part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for parts_of_sample in parts:
        for name, value in parts_of_sample.items():
            values[name].append(value)
    return {name: fmean(column) for name, column in values.items()}
