"""Dynamic sampling: which finished, scored groups are worth training on.

A filter is `keep(samples) -> bool`, or `(bool, reason)`; samples carry their reward. slime's form is `keep(args, samples)`,
and it may answer an object with `.keep` and `.reason`. What it rejects is dropped with the reason (`filtered` if it gives
none). A group it fails on is rejected with the reason `filter_error`.

Not here: what replaces a rejected group (`sampler`), or leaving groups out of a batch for other reasons (`rlpipe.batch`).
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError, RewardError
from rlpipe.types import Sample

Filter = Callable[[Sequence[Sample]], str | None]
"""Reason why a group is rejected, or None if it is kept. Raises: RewardError for all that goes wrong in it."""

_KEY = "rollout.dynamic_sampling_filter_path"


def reward_nonzero_std(samples: Sequence[Sample]) -> tuple[bool, str]:
    """Rewards that are not all equal: a group whose advantages would be zero teaches nothing.

    Raises: ValueError if a sample has no reward. Source: dynamic sampling of DAPO, arXiv 2503.14476 section 3.2.
    """
    rewards = [sample.reward for sample in samples]
    if None in rewards:
        raise ValueError("a sample has no reward")
    return len(set(rewards)) > 1, f"zero_std_{rewards[0]:g}"


def load_filter(path: str, args: Namespace | None = None) -> Filter:
    """The filter that a configuration names. Raises: ConfigError if it cannot be loaded or cannot be called with samples."""
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
        raise ConfigError("the filter is async", where=_KEY, found=path, expected="a plain function of samples")

    def judge(samples: Sequence[Sample]) -> str | None:
        try:
            return _reason(keep(list(samples)))
        except Exception as error:  # a hook may raise anything; it becomes the reason of its group
            where = f"filter {path}/{samples[0].group_id}"
            raise RewardError("the filter failed", where=where, found=f"{type(error).__name__}: {error}") from error

    return judge


def _is_slimes(function: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "args"


def _reason(answer: Any) -> str | None:
    if hasattr(answer, "keep"):
        answer = (answer.keep, getattr(answer, "reason", None))
    kept, reason = answer if isinstance(answer, tuple) else (answer, None)
    if getattr(kept, "ndim", None) == 0:
        kept = kept.item()  # a NumPy or torch scalar
    if not isinstance(kept, bool):
        raise TypeError(f"it returned {answer!r}, not a bool or (bool, reason)")
    return None if kept else str(reason or "filtered")
