"""A data source, or a choice from the buffer, by the user: `rollout.data_source_path` and
`rollout.buffer_filter_path`.

    class source(args):                  get_samples(n) -> list[list[Sample]]: n groups that have never been drawn
                                         optional: __len__(), save(rollout_id), load(rollout_id)
    filter(args[, rollout_id], buffer, num_samples) -> groups to take out of `buffer`, a list of
    groups that it may change

Neither has to give the same twice: what was drawn from a state is written down with the plan, and a
retry finds it. A source that is made anew (the process died, another machine) is brought to where
the branch is: by `load`, else by drawing, and throwing away, as many groups as were drawn before.
The run's own buffer comes first; `add_samples` is the run's business.

A sample of a source needs a prompt; it becomes tokens as a row's does. Not here: where plans are
kept (`store.plans`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import check_call, load_hook, takes
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError, HookError
from rlpipe.types import Sample

Choice = tuple[list[str], list[str]]
"""Ids of the groups to take, in order, and of those that stay in the buffer."""


class CustomSource:
    """A user's source, kept where the branch is."""

    def __init__(self, path: str, args: Namespace) -> None:
        """Raises: ConfigError if it is not a class with `get_samples`, or cannot be made with
        `args`."""
        key = "rollout.data_source_path"
        expected = "a class made with (args) that has get_samples(n)"
        self._path = path
        self._args = args
        self._make: Callable[..., Any] = load_hook(path)
        is_source = isinstance(self._make, type) and callable(
            getattr(self._make, "get_samples", None)
        )
        if not is_source:
            raise ConfigError("not a data source", where=key, found=path, expected=expected)
        check_call(self._make, args, path=path, key=key, expected=expected)
        self._source: Any = self._asked("", self._make, args)
        self._position = 0

    @property
    def user(self) -> Any:
        """The object of the user's class that is drawn from now."""
        return self._source

    def __len__(self) -> int:
        """Groups it has in all, if it says so; else 1."""
        return len(self._source) if hasattr(self._source, "__len__") else 1

    def draw(self, number: int, *, drawn: int, iteration: int) -> list[PromptRow]:
        """So many groups, after `drawn` of the branch. Raises: HookError."""
        self._go_to(drawn, iteration)
        groups = self._get(number)
        self._position += number
        if hasattr(self._source, "save"):
            self._asked("save", self._source.save, iteration)
        return [
            _row(group, f"{self._path} group {drawn + place}") for place, group in enumerate(groups)
        ]

    def _go_to(self, drawn: int, iteration: int) -> None:
        if self._position > drawn:
            self._source = self._asked("", self._make, self._args)
            self._position = 0
        if self._position < drawn and hasattr(self._source, "load"):
            self._asked("load", self._source.load, iteration - 1)
            self._position = drawn
        while self._position < drawn:
            self._position += len(self._get(min(256, drawn - self._position)))

    def _asked(self, name: str, method: Callable[..., Any], argument: Any) -> Any:
        """What the source answers. Raises: HookError for whatever it raises."""
        try:
            return guarded(method)(argument)
        except Exception as error:  # a hook may raise anything
            where = f"{self._path}.{name}({argument})" if name else self._path
            raise HookError(
                "the data source failed", where=where, found=error_text(error)
            ) from error

    def _get(self, number: int) -> list[Any]:
        groups = self._asked("get_samples", self._source.get_samples, number)
        if not isinstance(groups, list | tuple) or len(groups) != number or not all(groups):
            found = (
                f"{len(groups)} groups"
                if isinstance(groups, list | tuple)
                else type(groups).__name__
            )
            expected = f"a list of {number} groups, each a list of samples"
            raise HookError(
                "not what was asked for",
                where=f"{self._path}.get_samples({number})",
                found=found,
                expected=expected,
            )
        return list(groups)


def _row(group: Any, where: str) -> PromptRow:
    """A group as the row it was drawn from. Its samples are copies of one prompt."""
    sample = group[0] if isinstance(group, list | tuple) else group
    prompt = getattr(sample, "prompt", None)
    label = getattr(sample, "label", None)
    if not prompt:
        raise HookError(
            "a sample without a prompt",
            where=where,
            found=repr(prompt),
            expected="a text, or messages",
        )
    for one in group if isinstance(group, list | tuple) else [group]:
        _check_unkept(one, where)
    return PromptRow(
        prompt,
        None if label is None else str(label),
        dict(getattr(sample, "metadata", None) or {}),
        where,
    )


UNKEPT = (
    "custom_rm_path",
    "generate_function_path",
    "teacher_log_probs",
    "train_metadata",
    "multimodal_inputs",
    "multimodal_train_inputs",
)


def is_given(value: Any) -> bool:
    """True unless a field holds None or an empty container, with which slime's files mean the
    same."""
    return value is not None and not (isinstance(value, dict | list | tuple | str) and not value)


def _check_unkept(sample: Any, where: str) -> None:
    """Raises: HookError for a field that the plan, which has prompt, label and metadata, would
    lose."""
    for name in UNKEPT:
        if is_given(value := getattr(sample, name, None)):
            raise HookError(
                f"sample.{name} is not kept from the data source to the rollout",
                where=where,
                found=repr(value)[:200],
                expected="None; prompt, label and metadata are kept",
                do="set it in a sample hook or a generate function, from an entry of sample.metadata",
            )


class BufferFilter:
    """A user's choice from the buffer."""

    def __init__(self, path: str, args: Namespace) -> None:
        """Raises: ConfigError if it takes neither three nor four arguments."""
        self._path, self._filter, self._args = path, load_hook(path), args
        self._takes_rollout_id = takes(self._filter, "rollout_id")
        expected = "filter(args, rollout_id, buffer, num_samples) or filter(args, buffer, num_samples) -> groups"
        check_call(
            self._filter,
            *self._arguments(0, [], 0),
            path=path,
            key="rollout.buffer_filter_path",
            expected=expected,
        )

    def choose(self, iteration: int, buffer: Sequence[list[Sample]], number: int) -> Choice:
        """Which groups to take, at most `number`. Raises: HookError."""
        where = f"{self._path} in iteration {iteration}"
        groups = [list(group) for group in buffer]
        known = [group[0].group_id for group in groups]
        try:
            chosen = self._filter(*self._arguments(iteration, groups, number))
        except Exception as error:  # a hook may raise anything
            raise HookError(
                "the buffer filter failed", where=where, found=f"{type(error).__name__}: {error}"
            ) from error
        taken = _ids(chosen, where)
        if len(taken) > number or len(set(taken)) < len(taken) or not set(taken) <= set(known):
            found = f"{len(taken)} groups: {taken}"
            expected = f"at most {number} of the buffer's, each once"
            raise HookError(
                "not a choice from the buffer", where=where, found=found, expected=expected
            )
        left = _ids(groups, where)
        return taken, [group_id for group_id in known if group_id in left and group_id not in taken]

    def _arguments(
        self, iteration: int, buffer: list[list[Sample]], number: int
    ) -> tuple[Any, ...]:
        return (self._args, *([iteration] if self._takes_rollout_id else []), buffer, number)


def _ids(groups: Any, where: str) -> list[str]:
    try:
        return [group[0].group_id for group in groups]
    except (TypeError, IndexError, AttributeError) as error:
        raise HookError(
            "not a list of groups",
            where=where,
            found=repr(groups)[:200],
            expected="a list of lists of samples",
        ) from error
