"""The figures of one evaluation of one held-out set: accuracy, pass@k, how long and how often cut
off.

| metric `eval/<name>/...` | |
|---|---|
| `accuracy` | mean reward of the responses that were scored |
| `pass@<k>` | chance that one of k responses is right, for k = 1, 2, 4 ... responses per prompt; only with several of them |
| `truncated_ratio`, `response_len/mean` | of all responses |
| `error_ratio` | responses that could not be scored; they count nowhere else |
| `reward_parts/<part>` | mean of what the verifier said besides |

Not here: sampling and scoring (`rlpipe.actors.generator`), the report page (`report`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlpipe.types import Sample


def pass_at_k(right: int, total: int, k: int) -> float:
    """Chance that k responses drawn without replacement from `total`, of which `right` are right,
    hold a right one.

    1 - C(total - right, k) / C(total, k): unbiased, unlike 1 - (1 - right/total)^k.
    Raises: ValueError unless 0 ≤ right ≤ total and 1 ≤ k ≤ total.
    Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    if not (0 <= right <= total and 1 <= k <= total):
        raise ValueError(f"pass@{k} of {right} right among {total}")
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def evaluation_metrics(
    name: str,
    samples: Sequence[Sample],
    rewards: Sequence[float | None],
    parts: Sequence[Mapping[str, float]],
    *,
    pass_threshold: float,
) -> dict[str, float]:
    """The metrics of the table above. Rewards and parts in the order of the samples; None was not
    scored."""
    scored = [reward for reward in rewards if reward is not None]
    count = max(1, len(samples))
    metrics = {
        "accuracy": fmean(scored) if scored else 0.0,
        "truncated_ratio": sum(sample.truncated for sample in samples) / count,
        "error_ratio": (len(samples) - len(scored)) / count,
        "response_len/mean": sum(len(sample.response_ids) for sample in samples) / count,
        **_pass_rates(samples, rewards, pass_threshold),
        **{f"reward_parts/{part}": value for part, value in _means(parts).items()},
    }
    return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}


def _pass_rates(
    samples: Sequence[Sample], rewards: Sequence[float | None], threshold: float
) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is not None:
            groups[sample.group_id].append(reward >= threshold)
    most = max(map(len, groups.values()), default=0)
    rates: dict[str, float] = {}
    k = 1
    while most > 1 and k <= most:
        chances = [
            pass_at_k(sum(right), len(right), k) for right in groups.values() if len(right) >= k
        ]
        rates[f"pass@{k}"] = fmean(chances)
        k *= 2
    return rates


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for said in parts:
        for name, value in said.items():
            values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}
