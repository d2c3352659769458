"""Call one reward function and convert its result to scores: `Scorer`.

A function takes one sample, or with `group: true` all samples of a group, and is plain or async.
`user_rewards` lists the other forms. The function returns a number, or a dict of numbers: one is
the reward, the others are reward parts. Entries of text, such as the prediction that slime's
`compute_score` returns, are left out. For a group it returns a list of these, one per sample in the
same order.

An exception, another result and the end of Python (`sys.exit`) become a RewardError. A process
that the function forks never returns a result (`config.guard`).
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
    EnvironmentReward,
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
from rlpipe.config.guard import error_text, guarded, location
from rlpipe.config.hooks import source_file
from rlpipe.errors import ConfigError, RewardError, RlpipeError
from rlpipe.rewards.answers import without_end
from rlpipe.rewards.user_rewards import load_custom
from rlpipe.types import Sample

ENVIRONMENT_KEY = "environment"
"""Entry of a row's metadata with the reward and the parts of `rollout.environment`."""
MAX_PARTS = 256
"""Each reward part is a column of the run's tables and a curve of its report."""


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a verifier for one sample."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


TEXT_REWARDS = (MathReward, RuleReward, RowReward, ReasoningGymReward)
"""Built-in rewards that compare the response's text. They read `42<|im_end|>` as 42."""


class Scorer:
    """One loaded reward function.

    Each thread or process of the reward stage makes one. It has no state between calls.
    """

    def __init__(self, config: RewardFunction, args: Namespace | None = None):
        """Load the function. `args` are for functions with slime's signature.

        Raises: ConfigError if the function cannot be loaded or set up.
        """
        self._group = isinstance(config, PythonReward) and config.group
        self._file = source_file(config.path) if isinstance(config, PythonReward) else None
        function, self._key = _load(config, args)
        if isinstance(config, TEXT_REWARDS):
            function = _without_end_tokens(function)
        self._function = guarded(function)
        self.is_async = inspect.iscoroutinefunction(self._function)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Call the function for one sample or one group. Raises: RewardError for any failure."""
        try:
            result = self._function(self._argument(samples))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return self._scores(result, samples)
        except Exception as error:  # a verifier can raise anything; its rows get the error
            raise _reward_error(error, self._file) from error

    async def score_async(self, samples: Sequence[Sample]) -> list[Score]:
        """Call an async function on the running event loop; otherwise as `score`."""
        try:
            return self._scores(await self._function(self._argument(samples)), samples)
        except Exception as error:  # a verifier can raise anything; its rows get the error
            raise _reward_error(error, self._file) from error

    def _argument(self, samples: Sequence[Sample]) -> Any:
        return list(samples) if self._group else samples[0]

    def _scores(self, result: Any, samples: Sequence[Sample]) -> list[Score]:
        if not self._group:
            return [_score(result, self._key)]
        is_list = isinstance(result, list | tuple)
        if not is_list or len(result) != len(samples):
            raise RewardError(
                "the group's rewards do not match its samples",
                found=f"{len(result)} results" if is_list else type(result).__name__,
                expected=f"a list of {len(samples)}",
            )
        return [_score(item, self._key) for item in result]


def _without_end_tokens(function: Callable[[Sample], Any]) -> Callable[[Sample], Any]:
    """Wrap a function so that it gets responses without special tokens at their end."""

    @functools.wraps(function)
    def wrapper(sample: Sample) -> Any:
        text = without_end(sample.response)
        return function(sample if text == sample.response else replace(sample, response=text))

    return wrapper


def _load(config: RewardFunction, args: Namespace | None) -> tuple[Callable[..., Any], str | None]:
    """Return the function, and the key of the reward in a dict that it returns."""
    # Imported where they are used: reasoning_gym and math_verify take about a second to import.
    if isinstance(config, PythonReward):
        return load_custom(config, args), config.reward_key
    if isinstance(config, RemoteReward):
        from rlpipe.rewards.remote import make_remote

        return make_remote(config), config.reward_key
    if isinstance(config, JudgeReward):
        from rlpipe.rewards.remote import make_judge

        return make_judge(config), "reward"
    if isinstance(config, ReasoningGymReward):
        from rlpipe.rewards.reasoning_gym import make_reward

        return make_reward(config), "reward"
    if isinstance(config, EnvironmentReward):
        return _environment_reward, "reward"
    if isinstance(config, MathReward) and not config.boxed:
        from rlpipe.rewards.math import reward

        return reward, "reward"
    if isinstance(config, NoReward):
        raise ConfigError(
            "reward.function does not score samples",
            where="reward.function.type",
            found=config.type,
        )
    from rlpipe.rewards.rules import make_rule

    return make_rule(config), _rule_reward_key(config)


def _environment_reward(sample: Sample) -> dict[str, float]:
    """Return the reward and the parts that `rollout.environment` stored in the row.

    Raises: RewardError for a row of a run without an environment.
    """
    episode = sample.metadata.get(ENVIRONMENT_KEY)
    if not isinstance(episode, dict) or "reward" not in episode:
        raise RewardError(
            "the sample has no reward of an environment",
            where=f"metadata.{ENVIRONMENT_KEY}",
            expected="an entry 'reward'",
            do="set rollout.environment, or another reward.function",
        )
    return {**(episode.get("parts") or {}), "reward": episode["reward"]}


def _rule_reward_key(config: RuleReward | RowReward | MathReward) -> str:
    """Return the key of the reward in a rule's result."""
    # slime's rules name the reward `score`, so a configuration can use that name too.
    key = config.reward_key if isinstance(config, RowReward) else None
    return "reward" if key in (None, "score") else key


def _score(result: Any, key: str | None) -> Score:
    if not isinstance(result, dict):
        return Score(_finite(result, "the reward"))
    if len(result) > MAX_PARTS:
        raise RewardError(
            "too many reward parts",
            found=f"a dict of {len(result)}",
            expected=f"at most {MAX_PARTS}",
        )
    key = key or "reward"
    if key not in result:
        names = [str(name)[:50] for name in result]
        raise RewardError(
            f"the dict of the reward function has no entry {key!r}",
            where="reward.function.reward_key",
            found=f"entries {', '.join(map(repr, names)) or 'none'}",
            expected="an entry 'reward', or the entry that reward_key names",
            do=f"set reward.function.reward_key={names[0]}" if names else None,
        )
    parts = {
        str(name): _finite(value, f"reward part {name!r}")
        for name, value in result.items()
        if name != key and not isinstance(value, str | None)
    }
    return Score(_finite(result[key], f"the reward {key!r}"), parts)


def _finite(value: Any, description: str) -> float:
    """Return a finite number as a float. Raises: RewardError for any other value."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy or torch scalar
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if math.isfinite(number):
        return number
    if number == math.inf:
        found = "one beyond 1e308"
    else:
        # reprlib: repr of a list of a million numbers takes seconds and gigabytes.
        found = f"{type(value).__name__} {reprlib.repr(value)}"[:200]
        found = "None (does the function return on every path?)" if value is None else found
    raise RewardError(f"{description} is not a finite number", found=found)


@guarded
async def _awaited(result: Any) -> Any:
    return await result


def _reward_error(error: Exception, file: str | None) -> RewardError:
    """Return the error of the rows for an exception of the function, which `file` defines."""
    if isinstance(error, RewardError):
        return error
    if isinstance(error, RlpipeError):
        return RewardError(str(error))
    return RewardError(error_text(error) + location(error, file))
