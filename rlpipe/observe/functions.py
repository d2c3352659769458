"""Functions of the user that log an iteration's rollout or an evaluation, with slime's signatures.

    custom_rollout_log_function_path        (rollout_id, args, samples, extra_metrics, rollout_time) -> bool
    custom_eval_rollout_log_function_path   (rollout_id, args, data, extra_metrics) -> bool

`samples` are those of the batch's groups, with their rewards; `rollout_time` is in seconds; `data`
has `{"rewards", "truncated", "samples"}` of each held-out set by its name; `extra_metrics` are
rlpipe's own figures of the rollout or the evaluation, by name. `rollout_id` is the iteration, of an
evaluation how many were trained before it. What answers true has logged it: TensorBoard and the
terminal do not show the same again. The store and the report have everything in any case.

They run in the process that drives the run, when an iteration is committed or an evaluation
recorded. An iteration comes once, or never if the process dies just then; the evaluation of the
weights that a restart begins with comes again.

Not here: who calls them, and what becomes of their errors (`tasks.observe`).
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.config.hooks import check_call, load_hook
from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, HookError
from rlpipe.types import Sample

ROLLOUT = "custom_rollout_log_function_path"
EVALUATION = "custom_eval_rollout_log_function_path"
CALLS: dict[str, tuple[str, ...]] = {
    ROLLOUT: ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
    EVALUATION: ("rollout_id", "args", "data", "extra_metrics"),
}
"""Key of `observe` → what the function gets, by position."""


class LogFunctions:
    """The functions that a configuration names. Called on a thread."""

    def __init__(self, config: ObserveConfig, args: Namespace | None = None) -> None:
        """Raises: ConfigError if one is not there or cannot be called as it will be."""
        self._args = args
        self._paths = {key: path for key in CALLS if (path := getattr(config, key))}
        self._functions = {key: _load(key, path) for key, path in self._paths.items()}

    @property
    def logs_rollouts(self) -> bool:
        return ROLLOUT in self._functions

    @property
    def logs_evaluations(self) -> bool:
        return EVALUATION in self._functions

    def rollout(
        self, k: int, samples: Sequence[Sample], metrics: Mapping[str, float], seconds: float
    ) -> bool:
        """Was it logged, so that nobody else needs to? Raises: HookError."""
        return self._call(ROLLOUT, k, self._args, list(samples), dict(metrics), seconds)

    def evaluation(
        self, version: int, samples: Mapping[str, Sequence[Sample]], metrics: Mapping[str, float]
    ) -> bool:
        """The same for all held-out sets of an evaluation, by name. Raises: HookError."""
        data = {name: _of_set(rows) for name, rows in samples.items()}
        return self._call(EVALUATION, version, self._args, data, dict(metrics))

    def _call(self, key: str, *arguments: Any) -> bool:
        try:
            return bool(self._functions[key](*arguments))
        except (Exception, SystemExit) as error:  # a hook may raise anything
            found = f"{type(error).__name__}: {error}"
            raise HookError(
                "the function that logs failed",
                where=f"observe.{key}: {self._paths[key]}",
                found=found,
            ) from error


def _of_set(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "samples": list(samples),
    }


def _load(key: str, path: str) -> Callable[..., Any]:
    function = load_hook(path)
    expected = f"({', '.join(CALLS[key])}) -> bool"
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            "a function that logs is a plain one",
            where=f"observe.{key}",
            found=f"{path}: async",
            expected=expected,
        )
    check_call(function, *CALLS[key], path=path, key=f"observe.{key}", expected=expected)
    return function
