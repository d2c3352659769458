"""Sample with a user function: `rollout.custom_generate_function_path`.

    async generate(args, sample, sampling_params[, evaluation])     one rollout
        -> Sample | list[Sample] | None
    async generate(args, samples[, evaluation])                     all rollouts of a group
        -> list[Sample] | list[list[Sample]]

This is slime's `--custom-generate-function-path`. A plain function runs in a thread.
`sample.tokens` are the prompt's tokens; with `partial_rollout` the tokens of an earlier iteration
follow. `args` has slime's names and the addresses of this rollout:

    args.sglang_router_ip, args.sglang_router_port     server of POST /generate
    args.session_url                                   OpenAI's API of a rollout has the base URL
                                                       f"{args.session_url}/{sample.session_id}/v1"

A function that only used its session returns the sample unchanged, or None: the row then has the
session's tokens. The function may set the reward (or `custom_rm_path`, see `sample_rewards`),
metadata, `non_generation_time` and further attributes. Several samples of one rollout (a list)
share its `rollout_id`.

An exception makes the sample a row with status failed. The other samples of the group are kept as
rows, and the group is dropped.

Entry points: `load_generate`, `UserGenerate`, `SampleHooks`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rlpipe.config.guard import error_text, location
from rlpipe.config.hooks import (
    GENERATE_NAMES,
    accepts_keyword,
    check_call,
    error_with_line,
    file_of,
    load_hook,
)
from rlpipe.errors import ConfigError, HookError, RlpipeError
from rlpipe.rollout.generate import FINISHED, GroupFailed, planned_sample
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.rollout.hooks.sample_checks import Limits, check_row, checked_rows
from rlpipe.slime.sample import own_sample
from rlpipe.types import PlannedGroup, Sample, Status

CUT_OFF_GRACE_S = 10.0
"""Seconds in which a function must return after it was cut off."""
_EXPECTED = (
    "async generate(args, sample, sampling_params) -> Sample or list[Sample], "
    "or async generate(args, samples) -> list[Sample]; either may take `evaluation`"
)


@dataclass(frozen=True)
class GenerateHook:
    """A loaded user function and its form."""

    path: str
    function: Callable[..., Any]
    of_group: bool
    """True if the function samples all rollouts of a group."""
    takes_evaluation: bool

    async def __call__(self, *arguments: Any, evaluation: bool) -> Any:
        keywords = {"evaluation": evaluation} if self.takes_evaluation else {}
        return await call_hook(self.function, *arguments, **keywords)


def load_generate(path: str, key: str = "rollout.custom_generate_function_path") -> GenerateHook:
    """Load a generate function; its signature determines the form. Raises: ConfigError with the
    accepted forms."""
    function = load_hook(path, GENERATE_NAMES)
    if inspect.isclass(function):
        raise ConfigError("a class, not a function", where=key, found=path, expected=_EXPECTED)
    of_group = "samples" in inspect.signature(function).parameters
    arguments = (None, None) if of_group else (None, None, {})
    evaluation = {"evaluation": False} if accepts_keyword(function, "evaluation") else {}
    check_call(function, *arguments, path=path, key=key, expected=_EXPECTED, **evaluation)
    return GenerateHook(path, function, of_group, bool(evaluation))


async def call_hook(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a plain or async function. A plain function runs in a thread."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(*arguments, **keywords)
    result = await asyncio.to_thread(function, *arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


class _Rollout(NamedTuple):
    number: int
    sample: Sample
    """Argument of the function."""
    before: Sample | None
    """The sample of an earlier iteration that the rollout continues."""


class Sessions(Protocol):
    """Chat sessions of samples, by `sample.session_id`."""

    def begin(self, sample: Sample) -> None:
        """Open the session of a sample."""
        ...

    def samples(self, sample: Sample) -> list[Sample]:
        """Close the session and return its samples; empty if the session was not used."""
        ...


class UserGenerate:
    """The generate function that calls a user's function.

    `sessions` serve the function's chat completions. Without `continues` an unfinished rollout of
    an earlier iteration starts again from its prompt. After `stop` is set, the function has
    CUT_OFF_GRACE_S to return.
    """

    def __init__(
        self,
        hook: GenerateHook,
        args: Namespace,
        sampling: dict[str, Any],
        *,
        journal: Journal,
        limits: Limits,
        sessions: Sessions | None = None,
        evaluation: bool = False,
        seeded: bool = False,
        continues: bool = True,
        stop: asyncio.Event | None = None,
    ) -> None:
        self.hook = hook
        self.args = args
        self.sampling = sampling
        self.journal = journal
        self.limits = limits
        self.sessions = sessions
        self.evaluation = evaluation
        self.seeded = seeded
        self.continues = continues
        self.stop = stop

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """Sample a group. Raises: GroupFailed with all rows if the function failed on one."""
        finished, rollouts = _open_rollouts(group, so_far, continues=self.continues)
        if self.hook.of_group:
            work = [self._sample_group(group, rollouts)]
        else:
            work = [self._sample_one(group, rollout) for rollout in rollouts]
        rows = [*finished, *(row for rows in await asyncio.gather(*work) for row in rows)]
        rows.sort(key=lambda row: row.index)
        for row in rows:
            if row.error is not None and row.status is Status.FAILED:
                raise GroupFailed(
                    "a rollout failed", rows, where=f"group {group.group_id}", found=row.error
                )
        return rows

    async def _sample_one(self, group: PlannedGroup, rollout: _Rollout) -> list[Sample]:
        where = f"{self.hook.path} on {group.group_id}/{rollout.number}"
        params = dict(self.sampling)
        if self.seeded:
            params["sampling_seed"] = group.seeds[rollout.number]
        answer = self.hook(self.args, rollout.sample, params, evaluation=self.evaluation)
        return await self._rows_of(
            group,
            [rollout],
            answer,
            lambda sample: self._rows(sample, group, rollout, where),
            where,
        )

    async def _sample_group(self, group: PlannedGroup, rollouts: list[_Rollout]) -> list[Sample]:
        where = f"{self.hook.path} on {group.group_id}"
        samples = [rollout.sample for rollout in rollouts]

        def read(answer: Any) -> list[Sample]:
            if not isinstance(answer, list | tuple) or len(answer) != len(rollouts):
                is_list = isinstance(answer, list | tuple)
                raise HookError(
                    "the answer does not match the samples",
                    where=where,
                    found=f"{len(answer)} entries" if is_list else type(answer).__name__,
                    expected=f"a list of {len(rollouts)}: "
                    "a Sample or a list of them for each given sample",
                )
            rows: list[Sample] = []
            for entry, rollout in zip(answer, rollouts, strict=True):
                rows += self._rows(entry, group, rollout, f"{where}/{rollout.number}")
            return rows

        answer = self.hook(self.args, samples, evaluation=self.evaluation)
        return await self._rows_of(group, rollouts, answer, read, where)

    async def _rows_of(
        self,
        group: PlannedGroup,
        rollouts: list[_Rollout],
        answer: Awaitable[Any],
        read: Callable[[Any], list[Sample]],
        where: str,
    ) -> list[Sample]:
        """Return the rows of an answer; failed or aborted rows if the function raises or does not
        return after it was cut off."""
        start_s = time.time()
        if self.sessions is not None:
            for rollout in rollouts:
                self.sessions.begin(rollout.sample)
        try:
            rows = read(await self._until_cut_off(answer))
        except asyncio.CancelledError:
            raise
        except _CutOffError:
            rows = [_row_without_answer(group, rollout, Status.ABORTED) for rollout in rollouts]
        except Exception as error:  # noqa: BLE001 - a hook may raise any exception; its rows get it
            text = str(error)
            if not isinstance(error, RlpipeError):
                text = f"{where}: {error_text(error)}{location(error, file_of(self.hook.function))}"
            rows = [
                _row_without_answer(group, rollout, Status.FAILED, text) for rollout in rollouts
            ]
        for row in rows:
            row.t_start_s = row.t_start_s or start_s
            row.t_end_s = row.t_end_s or time.time()
        return rows

    async def _until_cut_off(self, answer: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(answer)
        stopped = asyncio.ensure_future(self.stop.wait()) if self.stop is not None else None
        waiting = {task, stopped} if stopped else {task}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=CUT_OFF_GRACE_S)
            if not task.done():
                raise _CutOffError
            return task.result()
        finally:
            task.cancel()
            if stopped:
                stopped.cancel()

    def _rows(
        self, answer: Any, group: PlannedGroup, rollout: _Rollout, where: str
    ) -> list[Sample]:
        if answer is None:
            where += ", which returned None"
        answer = rollout.sample if answer is None else own_sample(answer)
        before = rollout.before
        given_ids = [] if before is None else before.response_ids
        # A function that left the tokens as they were may have used the session instead. That
        # conversation began with its prompt, so it continues no tokens of an earlier iteration.
        if isinstance(answer, Sample) and answer.response_ids == given_ids:
            given_status = Status.PENDING if before is None else before.status
            if of_session := self._of_session(answer, given_status):
                answer, before = of_session, None
        was_cut_off = self.stop is not None and self.stop.is_set()
        is_unsampled = (
            isinstance(answer, Sample)
            and answer.status is Status.PENDING
            and not answer.response_ids
        )
        if was_cut_off and is_unsampled:
            answer.status = Status.ABORTED
        return checked_rows(
            answer,
            group,
            rollout.number,
            self.journal,
            self.limits,
            before=before,
            where=where,
        )

    def _of_session(self, returned: Sample, given_status: Status) -> list[Sample]:
        """Return the samples of a session, with the fields that the function set."""
        samples = self.sessions.samples(returned) if self.sessions is not None else []
        for sample in samples:
            sample.reward = copy.deepcopy(returned.reward)
            sample.metadata = copy.deepcopy(returned.metadata)
            sample.label = returned.label
            sample.remove_sample = returned.remove_sample
            sample.custom_rm_path = returned.custom_rm_path
            sample.non_generation_time = returned.non_generation_time or sample.non_generation_time
            if returned.status is not given_status:
                sample.status = returned.status
        return samples


class _CutOffError(Exception):
    """The function did not return within CUT_OFF_GRACE_S."""


def _open_rollouts(
    group: PlannedGroup, so_far: Sequence[Sample], *, continues: bool
) -> tuple[list[Sample], list[_Rollout]]:
    """Return the finished rows of a group, and the rollouts to start or continue.

    An unfinished rollout that fanned out starts again.
    """
    finished: list[Sample] = []
    rollouts: list[_Rollout] = []
    for number in range(len(group.seeds)):
        rows = [row for row in so_far if rollout_of(row) == number]
        if rows and all(row.status in FINISHED for row in rows):
            finished += rows
            continue
        before = rows[0] if continues and len(rows) == 1 and rows[0].response_ids else None
        sample = copy.deepcopy(before) if before is not None else planned_sample(group, number)
        sample.rollout_id = number
        sample.session_id = session_id(group, number)
        if before is not None:
            # The prompt of a conversation has been rendered; an agent that begins it again needs
            # the row's own.
            sample.prompt = group.prompt
            sample.weight_versions = []
            # Log-probs of the tokens so far would not fit the longer response.
            sample.teacher_log_probs = None
        rollouts.append(_Rollout(number, sample, before))
    return finished, rollouts


def rollout_of(row: Sample) -> int:
    """Return the number of a row's rollout in its group."""
    return row.index if row.rollout_id is None else row.rollout_id


def session_id(group: PlannedGroup, rollout: int) -> str:
    """Return the name of a rollout in URLs."""
    return f"{group.group_id.replace('/', '-')}.{rollout}"


def _row_without_answer(
    group: PlannedGroup, rollout: _Rollout, status: Status, error: str | None = None
) -> Sample:
    if rollout.before is not None:
        row = copy.deepcopy(rollout.before)
    else:
        row = planned_sample(group, rollout.number)
    row.status = status
    row.error = error
    row.rollout_id = rollout.number
    row.finish_reason = status.value
    if not row.response_ids:
        row.rollout_log_probs = []
    return row


class SampleHooks:
    """Apply the functions of `rollout.rollout_sample_hook_path` to each finished sample.

    `hook(args, sample, *, rollout_id, evaluation) -> Sample | None` is plain or async and takes the
    keywords optionally. None stands for the given sample. A hook may change everything but the
    tokens.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Load the hooks. Raises: ConfigError with the expected signature."""
        key = "rollout.rollout_sample_hook_path"
        expected = "hook(args, sample, *, rollout_id=None, evaluation=False)"
        self._hooks = [(path, load_hook(path)) for path in paths]
        for path, hook in self._hooks:
            keywords = _accepted_keywords(hook, 0, False)
            check_call(hook, None, None, path=path, key=key, expected=expected, **keywords)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def apply(
        self, args: Namespace, sample: Sample, limits: Limits, *, rollout_id: int, evaluation: bool
    ) -> Sample:
        """Return the sample after all hooks. Raises: HookError."""
        identity = (sample.group_id, sample.index, sample.rollout_id, sample.seed)
        for path, hook in self._hooks:
            where = f"{path} on {sample.group_id}/{sample.index}"
            keywords = _accepted_keywords(hook, rollout_id, evaluation)
            try:
                answer = await call_hook(hook, args, sample, **keywords)
            except Exception as error:  # a hook may raise any exception; its row gets it
                raise HookError(
                    "the function of rollout.rollout_sample_hook_path failed",
                    where=where,
                    found=error_with_line(error),
                ) from error
            sample = sample if answer is None else answer
            if not isinstance(sample, Sample):
                raise HookError(
                    "the function of rollout.rollout_sample_hook_path returned another type",
                    where=where,
                    found=type(sample).__name__,
                    expected="Sample or None",
                )
            check_row(sample, limits, where)
        sample.group_id, sample.index, sample.rollout_id, sample.seed = identity
        return sample


def _accepted_keywords(
    hook: Callable[..., Any], rollout_id: int, evaluation: bool
) -> dict[str, Any]:
    values = {"rollout_id": rollout_id, "evaluation": evaluation}
    return {name: value for name, value in values.items() if accepts_keyword(hook, name)}
