"""Dynamic sampling: which finished, scored groups are worth training on.

A filter is `keep(samples) -> bool`, or `(bool, reason)`; samples carry their reward. slime's form
is `keep(args, samples)`. Either may answer an object with `.keep`, `.reason` and
`.keep_when_insufficient`. A group that is not kept is dropped with the reason (`filtered` if there
is none); with `keep_when_insufficient` it waits, and fills the batch if too few groups are kept. A
group on which the filter fails is rejected with the reason `filter_error`.

Not here: what replaces a rejected group (`sampler`), or leaving groups out of a batch for other
reasons (`rlpipe.batch.build`).
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
from rlpipe.slime.modules import DynamicFilterOutput, check_reward_nonzero_std
from rlpipe.types import Sample


class Rejection(NamedTuple):
    """Why a filter does not keep a group."""

    reason: str
    fallback: bool = False
    """The group may still fill a batch for which too few groups are kept."""


Filter = Callable[[Sequence[Sample]], Rejection | None]
"""The rejection of a group, or None if it is kept. Raises: RewardError for all that goes wrong in
the filter."""

_KEY = "rollout.dynamic_sampling_filter_path"


def reward_nonzero_std(samples: Sequence[Sample]) -> DynamicFilterOutput:
    """Keep rewards with a standard deviation above 1e-6: the advantages of equal rewards are zero
    and teach nothing.

    Rewards that differ by less are rounding of the verifier. Dividing them by their own deviation
    would turn the rounding into advantages of size 1.

    Raises: ValueError if a sample has no finite reward. Source: dynamic sampling of DAPO, arXiv
    2503.14476 section 3.2; the bound is slime's.
    """
    for sample in samples:
        if sample.reward is None or not math.isfinite(sample.reward):
            raise ValueError(f"sample {sample.index} has no finite reward: {sample.reward}")
    return check_reward_nonzero_std(None, samples)


def reward_nonzero_std_with_fallback(samples: Sequence[Sample]) -> DynamicFilterOutput:
    """The same, but groups of equal rewards fill the batch when too few others are kept. No further
    round is sampled."""
    output = reward_nonzero_std(samples)
    output.keep_when_insufficient = True
    return output


def load_filter(path: str, args: Namespace | None = None) -> Filter:
    """The filter that a configuration names. Raises: ConfigError if it cannot be loaded or cannot
    be called with samples."""
    function = load_hook(path)
    keep = partial(function, args) if _is_slimes(function) else function
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
        except Exception as error:  # a hook may raise anything; it becomes the reason of its group
            where = f"filter {path}/{samples[0].group_id}"
            raise RewardError(
                "the filter failed", where=where, found=f"{type(error).__name__}: {error}"
            ) from error

    return judge


def _is_slimes(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "args"


def _rejection(answer: Any) -> Rejection | None:
    fallback = _plain(getattr(answer, "keep_when_insufficient", False))
    if hasattr(answer, "keep"):
        answer = (answer.keep, getattr(answer, "reason", None))
    kept, reason = answer if isinstance(answer, tuple) else (answer, None)
    kept = _plain(kept)
    if not isinstance(kept, bool):
        raise TypeError(f"it returned {answer!r}, not a bool or (bool, reason)")
    if not isinstance(fallback, bool):
        raise TypeError(f"keep_when_insufficient is {fallback!r}, not a bool")
    return None if kept else Rejection(str(reason or "filtered"), fallback)


def _plain(value: Any) -> Any:
    """The Python value of a NumPy or torch scalar."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
