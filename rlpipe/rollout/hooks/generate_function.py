"""Sampling by a function of the user: `rollout.custom_generate_function_path` (slime's
`--custom-generate-function-path`).

    async generate(args, sample, sampling_params[, evaluation]) -> Sample | list[Sample] | None      one rollout
    async generate(args, samples[, evaluation]) -> list[Sample] | list[list[Sample]]                the rollouts of a group

A plain function runs in a thread. `sample.tokens` are the prompt's (and what an earlier iteration
left of the response, where `partial_rollout` is on); `args` has slime's names, and these of the
rollout that runs:

    args.sglang_router_ip, args.sglang_router_port     where POST /generate is answered
    args.session_url                                   f"{args.session_url}/{sample.session_id}/v1" is an OpenAI base URL

A function that only talked to its session gives back the sample as it got it (or None): its tokens
are then those of the session. It may set the reward (or `custom_rm_path`, see `own_rewards`),
metadata, `non_generation_time` and attributes of its own. Several samples of one rollout (a list)
share its `rollout_id`.

What it raises makes its sample a row with status failed; the others of the group stay what they
are, and the group is dropped.

Not here: what a sample must be like (`checked`), the addresses (`gateway`, `sessions`).
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

from rlpipe.config.hooks import GENERATE_NAMES, check_call, load_hook, takes
from rlpipe.errors import ConfigError, HookError, RlpipeError
from rlpipe.rollout.generate import FINISHED, GroupFailed, planned_sample
from rlpipe.rollout.hooks.checked import Limits, as_rows, check_row
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.types import PlannedGroup, Sample, Status

CUT_OFF_GRACE_S = 10.0
"""A function that was cut off may take so long to give back what it has."""
_EXPECTED = (
    "async generate(args, sample, sampling_params) -> Sample or list[Sample], or async generate(args, samples) -> list[Sample]; "
    "either may take `evaluation`"
)


@dataclass(frozen=True)
class GenerateHook:
    """A loaded function, and which of the two forms it has."""

    path: str
    function: Callable[..., Any]
    of_group: bool
    takes_evaluation: bool

    async def __call__(self, *arguments: Any, evaluation: bool) -> Any:
        keywords = {"evaluation": evaluation} if self.takes_evaluation else {}
        return await called(self.function, *arguments, **keywords)


def load_generate(path: str, key: str = "rollout.custom_generate_function_path") -> GenerateHook:
    """The function, its form read from its signature. Raises: ConfigError showing the forms there
    are."""
    function = load_hook(path, GENERATE_NAMES)
    of_group = not inspect.isclass(function) and "samples" in inspect.signature(function).parameters
    if inspect.isclass(function):
        raise ConfigError("a class, not a function", where=key, found=path, expected=_EXPECTED)
    arguments = (None, None) if of_group else (None, None, {})
    evaluation = {"evaluation": False} if takes(function, "evaluation") else {}
    check_call(function, *arguments, path=path, key=key, expected=_EXPECTED, **evaluation)
    return GenerateHook(path, function, of_group, bool(evaluation))


async def called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What a plain or async function gives back; a plain one runs in a thread."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return await function(*arguments, **keywords)
    result = await asyncio.to_thread(function, *arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


class _Rollout(NamedTuple):
    number: int
    sample: Sample
    """As the function gets it."""
    before: Sample | None
    """What there was of it."""


class Sessions(Protocol):
    """Where a function may speak through chat completions, by `sample.session_id`."""

    def begin(self, sample: Sample) -> None:
        """Open the sample's session."""
        ...

    def samples(self, sample: Sample) -> list[Sample]:
        """End it: its samples, an empty list if nothing was asked there."""
        ...


class CustomGenerate:
    """The generate function that calls a user's.

    `sessions` are those that the function may talk to. Once `stop` is set, it has CUT_OFF_GRACE_S
    to come back.
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
        self.stop = stop

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """Raises: GroupFailed with the rows there are if the function failed on one of them."""
        kept, rollouts = _begun(group, so_far)
        of_group = self.hook.of_group
        work = (
            [self._of_group(group, rollouts)]
            if of_group
            else [self._of_one(group, rollout) for rollout in rollouts]
        )
        rows = [*kept, *(row for rows in await asyncio.gather(*work) for row in rows)]
        rows.sort(key=lambda row: row.index)
        if failed := next(
            (row for row in rows if row.error is not None and row.status is Status.FAILED), None
        ):
            raise GroupFailed(
                "a rollout failed", rows, where=f"group {group.group_id}", found=failed.error
            )
        return rows

    async def _of_one(self, group: PlannedGroup, rollout: _Rollout) -> list[Sample]:
        where = f"{self.hook.path} on {group.group_id}/{rollout.number}"
        params = dict(self.sampling)
        if self.seeded:
            params["sampling_seed"] = group.seeds[rollout.number]

        async def ask() -> Any:
            return await self.hook(self.args, rollout.sample, params, evaluation=self.evaluation)

        return await self._guarded(
            group, [rollout], ask, lambda answer: [self._rows(answer, group, rollout, where)], where
        )

    async def _of_group(self, group: PlannedGroup, rollouts: list[_Rollout]) -> list[Sample]:
        where = f"{self.hook.path} on {group.group_id}"

        async def ask() -> Any:
            return await self.hook(
                self.args, [rollout.sample for rollout in rollouts], evaluation=self.evaluation
            )

        def read(answer: Any) -> list[list[Sample]]:
            if not isinstance(answer, list | tuple) or len(answer) != len(rollouts):
                found = (
                    f"{len(answer)} entries"
                    if isinstance(answer, list | tuple)
                    else type(answer).__name__
                )
                expected = (
                    f"a list of {len(rollouts)}: for each sample given a Sample, or a list of them"
                )
                raise HookError(
                    "what it gave back does not match the samples",
                    where=where,
                    found=found,
                    expected=expected,
                )
            pairs = zip(answer, rollouts, strict=True)
            return [
                self._rows(one, group, rollout, f"{where}/{rollout.number}")
                for one, rollout in pairs
            ]

        return await self._guarded(group, rollouts, ask, read, where)

    async def _guarded(
        self,
        group: PlannedGroup,
        rollouts: list[_Rollout],
        ask: Callable[[], Awaitable[Any]],
        read: Callable[[Any], list[list[Sample]]],
        where: str,
    ) -> list[Sample]:
        """What the function gives back, as rows; rows that say what happened if it fails or does
        not stop when it is cut off."""
        start_s = time.time()
        if self.sessions is not None:
            for rollout in rollouts:
                self.sessions.begin(rollout.sample)
        try:
            answer = await self._until_cut_off(ask())
            rows = [row for rows in read(answer) for row in rows]
        except asyncio.CancelledError:
            raise
        except _CutOffError:
            rows = [_marked(group, rollout, Status.ABORTED) for rollout in rollouts]
        except Exception as error:  # noqa: BLE001 - a hook may raise anything; it becomes the error of its rows
            text = (
                str(error)
                if isinstance(error, RlpipeError)
                else f"{where}: {type(error).__name__}: {error}"
            )
            rows = [_marked(group, rollout, Status.FAILED, text) for rollout in rollouts]
        for row in rows:
            row.t_start_s, row.t_end_s = row.t_start_s or start_s, row.t_end_s or time.time()
        return rows

    async def _until_cut_off(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop.wait()) if self.stop is not None else None
        try:
            await asyncio.wait(
                {task, stopped} if stopped else {task}, return_when=asyncio.FIRST_COMPLETED
            )
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
        """Checked rows; of the session's tokens if the function only talked to its session."""
        answer = rollout.sample if answer is None else answer
        if isinstance(answer, Sample) and not answer.response_ids:
            answer = self._of_session(answer) or answer
        cut = self.stop is not None and self.stop.is_set()
        if (
            cut
            and isinstance(answer, Sample)
            and answer.status is Status.PENDING
            and not answer.response_ids
        ):
            answer.status = Status.ABORTED
        return as_rows(
            answer,
            group,
            rollout.number,
            self.journal,
            self.limits,
            before=rollout.before,
            where=where,
        )

    def _of_session(self, told: Sample) -> list[Sample]:
        samples = self.sessions.samples(told) if self.sessions is not None else []
        for sample in samples:
            sample.reward, sample.metadata = (
                copy.deepcopy(told.reward),
                copy.deepcopy(told.metadata),
            )
            sample.label = told.label
            sample.remove_sample = told.remove_sample
            sample.custom_rm_path = told.custom_rm_path
            sample.non_generation_time = told.non_generation_time or sample.non_generation_time
            if told.status is not Status.PENDING:
                sample.status = told.status
        return samples


class _CutOffError(Exception):
    """The function did not come back in time."""


def _begun(group: PlannedGroup, so_far: Sequence[Sample]) -> tuple[list[Sample], list[_Rollout]]:
    """Rows that are finished, and the rollouts that begin or go on. What fanned out and is not
    finished begins again."""
    kept: list[Sample] = []
    rollouts: list[_Rollout] = []
    for number in range(len(group.seeds)):
        there = [row for row in so_far if rollout_of(row) == number]
        if there and all(row.status in FINISHED for row in there):
            kept += there
            continue
        before = there[0] if len(there) == 1 and there[0].response_ids else None
        sample = copy.deepcopy(before) if before is not None else planned_sample(group, number)
        sample.rollout_id, sample.session_id = number, session_id(group, number)
        if before is not None:
            sample.weight_versions = []
            sample.teacher_log_probs = (
                None  # those of the tokens so far would not fit the longer response
            )
        rollouts.append(_Rollout(number, sample, before))
    return kept, rollouts


def rollout_of(row: Sample) -> int:
    """Number of the rollout in its group."""
    return row.index if row.rollout_id is None else row.rollout_id


def session_id(group: PlannedGroup, rollout: int) -> str:
    """Names one rollout in a URL."""
    return f"{group.group_id.replace('/', '-')}.{rollout}"


def _marked(
    group: PlannedGroup, rollout: _Rollout, status: Status, error: str | None = None
) -> Sample:
    """The row of a rollout that did not come back."""
    row = (
        copy.deepcopy(rollout.before)
        if rollout.before is not None
        else planned_sample(group, rollout.number)
    )
    row.status = status
    row.error = error
    row.rollout_id = rollout.number
    row.finish_reason = status.value
    if not row.response_ids:
        row.rollout_log_probs = []
    return row


class SampleHooks:
    """`rollout.rollout_sample_hook_path`: functions that see each finished sample before it is a
    row.

    `hook(args, sample, *, rollout_id, evaluation) -> Sample | None` (None: the sample it got),
    plain or async; the keywords only where it takes them. It may change everything but the tokens.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises: ConfigError showing the signature one should have."""
        key = "rollout.rollout_sample_hook_path"
        expected = "hook(args, sample, *, rollout_id=None, evaluation=False)"
        self._hooks = [(path, load_hook(path)) for path in paths]
        for path, hook in self._hooks:
            check_call(
                hook, None, None, path=path, key=key, expected=expected, **_told(hook, 0, False)
            )

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def apply(
        self, args: Namespace, sample: Sample, limits: Limits, *, rollout_id: int, evaluation: bool
    ) -> Sample:
        """The sample as the last of them leaves it. Raises: HookError."""
        known = (sample.group_id, sample.index, sample.rollout_id, sample.seed)
        for path, hook in self._hooks:
            where = f"{path} on {sample.group_id}/{sample.index}"
            try:
                answer = await called(hook, args, sample, **_told(hook, rollout_id, evaluation))
            except Exception as error:  # a hook may raise anything; it becomes the error of its row
                raise HookError(
                    "the sample hook failed", where=where, found=f"{type(error).__name__}: {error}"
                ) from error
            sample = sample if answer is None else answer
            if not isinstance(sample, Sample):
                raise HookError(
                    "it gave back something else",
                    where=where,
                    found=type(sample).__name__,
                    expected="Sample or None",
                )
            check_row(sample, limits, where)
        sample.group_id, sample.index, sample.rollout_id, sample.seed = known
        return sample


def _told(hook: Callable[..., Any], rollout_id: int, evaluation: bool) -> dict[str, Any]:
    values = {"rollout_id": rollout_id, "evaluation": evaluation}
    return {name: value for name, value in values.items() if takes(hook, name)}
