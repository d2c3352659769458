"""Run data sources and buffer filters of users.

`rollout.data_source_path` names a class, `rollout.buffer_filter_path` a function:

    class source(args):    get_samples(n) -> list[list[Sample]]: n groups that were not drawn before
                           optional: __len__(), save(rollout_id), load(rollout_id)
    filter(args[, rollout_id], buffer, num_samples) -> groups to take from `buffer`, a list of
                           groups that the function can change

Neither needs to be deterministic: the plan records what was drawn, and a retry reads the plan. A
new process restores a source to the branch's position: by `load`, otherwise by drawing and
discarding as many groups as the branch has drawn. A run that continues iterations of slime
(`start_rollout_id`) first calls `load` with the last of them. The run has its own buffer and never
calls `add_samples`.

A sample of a source needs a prompt, which is encoded like the prompt of a row.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import accepts_keyword, check_call, load_hook, rollout_id
from rlpipe.data.prompts import PromptRow
from rlpipe.errors import ConfigError, HookError
from rlpipe.types import Sample

Choice = tuple[list[str], list[str]]
"""(ids of the groups to take, in order; ids of the groups that stay in the buffer)."""

DISCARD_BATCH = 256
"""Groups per call while a source without `load` is advanced."""


class CustomSource:
    """A user's data source at the position of the branch."""

    def __init__(self, path: str, args: Namespace) -> None:
        """Instantiate the class.

        Raises: ConfigError if `path` is not a class with `get_samples`, or cannot be called with
        `args`.
        """
        key = "rollout.data_source_path"
        expected = "a class with __init__(args) and get_samples(n)"
        self._path = path
        self._args = args
        self._class: Callable[..., Any] = load_hook(path)
        is_source = isinstance(self._class, type) and callable(
            getattr(self._class, "get_samples", None)
        )
        if not is_source:
            raise ConfigError("not a data source", where=key, found=path, expected=expected)
        check_call(self._class, args, path=path, key=key, expected=expected)
        self._source: Any = self._call("", self._class, args)
        self._position = 0
        self._began = False
        """True after the first draw of this instance."""

    @property
    def user(self) -> Any:
        """The current instance of the user's class."""
        return self._source

    def __len__(self) -> int:
        """Return the number of groups if the source defines it, else 1."""
        return len(self._source) if hasattr(self._source, "__len__") else 1

    def draw(self, number: int, *, drawn: int, iteration: int) -> list[PromptRow]:
        """Return `number` groups that follow the first `drawn` groups. Raises: HookError."""
        self._seek(drawn, iteration)
        groups = self._get_groups(number)
        self._position += number
        if hasattr(self._source, "save"):
            self._call("save", self._source.save, rollout_id(self._args, iteration))
        return [
            _prompt_row(group, f"{self._path} group {drawn + offset}")
            for offset, group in enumerate(groups)
        ]

    def _seek(self, drawn: int, iteration: int) -> None:
        """Move the source to the position after `drawn` groups."""
        # A source cannot go back, so a retry of an earlier plan starts with a new instance.
        if self._position > drawn:
            self._source = self._call("", self._class, self._args)
            self._position = 0
            self._began = False
        number = rollout_id(self._args, iteration)
        continues_slime = not self._began and number > iteration
        if (self._position < drawn or continues_slime) and hasattr(self._source, "load"):
            self._call("load", self._source.load, number - 1)
            self._position = drawn
        self._began = True
        while self._position < drawn:
            self._position += len(self._get_groups(min(DISCARD_BATCH, drawn - self._position)))

    def _call(self, name: str, method: Callable[..., Any], argument: Any) -> Any:
        """Call user code. Raises: HookError for any exception."""
        try:
            return guarded(method)(argument)
        except Exception as error:  # a hook can raise anything
            where = f"{self._path}.{name}({argument})" if name else self._path
            raise HookError(
                "the data source failed", where=where, found=error_text(error)
            ) from error

    def _get_groups(self, number: int) -> list[Any]:
        groups = self._call("get_samples", self._source.get_samples, number)
        is_list = isinstance(groups, list | tuple)
        if not is_list or len(groups) != number or not all(groups):
            raise HookError(
                "the data source returned other groups than requested",
                where=f"{self._path}.get_samples({number})",
                found=f"{len(groups)} groups" if is_list else type(groups).__name__,
                expected=f"a list of {number} groups, each a list of samples",
            )
        return list(groups)


def _prompt_row(group: Any, where: str) -> PromptRow:
    """Convert a group, whose samples are copies of one prompt, to a row."""
    samples = group if isinstance(group, list | tuple) else [group]
    first = samples[0]
    prompt = getattr(first, "prompt", None)
    label = getattr(first, "label", None)
    if not prompt:
        raise HookError(
            "a sample has no prompt",
            where=where,
            found=repr(prompt),
            expected="a text, or messages",
        )
    for sample in samples:
        _check_lost_fields(sample, where)
    return PromptRow(
        prompt,
        label if isinstance(label, dict | list | None) else str(label),
        dict(getattr(first, "metadata", None) or {}),
        where,
    )


LOST_FIELDS = (
    "custom_rm_path",
    "generate_function_path",
    "teacher_log_probs",
    "train_metadata",
    "multimodal_inputs",
    "multimodal_train_inputs",
)
"""Fields of a sample that a plan does not store."""


def is_given(value: Any) -> bool:
    """True unless a field has None or an empty container, which slime treats alike."""
    return value is not None and not (isinstance(value, dict | list | tuple | str) and not value)


def _check_lost_fields(sample: Any, where: str) -> None:
    """Raise HookError for a field that the plan would lose."""
    for name in LOST_FIELDS:
        if is_given(value := getattr(sample, name, None)):
            raise HookError(
                f"sample.{name} is not kept from the data source to the rollout",
                where=where,
                found=repr(value)[:200],
                expected="None; prompt, label and metadata are kept",
                do="set it in a sample hook or a generate function, "
                "from an entry of sample.metadata",
            )


class BufferFilter:
    """A user's choice of groups from the buffer."""

    def __init__(self, path: str, args: Namespace) -> None:
        """Load the function. Raises: ConfigError if it takes neither three nor four arguments."""
        self._path = path
        self._filter = load_hook(path)
        self._args = args
        self._takes_rollout_id = accepts_keyword(self._filter, "rollout_id")
        check_call(
            self._filter,
            *self._arguments(0, [], 0),
            path=path,
            key="rollout.buffer_filter_path",
            expected="filter(args, rollout_id, buffer, num_samples) "
            "or filter(args, buffer, num_samples) -> groups",
        )

    def choose(self, iteration: int, buffer: Sequence[list[Sample]], number: int) -> Choice:
        """Return the groups to take, at most `number`. Raises: HookError."""
        where = f"{self._path} in iteration {iteration}"
        groups = [list(group) for group in buffer]
        buffered = [group[0].group_id for group in groups]
        try:
            chosen = self._filter(*self._arguments(iteration, groups, number))
        except Exception as error:  # a hook can raise anything
            raise HookError(
                "the buffer filter failed", where=where, found=f"{type(error).__name__}: {error}"
            ) from error
        taken = _group_ids(chosen, where)
        has_duplicates = len(set(taken)) < len(taken)
        if len(taken) > number or has_duplicates or not set(taken) <= set(buffered):
            raise HookError(
                "the buffer filter did not choose groups of the buffer",
                where=where,
                found=f"{len(taken)} groups: {taken}",
                expected=f"at most {number} of the buffer's, each once",
            )
        # The function can remove groups from its list: they leave the buffer without being taken.
        remaining = _group_ids(groups, where)
        kept = [
            group_id for group_id in buffered if group_id in remaining and group_id not in taken
        ]
        return taken, kept

    def _arguments(
        self, iteration: int, buffer: list[list[Sample]], number: int
    ) -> tuple[Any, ...]:
        numbers = [rollout_id(self._args, iteration)] if self._takes_rollout_id else []
        return (self._args, *numbers, buffer, number)


def _group_ids(groups: Any, where: str) -> list[str]:
    try:
        return [group[0].group_id for group in groups]
    except (TypeError, IndexError, AttributeError) as error:
        raise HookError(
            "not a list of groups",
            where=where,
            found=repr(groups)[:200],
            expected="a list of lists of samples",
        ) from error
