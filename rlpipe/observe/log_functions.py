"""Call user functions that log a rollout or an evaluation, with slime's signatures.

    custom_rollout_log_function_path
        (rollout_id, args, samples, extra_metrics, rollout_time) -> bool
    custom_eval_rollout_log_function_path
        (rollout_id, args, data, extra_metrics) -> bool

`samples` are the samples of the batch's groups, with rewards. `rollout_time` is in seconds. `data`
maps the name of each held-out set to `{"rewards", "truncated", "samples"}`. `extra_metrics` are
rlpipe's metrics by name. `rollout_id` is the iteration; for an evaluation, the number of iterations
trained before it. If the function returns true, TensorBoard and the terminal skip these metrics.
Store and report always have them.

The functions run in the driver process, after an iteration is committed or an evaluation is
recorded. Each iteration is logged at most once: it is missed if the process dies in that moment. An
evaluation of the weights from which a restart begins is logged again. Entry point: `LogFunctions`.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.config.hooks import check_call, load_hook, rollout_id
from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError, HookError
from rlpipe.types import Sample

ROLLOUT = "custom_rollout_log_function_path"
EVALUATION = "custom_eval_rollout_log_function_path"
SIGNATURES: dict[str, tuple[str, ...]] = {
    ROLLOUT: ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
    EVALUATION: ("rollout_id", "args", "data", "extra_metrics"),
}
"""Key of `observe` → positional arguments."""


class LogFunctions:
    """The functions of a configuration. The caller runs them on a thread."""

    def __init__(self, config: ObserveConfig, args: Namespace | None = None) -> None:
        """Load the functions. Raises: ConfigError if one does not exist or has other parameters."""
        self._args = args
        self._paths = {key: path for key in SIGNATURES if (path := getattr(config, key))}
        self._functions = {key: _load(key, path) for key, path in self._paths.items()}

    @property
    def logs_rollouts(self) -> bool:
        """True if a function for rollouts is configured."""
        return ROLLOUT in self._functions

    @property
    def logs_evaluations(self) -> bool:
        """True if a function for evaluations is configured."""
        return EVALUATION in self._functions

    def rollout(
        self, k: int, samples: Sequence[Sample], metrics: Mapping[str, float], seconds: float
    ) -> bool:
        """Log an iteration's rollout; true if no other sink should log it. Raises: HookError."""
        number = rollout_id(self._args, k)
        return self._call(ROLLOUT, number, self._args, list(samples), dict(metrics), seconds)

    def evaluation(
        self, version: int, samples: Mapping[str, Sequence[Sample]], metrics: Mapping[str, float]
    ) -> bool:
        """Log an evaluation; `samples` by name of the held-out set. Otherwise as `rollout`."""
        data = {name: _slime_data(rows) for name, rows in samples.items()}
        number = rollout_id(self._args, version)
        return self._call(EVALUATION, number, self._args, data, dict(metrics))

    def _call(self, key: str, *arguments: Any) -> bool:
        try:
            return bool(self._functions[key](*arguments))
        # SystemExit too: sys.exit() in a log function must not end the run.
        except (Exception, SystemExit) as error:
            raise HookError(
                "the log function failed",
                where=f"observe.{key}: {self._paths[key]}",
                found=f"{type(error).__name__}: {error}",
            ) from error


def _slime_data(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "samples": list(samples),
    }


def _load(key: str, path: str) -> Callable[..., Any]:
    function = load_hook(path)
    expected = f"({', '.join(SIGNATURES[key])}) -> bool"
    # The call runs on a thread without an event loop; a coroutine would never be awaited.
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            "a log function cannot be async",
            where=f"observe.{key}",
            found=f"{path}: async",
            expected=expected,
        )
    check_call(function, *SIGNATURES[key], path=path, key=f"observe.{key}", expected=expected)
    return function
