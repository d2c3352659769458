"""Calls a reward function and turns what it returned into scores: yours, or one of ours, by the
same rules.

A function takes one sample (with `group: true` all samples of a group) and is plain or async;
`custom` lists the other forms that are known. It returns a number, or a dict of numbers of which
one is the reward and the others are reward parts; for a group a list of these, one for each sample
in the order given. What it raises, or returning anything else, is a RewardError that says so; so is
ending Python (`sys.exit`). A copy of the process that the function forks never comes back with an
answer (`config.guard`).

Not here: deadlines, retries and processes (`base`, `workers`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import reprlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from rlpipe.config.data import (
    JudgeReward,
    MathReward,
    NoReward,
    PythonReward,
    ReasoningGymReward,
    RemoteReward,
    RewardFunction,
    RowReward,
    RuleReward,
)
from rlpipe.config.guard import error_text, guarded
from rlpipe.errors import ConfigError, RewardError, RlpipeError
from rlpipe.rewards.answers import without_end
from rlpipe.rewards.custom import load_custom
from rlpipe.types import Sample

MOST_PARTS = 256
"""Each reward part is a column of the run's tables and a curve of its report."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier said of one sample."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


COMPARED = (MathReward, RuleReward, RowReward, ReasoningGymReward)
"""Rewards of ours that compare the response's text. `42<|im_end|>` is 42 to them."""


class Scorer:
    """One loaded reward function. Made once per thread or process of the reward stage; holds no
    state between calls."""

    def __init__(self, config: RewardFunction, args: Namespace | None = None):
        """`args` is for functions in slime's form. Raises: ConfigError if the function cannot be
        loaded or set up."""
        self._group = isinstance(config, PythonReward) and config.group
        function, self._key = _load(config, args)
        self._function = guarded(
            _of_plain_text(function) if isinstance(config, COMPARED) else function
        )
        self.is_async = inspect.iscoroutinefunction(self._function)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One call, for one sample or for a group. Raises: RewardError for all that goes wrong in
        it."""
        try:
            result = self._function(self._argument(samples))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return self._scores(result, samples)
        except (
            Exception
        ) as error:  # a verifier may raise anything; it becomes the error of its rows
            raise _reward_error(error) from error

    async def score_async(self, samples: Sequence[Sample]) -> list[Score]:
        """The same on the running event loop, for an async function."""
        try:
            return self._scores(await self._function(self._argument(samples)), samples)
        except (
            Exception
        ) as error:  # a verifier may raise anything; it becomes the error of its rows
            raise _reward_error(error) from error

    def _argument(self, samples: Sequence[Sample]) -> Any:
        return list(samples) if self._group else samples[0]

    def _scores(self, result: Any, samples: Sequence[Sample]) -> list[Score]:
        if not self._group:
            return [_score(result, self._key)]
        if not isinstance(result, list | tuple) or len(result) != len(samples):
            found = (
                f"{len(result)} results"
                if isinstance(result, list | tuple)
                else type(result).__name__
            )
            raise RewardError(
                "the group's rewards do not match its samples",
                found=found,
                expected=f"a list of {len(samples)}",
            )
        return [_score(item, self._key) for item in result]


def _of_plain_text(function: Callable[[Sample], Any]) -> Callable[[Sample], Any]:
    """The function, given each sample without the special tokens at the end of its response."""

    @functools.wraps(function)
    def of_plain_text(sample: Sample) -> Any:
        text = without_end(sample.response)
        return function(sample if text == sample.response else replace(sample, response=text))

    return of_plain_text


def _load(config: RewardFunction, args: Namespace | None) -> tuple[Callable[..., Any], str | None]:
    """The function, and the key of the reward in what it returns."""
    if isinstance(config, PythonReward):
        return load_custom(config, args), config.reward_key
    if isinstance(config, RemoteReward):
        from rlpipe.rewards.remote import make_remote

        return make_remote(config), config.reward_key
    if isinstance(config, JudgeReward):
        from rlpipe.rewards.remote import make_judge

        return make_judge(config), "reward"
    if isinstance(config, ReasoningGymReward):
        from rlpipe.rewards.reasoning_gym import (
            make_reward,
        )  # these packages load a second's worth of others

        return make_reward(config), "reward"
    if isinstance(config, MathReward) and not config.boxed:
        from rlpipe.rewards.math import reward

        return reward, "reward"
    if isinstance(config, NoReward):
        raise ConfigError(
            "not a function that scores", where="reward.function.type", found=config.type
        )
    from rlpipe.rewards.rules import make_rule

    return make_rule(config), _entry_of_rule(config)


def _entry_of_rule(config: RuleReward | RowReward | MathReward) -> str:
    """The entry of a rule's answer that is the reward. slime calls it `score`, and so may the
    configuration."""
    key = config.reward_key if isinstance(config, RowReward) else None
    return "reward" if key in (None, "score") else key


def _score(result: Any, key: str | None) -> Score:
    if not isinstance(result, dict):
        return Score(_number(result, "the reward"))
    if len(result) > MOST_PARTS:
        raise RewardError(
            "too many reward parts",
            found=f"a dict of {len(result)}",
            expected=f"at most {MOST_PARTS}",
        )
    if key not in result:
        raise RewardError(
            "which entry of the dict is the reward?",
            where="reward.function.reward_key",
            found=f"reward_key {key!r}, entries {', '.join(str(name)[:50] for name in result)}",
            expected="the name of an entry",
        )
    parts = {
        str(name): _number(value, f"reward part {name!r}")
        for name, value in result.items()
        if name != key
    }
    return Score(_number(result[key], f"the reward {key!r}"), parts)


def _number(value: Any, what: str) -> float:
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy or torch scalar
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        # reprlib: the text of all of a list of a million numbers would take seconds and gigabytes
        found = (
            f"{type(value).__name__} {reprlib.repr(value)}"[:200]
            if number != math.inf
            else "one beyond 1e308"
        )
        raise RewardError(f"{what} is not a finite number", found=found)
    return number


@guarded
async def _awaited(result: Any) -> Any:
    return await result


def _reward_error(error: Exception) -> RewardError:
    """What a function raised as the error of its rows."""
    if isinstance(error, RewardError):
        return error
    return RewardError(str(error) if isinstance(error, RlpipeError) else error_text(error))
