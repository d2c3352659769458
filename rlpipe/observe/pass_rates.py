"""Pass rate by prompt: the share of a prompt's samples with full reward, and its distribution.

| metric `rollout/pass_rate/...` | meaning |
|---|---|
| `mean` | mean over prompts |
| `0`, `between`, `100` | share of prompts that no sample solves, that some solve, that all solve |
| `0_25`, `25_50`, `50_75`, `75_100` | parts of `between`, by pass rate in percent |

A part includes its lower limit, except 0. `0`, the parts and `100` add up to 1. The prompts are
those of the scored groups. Full reward is 1 if all rewards are between 0 and 1.

With `data.curriculum`, for each difficulty and each source:

| metric `rollout/difficulty/<name>/...`, `rollout/source/<name>/...` | meaning |
|---|---|
| `share` | share of the iteration's new draws |
| `pass_rate` | mean pass rate of the scored groups, those that a filter rejected included |

Entry points: `pass_rate_metrics`, `training_threshold`, `draw_metrics`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rlpipe.config.data import EvalDataset
from rlpipe.types import Plan

POOLS = {1: "rollout/source", 2: "rollout/difficulty"}
"""Entry of `PlannedGroup.row` → beginning of its metrics."""
PASS_RATE = "rollout/pass_rate"
PARTS = {
    "0": "no sample",
    "0_25": "below 25%",
    "25_50": "25 to 50%",
    "50_75": "50 to 75%",
    "75_100": "75% or more",
    "100": "all samples",
}
"""Parts of the distribution → their names in a chart, in order."""
_PARTS_BETWEEN = tuple(PARTS)[1:-1]


def pass_rate_metrics(
    group_ids: Sequence[str], rewards: Sequence[float | None], threshold: float | None = None
) -> dict[str, float]:
    """Return the metrics of the module's table; {} if a sample has no known full reward.

    `group_ids`, `rewards`: of each sample; a reward None was not scored and does not count.
    `threshold`: least reward of a correct sample. None: 1, and {} if a reward is below 0 or above
    1, or if some sample has a part of the reward and none has 1.

    Returns {} too if no prompt has two scored samples.
    """
    scored = [
        (group_id, reward)
        for group_id, reward in zip(group_ids, rewards, strict=True)
        if reward is not None
    ]
    if threshold is None:
        rewards_ = [reward for _, reward in scored]
        partial = any(0 < reward < 1 for reward in rewards_)
        if any(not 0 <= reward <= 1 for reward in rewards_) or (partial and 1 not in rewards_):
            return {}
        threshold = 1.0
    passes: dict[str, list[bool]] = {}
    for group_id, reward in scored:
        passes.setdefault(group_id, []).append(reward >= threshold)
    if max(map(len, passes.values()), default=0) < 2:
        return {}
    rates = [sum(group) / len(group) for group in passes.values()]
    counts = dict.fromkeys(PARTS, 0)
    for rate in rates:
        counts[_part(rate)] += 1
    shares = {part: count / len(rates) for part, count in counts.items()}
    between = sum(counts[part] for part in _PARTS_BETWEEN) / len(rates)
    metrics = {"mean": sum(rates) / len(rates), "between": between, **shares}
    return {f"{PASS_RATE}/{name}": value for name, value in metrics.items()}


def draw_metrics(plans: Iterable[Plan], visits: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Return the metrics of the draws of an iteration; {} without a curriculum.

    `plans`: the parts of its plan. `visits`: group id → (passed, scored samples).
    """
    drawn: Counter[str] = Counter()
    draws = 0
    rates: dict[str, list[float]] = defaultdict(list)
    for plan in plans:
        waiting = {group.group_id for group in plan.before.buffer}
        for group in plan.groups:
            if group.row is None:
                continue
            names = [f"{POOLS[n]}/{group.row[n]}" for n in POOLS if group.row[n] is not None]
            if group.group_id not in waiting:
                drawn.update(names)
                draws += 1
            if group.group_id in visits:
                passed, scored = visits[group.group_id]
                for name in names:
                    rates[name].append(passed / scored)
    shares = {f"{name}/share": number / draws for name, number in drawn.items()}
    means = {f"{name}/pass_rate": sum(own) / len(own) for name, own in rates.items()}
    return dict(sorted((shares | means).items()))


def training_threshold(datasets: Sequence[EvalDataset]) -> float | None:
    """Return the least reward of a correct training sample; None if the configuration has none.

    It is the `pass_threshold` that all held-out sets with the run's reward function have.
    """
    own = [dataset for dataset in datasets if dataset.reward is None]
    default = EvalDataset.model_fields["pass_threshold"].default
    thresholds = {dataset.pass_threshold for dataset in own}
    return thresholds.pop() if len(thresholds) == 1 and thresholds != {default} else None


def _part(rate: float) -> str:
    if rate in (0, 1):
        return "100" if rate else "0"
    return _PARTS_BETWEEN[int(rate * len(_PARTS_BETWEEN))]
