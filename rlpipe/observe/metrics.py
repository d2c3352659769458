"""A metric is a number with a name and a way to merge it with others of the same name: over micro-batches, ranks or steps.

Names are paths: `train/` (an optimizer step), `rollout/` and `perf/` (an iteration), `eval/<dataset>/` (an evaluation).
Not here: where metrics go (`tensorboard`), or how the trainer reduces tensors over its ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Reduction(StrEnum):
    """How two values of one metric become one."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    """One value. `weight` counts for means only: tokens or samples that the value is the mean of."""

    name: str
    value: float
    reduction: Reduction = Reduction.MEAN
    weight: float = 1.0

    def merged(self, other: Metric) -> Metric:
        """Both in one; associative, so it does not matter who merges first.

        Mean: Σ wᵢxᵢ / Σ wᵢ, of weight Σ wᵢ (NaN if all weights are 0). Raises: ValueError if name or reduction differ.
        """
        if (self.name, self.reduction) != (other.name, other.reduction):
            raise ValueError(f"cannot merge {self.name} ({self.reduction}) with {other.name} ({other.reduction})")
        weight = self.weight + other.weight
        match self.reduction:
            case Reduction.MEAN:
                total = sum(metric.value * metric.weight for metric in (self, other) if metric.weight)
                value = total / weight if weight else math.nan
            case Reduction.SUM:
                value = self.value + other.value
            case Reduction.MIN:
                value = min(self.value, other.value)
            case Reduction.MAX:
                value = max(self.value, other.value)
            case Reduction.LAST:
                value = other.value
        return replace(self, value=value, weight=weight)


def merge(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """One metric per name, in the order of first appearance. Raises: ValueError as `Metric.merged`."""
    merged: dict[str, Metric] = {}
    for metric in metrics:
        merged[metric.name] = merged[metric.name].merged(metric) if metric.name in merged else metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Name → value, as sinks and records take it."""
    return {name: metric.value for name, metric in metrics.items()}


def distribution(name: str, numbers: Sequence[float]) -> dict[str, float]:
    """`name/mean`, `/median`, `/min` and `/max` of these numbers; nothing if there are none."""
    if not numbers:
        return {}
    return {
        f"{name}/mean": statistics.fmean(numbers),
        f"{name}/median": statistics.median(numbers),
        f"{name}/min": min(numbers),
        f"{name}/max": max(numbers),
    }
