"""Reward functions and classes of yours, in the forms that are known, as functions of samples
alone.

| form | called |
|---|---|
| `reward(sample) -> float or dict` | for one sample |
| `reward(samples) -> list` | with `group: true`, for all samples of a group |
| `custom_rm(args, sample)`, `custom_rm(args, samples)` | slime's: with `args` before (`rlpipe.slime.args.slime_args`) |
| a class with `compute_reward(prompts, responses) -> list` | made once with `arguments`; lists of one without `group` |
| a class with `__call__` | made once with `arguments`; then as a function |

Each may be `async`. Which form it is follows from its signature, and one that fits none is an error
at start-up.

Not here: what a call returned (`python`), deadlines and processes (`workers`).
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
    """The function that takes one sample (with `group` a list of them). Its forms are told by its
    signature.

    Raises: ConfigError if it cannot be loaded or made, fits no form, or wants `args` where there
    are none.
    """
    function = load_hook(config.path)
    if inspect.isclass(function):
        function = _made(function, config)
        if (method := getattr(function, "compute_reward", None)) is not None:
            return _of_texts(method, config)
    elif config.arguments:
        raise ConfigError(
            "a function takes no arguments of its own",
            where="reward.function.arguments",
            found=config.path,
        )
    if _positional(function, config.path) < 2:
        return function
    if args is None:
        raise ConfigError(
            "the function wants args, which only a run has",
            where=config.path,
            expected="reward(sample)",
        )
    if _is_async(function):
        return _AsyncWithArgs(function, args)
    return lambda samples: function(args, samples)


class _AsyncWithArgs:
    """An object with an async `__call__`, so that it is seen to be one."""

    def __init__(self, function: Callable[..., Any], args: Namespace) -> None:
        self._function = function
        self._args = args

    async def __call__(self, samples: Any) -> Any:
        return await self._function(self._args, samples)


def _is_async(function: Callable[..., Any]) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__, not a test for callable
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _made(kind: type, config: PythonReward) -> Any:
    try:
        inspect.signature(kind).bind(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            "the class does not take these arguments",
            where="reward.function.arguments",
            found=f"{config.arguments}: {error}",
            expected=f"those of {kind.__name__}{inspect.signature(kind)}",
        ) from error
    try:
        made = guarded(kind)(**config.arguments)
    except Exception as error:  # the class is the user's
        raise ConfigError(
            "the class cannot be made", where=config.path, found=error_text(error)
        ) from error
    if not hasattr(made, "compute_reward") and not callable(made):
        raise ConfigError("the class has no method to call", where=config.path, expected=FORMS)
    return made


def _of_texts(method: Callable[..., Any], config: PythonReward) -> Callable[[Any], Any]:
    """`compute_reward(prompts, responses)` as a function of a sample, or of a group."""
    if _positional(method, config.path) != 2:
        raise ConfigError(
            "not a reward class",
            where=config.path,
            found=f"compute_reward{inspect.signature(method)}",
            expected=FORMS,
        )

    def of_group(samples: list[Sample]) -> Any:
        return method(
            [sample.prompt for sample in samples], [sample.response for sample in samples]
        )

    def of_sample(sample: Sample) -> Any:
        answer = of_group([sample])
        return _first(answer) if not inspect.isawaitable(answer) else _later(answer)

    return of_group if config.group else of_sample


async def _later(answer: Any) -> Any:
    return _first(await answer)


def _first(answer: Any) -> Any:
    listed = list(answer)
    if len(listed) != 1:
        raise ValueError(f"compute_reward gave {len(listed)} rewards for one response")
    return listed[0]


def _positional(function: Callable[..., Any], path: str) -> int:
    """How many arguments it must be given. Raises: ConfigError unless one or two."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
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
