"""Call the user functions for a finished rollout.

    rollout_sample_filter_path         filter(args, groups) -> None
        Gets the groups of the batch and sets `remove_sample` of samples that shall not be trained.
    rollout_all_samples_process_path   process(args, all_groups, data_source) -> None
        Gets every finished group.

`data_source` is the object of `rollout.data_source_path`, for example for a curriculum that learns
from rollouts. Another thread may draw from it at the same time, and with iterations ahead their
groups are drawn already. Without such a source the argument is None: groups cannot be given back,
because the plan of the next rollout may be written.

The rows are written before these functions run. The rollout's node has the removed samples, and
every reader of its rows applies them.

Entry point: `FinishedRolloutHooks`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.hooks import check_call, load_hook
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.user_source import CustomSource
from rlpipe.errors import HookError
from rlpipe.rollout.rollout_rows import Groups


class FinishedRolloutHooks:
    """The two functions, as far as the configuration names them. Called on a thread."""

    def __init__(
        self, config: RolloutConfig, args: Namespace, source: CustomSource | None = None
    ) -> None:
        """Load the functions. `source` is the user's data source. Raises: ConfigError with the
        expected signature."""
        self._args = args
        self._source = source
        self._filter = _load(
            "rollout_sample_filter_path",
            config.rollout_sample_filter_path,
            "filter(args, groups)",
            args,
            [],
        )
        self._process = _load(
            "rollout_all_samples_process_path",
            config.rollout_all_samples_process_path,
            "process(args, all_groups, data_source)",
            args,
            [],
            None,
        )

    def removed(self, scored: Groups, accepted: Sequence[str]) -> list[tuple[str, int]]:
        """Call the functions; return (group id, index) of the removed samples of the batch.

        Raises: HookError.
        """
        removed: list[tuple[str, int]] = []
        if self._filter is not None:
            groups = [scored[group_id] for group_id in accepted if group_id in scored]
            # Recorded before the call: the filter may change ids and the lists.
            samples = [
                (sample, sample.group_id, sample.index) for group in groups for sample in group
            ]
            _call(self._filter, "the sample filter failed", self._args, groups)
            removed = [
                (group_id, index) for sample, group_id, index in samples if sample.remove_sample
            ]
        if self._process is not None:
            _call(
                self._process,
                "the processing of all samples failed",
                self._args,
                list(scored.values()),
                None if self._source is None else self._source.user,
            )
        return removed


def _load(key: str, path: str | None, expected: str, *arguments: Any) -> Callable[..., Any] | None:
    if path is None:
        return None
    function = load_hook(path)
    check_call(function, *arguments, path=path, key=f"rollout.{key}", expected=expected)
    return function


def _call(function: Callable[..., Any], problem: str, *arguments: Any) -> None:
    try:
        function(*arguments)
    except Exception as error:  # a hook may raise any exception
        raise HookError(
            problem, where=function.__name__, found=f"{type(error).__name__}: {error}"
        ) from error
