"""Filters of dynamic sampling: which finished, scored groups are trained.

A filter is `keep(samples) -> bool` or `-> (bool, reason)`; samples have their rewards. slime's form
is `keep(args, samples)`. Either form may return an object with `.keep`, `.reason` and
`.keep_when_insufficient`. A group that is not kept is dropped with the reason (`filtered` without a
reason). With `keep_when_insufficient` the group waits, and fills the batch if too few groups are
kept. A group for which the filter fails is rejected with the reason `filter_error`.

Entry points: `load_filter`, and the filters `reward_nonzero_std` and
`reward_nonzero_std_with_fallback` for configurations.
"""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError, RewardError
from rlpipe.slime.outputs import DynamicFilterOutput, check_reward_nonzero_std
from rlpipe.types import Sample


class Rejection(NamedTuple):
    """A group that the filter does not keep."""

    reason: str
    fallback: bool = False
    """True if the group may fill a batch for which too few groups are kept."""


Filter = Callable[[Sequence[Sample]], Rejection | None]
"""Return the rejection of a group, or None if the group is kept. Raises: RewardError for any
exception in the filter."""

_KEY = "rollout.dynamic_sampling_filter_path"


def reward_nonzero_std(samples: Sequence[Sample]) -> DynamicFilterOutput:
    """Keep groups with a standard deviation of rewards above 1e-6.

    The advantages of equal rewards are zero and give no gradient. Smaller deviations are rounding
    of the verifier: dividing by the deviation would make advantages of size 1 from them.

    Raises: ValueError if a sample has no finite reward. Source: dynamic sampling of DAPO, arXiv
    2503.14476 section 3.2; the bound is slime's.
    """
    for sample in samples:
        if sample.reward is None or not math.isfinite(sample.reward):
            raise ValueError(f"sample {sample.index} has no finite reward: {sample.reward}")
    return check_reward_nonzero_std(None, samples)


def reward_nonzero_std_with_fallback(samples: Sequence[Sample]) -> DynamicFilterOutput:
    """Keep groups as `reward_nonzero_std`; the other groups fill the batch if too few are kept.

    Then no further round is sampled.
    """
    output = reward_nonzero_std(samples)
    output.keep_when_insufficient = True
    return output


def load_filter(path: str, args: Namespace | None = None) -> Filter:
    """Load the filter of a configuration. Raises: ConfigError if the filter cannot be loaded or
    cannot be called with samples."""
    function = load_hook(path)
    is_slimes = next(iter(inspect.signature(function).parameters), "") == "args"
    keep = partial(function, args) if is_slimes else function
    try:
        inspect.signature(keep).bind([])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the filter cannot be called with a list of samples",
            where=_KEY,
            found=f"{path}: {error}",
            expected="keep(samples) -> bool or (bool, reason)",
        ) from error
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            "the filter is async", where=_KEY, found=path, expected="a plain function of samples"
        )

    def judge(samples: Sequence[Sample]) -> Rejection | None:
        try:
            return _rejection(keep(list(samples)))
        except Exception as error:  # a hook may raise any exception; it rejects its group only
            raise RewardError(
                "the filter failed",
                where=f"filter {path}/{samples[0].group_id}",
                found=f"{type(error).__name__}: {error}",
            ) from error

    return judge


def _rejection(answer: Any) -> Rejection | None:
    """Read a filter's answer. Raises: TypeError for another type."""
    fallback = _python_value(getattr(answer, "keep_when_insufficient", False))
    if hasattr(answer, "keep"):
        answer = (answer.keep, getattr(answer, "reason", None))
    kept, reason = answer if isinstance(answer, tuple) else (answer, None)
    kept = _python_value(kept)
    if not isinstance(kept, bool):
        raise TypeError(f"the filter returned {answer!r}, not a bool or (bool, reason)")
    if not isinstance(fallback, bool):
        raise TypeError(f"keep_when_insufficient is {fallback!r}, not a bool")
    return None if kept else Rejection(str(reason or "filtered"), fallback)


def _python_value(value: Any) -> Any:
    """Return the Python value of a NumPy or torch scalar."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
