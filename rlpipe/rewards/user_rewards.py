"""Load reward functions and classes of users as functions of samples.

| form | call |
|---|---|
| `reward(sample) -> float or dict` | one sample |
| `reward(samples) -> list` | with `group: true`, all samples of a group |
| `custom_rm(args, sample)`, `custom_rm(args, samples)` | slime's (`rlpipe.slime.args`) |
| class with `compute_reward(prompts, responses) -> list` | lists of length 1 without `group` |
| class with `__call__` | like a function |

A class is instantiated once with `arguments`. Each form can be `async`. The signature decides the
form; a function that has none of them is refused at start-up. Entry point: `load_custom`.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from rlpipe.config.data import PythonReward
from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError
from rlpipe.types import Sample

FORMS = (
    "reward(sample), reward(samples) with group: true, custom_rm(args, sample), "
    "or a class with compute_reward(prompts, responses)"
)


def load_custom(config: PythonReward, args: Namespace | None = None) -> Callable[[Any], Any]:
    """Return the user's reward as a function of one sample, or with `group` of a list of samples.

    Raises: ConfigError if it cannot be loaded or instantiated, has none of the forms, or needs
    `args` and there are none.
    """
    function = load_hook(config.path)
    if inspect.isclass(function):
        function = _instance(function, config)
        if (method := getattr(function, "compute_reward", None)) is not None:
            return _from_compute_reward(method, config)
    elif config.arguments:
        raise ConfigError(
            "reward.function.arguments are for classes, and the reward is a function",
            where="reward.function.arguments",
            found=config.path,
        )
    if _num_positional(function, config.path) < 2:
        return function
    if args is None:
        raise ConfigError(
            "the reward function needs args, which only a run provides",
            where=config.path,
            expected="reward(sample)",
        )
    if _is_async(function):
        return _AsyncWithArgs(function, args)
    return lambda samples: function(args, samples)


class _AsyncWithArgs:
    """Bind `args` in an object with an async `__call__`.

    `inspect.iscoroutinefunction` must recognise the result as async; a lambda would hide it.
    """

    def __init__(self, function: Callable[..., Any], args: Namespace) -> None:
        self._function = function
        self._args = args

    async def __call__(self, samples: Any) -> Any:
        return await self._function(self._args, samples)


def _is_async(function: Callable[..., Any]) -> bool:
    call_method = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__, not a test for callable
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


def _instance(kind: type, config: PythonReward) -> Any:
    try:
        inspect.signature(kind).bind(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            "the reward class does not accept these arguments",
            where="reward.function.arguments",
            found=f"{config.arguments}: {error}",
            expected=f"those of {kind.__name__}{inspect.signature(kind)}",
        ) from error
    try:
        instance = guarded(kind)(**config.arguments)
    except Exception as error:  # the user's class can raise anything
        raise ConfigError(
            "the reward class cannot be instantiated", where=config.path, found=error_text(error)
        ) from error
    if not hasattr(instance, "compute_reward") and not callable(instance):
        raise ConfigError(
            "the reward class has no method to call", where=config.path, expected=FORMS
        )
    return instance


def _from_compute_reward(method: Callable[..., Any], config: PythonReward) -> Callable[[Any], Any]:
    """Return `compute_reward(prompts, responses)` as a function of one sample or of a group."""
    if _num_positional(method, config.path) != 2:
        raise ConfigError(
            "not a reward class: compute_reward must have two arguments",
            where=config.path,
            found=f"compute_reward{inspect.signature(method)}",
            expected=FORMS,
        )

    def score_group(samples: list[Sample]) -> Any:
        return method(
            [sample.prompt for sample in samples], [sample.response for sample in samples]
        )

    def score_sample(sample: Sample) -> Any:
        rewards = score_group([sample])
        return _only_later(rewards) if inspect.isawaitable(rewards) else _only(rewards)

    return score_group if config.group else score_sample


async def _only_later(rewards: Any) -> Any:
    return _only(await rewards)


def _only(rewards: Any) -> Any:
    values = list(rewards)
    if len(values) != 1:
        raise ValueError(f"compute_reward returned {len(values)} rewards for one response")
    return values[0]


def _num_positional(function: Callable[..., Any], path: str) -> int:
    """Return the number of required arguments. Raises: ConfigError unless it is one or two."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return 1
    for count in (1, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ConfigError(
        "the function cannot be called as a reward",
        where=path,
        found=f"{signature}",
        expected=FORMS,
    )
