"""What a user's functions say of a rollout that is over: which samples not to train on, and
whatever else they do with it.

    rollout_sample_filter_path         filter(args, groups) -> None: of the batch; sets `remove_sample`
    rollout_all_samples_process_path   process(args, all_groups, data_source) -> None: every finished group

`data_source` is the object of `rollout.data_source_path`, for what a curriculum learns from a
rollout. It may be drawn from at the same time on another thread, and with iterations ahead their
groups were drawn before. Without such a source it is None: groups cannot be given back any more, as
the plan of the next rollout may be written already.

The rows are written by then, so which samples are removed stands in the rollout's node, and whoever
reads its rows sees it.

Not here: filters that decide about a group while the rollout runs (`filters`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.hooks import check_call, load_hook
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.custom import CustomSource
from rlpipe.errors import HookError
from rlpipe.rollout.rows import Groups


class Afterwards:
    """The two functions, where there are any. Called on a thread."""

    def __init__(
        self, config: RolloutConfig, args: Namespace, source: CustomSource | None = None
    ) -> None:
        """`source`: the user's, if any. Raises: ConfigError showing the signature one should
        have."""
        self._args = args
        self._source = source
        self._filter = _load(
            "rollout_sample_filter_path",
            config.rollout_sample_filter_path,
            "filter(args, groups)",
            args,
            [],
        )
        path = config.rollout_all_samples_process_path
        expected = "process(args, all_groups, data_source)"
        self._process = _load("rollout_all_samples_process_path", path, expected, args, [], None)

    def removed(self, scored: Groups, accepted: Sequence[str]) -> list[tuple[str, int]]:
        """(group id, index) of the samples of the batch that shall not be trained on. Raises:
        HookError."""
        removed: list[tuple[str, int]] = []
        if self._filter is not None:
            groups = [scored[group_id] for group_id in accepted if group_id in scored]
            known = [
                (sample, sample.group_id, sample.index) for group in groups for sample in group
            ]
            _call(self._filter, "the sample filter failed", self._args, groups)
            removed = [
                (group_id, index) for sample, group_id, index in known if sample.remove_sample
            ]
        if self._process is not None:
            source = None if self._source is None else self._source.user
            _call(
                self._process,
                "the processing of all samples failed",
                self._args,
                list(scored.values()),
                source,
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
    except Exception as error:  # a hook may raise anything
        raise HookError(
            problem, where=function.__name__, found=f"{type(error).__name__}: {error}"
        ) from error
