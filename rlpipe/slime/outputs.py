"""Results of slime's rollout functions and of its dynamic sampling filters.

RolloutFnTrainOutput, RolloutFnEvalOutput, call_rollout_fn      slime.rollout.base_types
DynamicFilterOutput, call_dynamic_filter, MetricGatherer        slime.rollout.filter_hub
check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SMALLEST_STD = 1e-6
"""slime's bound: smaller deviations are rounding errors of a verifier."""


@dataclass
class RolloutFnTrainOutput:
    """Result of a rollout function: groups of samples, and metrics."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of a rollout function in an evaluation, by name of the held-out set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Return the output of a rollout function in slime's present form."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)


@dataclass
class DynamicFilterOutput:
    """Result of a dynamic sampling filter."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Fill the batch with this rejected group instead of another sampling round."""


def call_dynamic_filter(fn: Any, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Return a filter's answer in slime's present form. None keeps every group."""
    output = True if fn is None else fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(output)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """True if a rejected group is dropped: the other groups suffice, or it is no fallback."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts of the dropped groups of a rollout, by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a dropped group."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return the counts under slime's names of metrics."""
        return {
            f"rollout/dynamic_filter/drop_{reason}": count
            for reason, count in self._dropped.items()
        }


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group if the unbiased standard deviation of its rewards is above 1e-6 in float64.

    A group of one sample has no deviation and is rejected, as in slime.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > SMALLEST_STD
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1) + 0.0:g}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Any], **keywords: Any
) -> DynamicFilterOutput:
    """Filter in the same way; rejected groups fill the batch if too few others are kept."""
    output = check_reward_nonzero_std(args, samples, **keywords)
    output.keep_when_insufficient = True
    return output
