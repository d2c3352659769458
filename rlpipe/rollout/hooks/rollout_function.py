"""Run a whole rollout with a user function: `rollout.rollout_function_path`.

    generate_rollout(args, rollout_id, data_source, evaluation=False) -> groups, plain or async

This is slime's `--rollout-function-path`. `data_source.get_samples(n)` returns the next n groups of
the plan as lists of samples with prompt tokens; `data_source.add_samples(groups)` takes groups that
are not for this batch, or that the function made (`data_source_view`). The function returns

- a list of groups (a rollout that fanned out is a list in its place),
- an object with `.samples` (and `.metrics`), or slime's pair of either and the aborted samples,
- in an evaluation also `{name: {"samples": …}}`, or an object with such a `.data`.

Every group that the function got has one fate. The first `rollout_batch_size` returned groups make
the batch, in their order. Other returned or added groups wait in the buffer with their tokens. All
others are dropped as `not_returned`. Groups of the plan that the function did not get stay in the
buffer. Rows are written after the function returned: a killed function is called again with the
same groups, except those whose rows were written.

Entry points: `load_rollout_function`, `RolloutFunction`.
"""

from __future__ import annotations

import asyncio
import copy
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.data import RewardConfig
from rlpipe.config.hooks import ROLLOUT_NAMES, check_call, load_hook, rollout_id
from rlpipe.errors import DeadlineExceeded, HookError
from rlpipe.rollout.generate import FINISHED
from rlpipe.rollout.hooks.data_source_view import DataSourceView
from rlpipe.rollout.hooks.generate_function import call_hook
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.rollout.hooks.sample_checks import Limits, checked_rows
from rlpipe.rollout.hooks.sample_rewards import score_with_sample_functions
from rlpipe.rollout.rollout_result import (
    RolloutProgress,
    RolloutResult,
    ages,
    build_result,
    dropped_by_buffer_filter,
)
from rlpipe.rollout.rollout_rows import Groups, PlanPart, Rows, by_group, num_response_tokens
from rlpipe.types import BufferedGroup, PlannedGroup, Sample, Status

EXPECTED = "generate_rollout(args, rollout_id, data_source, evaluation=False)"
_UNFINISHED = (Status.ABORTED, Status.PENDING)


def load_rollout_function(
    path: str, key: str = "rollout.rollout_function_path"
) -> Callable[..., Any]:
    """Load the function. Raises: ConfigError with the expected signature."""
    function = load_hook(path, ROLLOUT_NAMES)
    check_call(function, None, 0, None, path=path, key=key, expected=EXPECTED, evaluation=False)
    return function


class RolloutFunction:
    """One attempt at a rollout with a user function."""

    def __init__(
        self,
        function: Callable[..., Any],
        path: str,
        args: Namespace,
        journal: Journal,
        limits: Limits,
        *,
        iteration: int,
        timeout_s: float,
        reward: RewardConfig,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """`iteration` is the function's `rollout_id`; in an evaluation it is the weight version.
        `reward` has the deadlines for the reward functions of samples. `metadata`: values of the
        function, which several rollouts share."""
        self.function = function
        self.path = path
        self.args = args
        self.journal = journal
        self.limits = limits
        self.iteration = iteration
        self.timeout_s = timeout_s
        self.reward = reward
        self.metadata = {} if metadata is None else metadata

    async def train(
        self,
        parts: list[PlanPart],
        rows: Rows,
        *,
        batch_size: int,
        partial: bool,
        next_part: Callable[[PlanPart], PlanPart],
    ) -> RolloutResult:
        """Call the function for an iteration and write the rows.

        Raises: HookError; DeadlineExceeded; StoreError.
        """
        start_s = time.monotonic()
        adopted, earlier = await _rows_so_far(parts, rows, partial=partial)
        view = DataSourceView(parts, next_part, adopted, earlier, self.metadata)
        # Copied: the function changes the samples of `earlier` in place.
        before = {
            key: {row.index: copy.deepcopy(row) for row in group} for key, group in earlier.items()
        }
        returned: Groups = {}
        added: Groups = {}
        # With a full batch from an earlier attempt, only the result has to be built.
        if len(adopted) < batch_size:
            answer = await self._call(view, evaluation=False)
            groups = _groups_of(answer)
            view.claim(groups)
            returned = self._read(groups, view, before)
            added = self._read([*view.added, *view.made], view, before)
            if view.claimed:
                _make_log_probs_equal([*returned.values(), *added.values()])
            await self._score(returned)
        self._check(returned, adopted, added, batch_size)
        finished = {key: group for key, group in added.items() if _is_finished(group)}
        cut = {
            key: group
            for key, group in added.items()
            if not _is_finished(group) and num_response_tokens(group)
        }
        await _write(view, rows, {**returned, **finished})
        await _write(view, rows, cut, cut=True)
        return _result(view, adopted, returned, added, batch_size, time.monotonic() - start_s)

    async def evaluate(self, part: PlanPart, name: str, rows: Rows) -> RolloutResult:
        """Call the function for a held-out set and write the rows. Raises: HookError;
        DeadlineExceeded."""
        start_s = time.monotonic()
        view = DataSourceView([part], None, {}, {}, self.metadata)
        answer = await self._call(view, evaluation=True)
        data = getattr(answer, "data", answer)
        if isinstance(data, dict):
            if name not in data:
                raise HookError(
                    "the answer lacks a held-out set",
                    where=self.path,
                    found=sorted(data),
                    expected=name,
                )
            answer = data[name]["samples"]
        groups = _groups_of(answer)
        if groups and all(isinstance(sample, Sample) for sample in groups):
            # slime's evaluations return a flat list of samples.
            groups = list(by_group(groups).values())
        returned = self._read(groups, view, {})
        await self._score(returned)
        await _write(view, rows, returned)
        return _result(view, {}, returned, {}, len(returned), time.monotonic() - start_s)

    async def _call(self, view: DataSourceView, *, evaluation: bool) -> Any:
        what = "the evaluation of version" if evaluation else "iteration"
        where = f"{self.path} in {what} {self.iteration}"
        try:
            async with asyncio.timeout(self.timeout_s):
                number = rollout_id(self.args, self.iteration)
                return await call_hook(
                    self.function, self.args, number, view, evaluation=evaluation
                )
        except TimeoutError as error:
            expected = f"an answer within {self.timeout_s:g} s (rollout.timeout_s)"
            raise DeadlineExceeded(
                "the rollout function does not return", where=where, expected=expected
            ) from error
        except HookError:
            raise
        except Exception as error:  # a hook may raise any exception
            raise HookError(
                "the rollout function failed", where=where, found=f"{type(error).__name__}: {error}"
            ) from error

    async def _score(self, groups: Groups) -> None:
        """Score samples that name a reward function. Raises: HookError if a function fails."""
        samples = [sample for group in groups.values() for sample in group]
        failed_before = {id(sample) for sample in samples if sample.error is not None}
        await score_with_sample_functions(samples, self.reward, self.args)
        for sample in samples:
            if sample.error is not None and id(sample) not in failed_before:
                raise HookError(
                    "the reward function of a sample failed", where=self.path, found=sample.error
                )

    def _read(
        self, groups: Sequence[Any], view: DataSourceView, before: dict[str, dict[int, Sample]]
    ) -> Groups:
        """Return the rows of groups from the function, by group id."""
        read: Groups = {}
        for number, group in enumerate(groups):
            where = f"{self.path}, group {number}"
            group_id = _group_id_of(group, where)
            problem = None
            if group_id not in view.handed_out:
                problem = "the group was not handed out"
            elif group_id in read:
                problem = "the group was returned twice"
            if problem:
                raise HookError(
                    problem,
                    where=where,
                    found=repr(group_id),
                    expected="the groups of data_source.get_samples, each once",
                )
            _, planned = view.handed_out[group_id]
            read[group_id] = self._rows(group, planned, before.get(group_id, {}))
        return read

    def _rows(
        self, group: Sequence[Any], planned: PlannedGroup, before: dict[int, Sample]
    ) -> list[Sample]:
        rows: list[Sample] = []
        num_rollouts = len(planned.seeds)
        for position, samples in enumerate(group):
            first = samples[0] if isinstance(samples, list | tuple) else samples
            rollout = first.rollout_id if first.rollout_id is not None else position
            where = f"{self.path} on {planned.group_id}/{rollout}"
            if not 0 <= rollout < num_rollouts:
                raise HookError(
                    "the group has no rollout of this number",
                    where=where,
                    found=rollout,
                    expected=f"below {num_rollouts}",
                )
            if first.status is Status.PENDING and not first.response_ids:
                first.status = Status.ABORTED
            rows += checked_rows(
                samples,
                planned,
                rollout,
                self.journal,
                self.limits,
                before=before.get(rollout),
                where=where,
            )
        missing = set(range(num_rollouts)) - {row.rollout_id for row in rows}
        if missing or len({row.index for row in rows}) < len(rows):
            raise HookError(
                "a group is not complete",
                where=f"{self.path} on {planned.group_id}",
                found=f"rollouts {[row.rollout_id for row in rows]}",
                expected=f"each of {num_rollouts} rollouts once; "
                "the samples of a rollout that fanned out as a list in its place",
            )
        return sorted(rows, key=lambda row: row.index)

    def _check(self, returned: Groups, adopted: Groups, added: Groups, batch_size: int) -> None:
        """Raises: HookError if the returned groups cannot be the batch."""
        where = f"{self.path} in iteration {self.iteration}"
        if both := sorted(set(returned) & set(added)):
            raise HookError(
                "groups both returned and added to the data source",
                where=where,
                found=both,
                expected="each group in one of the two",
            )
        unfinished = [
            key
            for key, group in returned.items()
            if any(row.status in _UNFINISHED for row in group)
        ]
        if unfinished:
            raise HookError(
                "groups of the batch are not finished",
                where=where,
                found=unfinished,
                do="give them to data_source.add_samples",
            )
        num_failed = len(_failed(returned))
        num_fit = len(returned) - num_failed + len(adopted)
        if num_fit < batch_size:
            raise HookError(
                "too few groups",
                where=where,
                found=f"{num_fit} groups, and {num_failed} that failed",
                expected=f"{batch_size} (rollout.rollout_batch_size)",
            )


async def _rows_so_far(
    parts: list[PlanPart], rows: Rows, *, partial: bool
) -> tuple[Groups, Groups]:
    """Return the groups that an earlier attempt finished, and the groups to continue."""
    adopted: Groups = {}
    earlier: Groups = {}
    for part in parts:
        finished, cut = await asyncio.to_thread(rows.adopt, part)
        adopted |= finished
        earlier |= cut if partial else {}
        for digest in dict.fromkeys(group.earlier for group in part.plan.groups if group.earlier):
            group_ids = [group.group_id for group in part.plan.groups if group.earlier == digest]
            earlier |= await asyncio.to_thread(rows.earlier, digest, group_ids)
    return adopted, earlier


def _make_log_probs_equal(groups: Sequence[Sequence[Sample]]) -> None:
    """Remove the engines' log-probs if a sample has none: a batch has them all, or is scored by the
    trainer alone. A service that renders messages again has tokens that no engine sampled.
    """
    rows = [row for group in groups for row in group]
    if any(row.rollout_log_probs is None for row in rows):
        for row in rows:
            row.rollout_log_probs = None


async def _write(view: DataSourceView, rows: Rows, groups: Groups, *, cut: bool = False) -> None:
    for part in view.parts:
        of_part = [group for key, group in groups.items() if view.handed_out[key][0] is part]
        if of_part:
            await asyncio.to_thread(rows.write, part, of_part, cut=cut)


def _result(
    view: DataSourceView,
    adopted: Groups,
    returned: Groups,
    added: Groups,
    batch_size: int,
    seconds: float,
) -> RolloutResult:
    failed = _failed(returned)
    fit = [*adopted, *(key for key in returned if key not in failed)]
    accepted = fit[:batch_size]
    dropped = dict.fromkeys(failed, "failed") | dropped_by_buffer_filter(view.parts)
    dropped |= {
        key: "not_returned" for key in view.handed_out if key not in returned and key not in added
    }
    groups = {**adopted, **returned, **added}
    buffered = [
        _buffered(part, group, groups.get(group.group_id, ()))
        for part in view.parts
        for group in part.plan.groups
        if group.group_id not in dropped and group.group_id not in accepted
    ]
    progress = RolloutProgress(
        groups=sum(len(part.plan.groups) for part in view.parts),
        wanted_groups=batch_size,
        accepted_groups=len(accepted),
        finished_groups=len(fit),
        failed_groups=len(failed),
        seconds=seconds,
    )
    for group in (*returned.values(), *added.values()):
        progress.count(group)
    return build_result(
        progress,
        view.parts,
        accepted,
        dropped,
        newer=buffered,
        adopted_groups=len(adopted),
        cut_groups=sum(not _is_finished(group) for group in added.values()),
        errors={key: row.error for key in failed for row in returned[key] if row.error},
    )


def _buffered(part: PlanPart, group: PlannedGroup, rows: Sequence[Sample]) -> BufferedGroup:
    """Return the buffer's entry of a group that is neither accepted nor dropped."""
    earlier = BufferedGroup(group_id=group.group_id, plan=part.digest, rows=group.earlier)
    if not num_response_tokens(rows):
        return earlier
    return earlier.model_copy(update={"rows": part.digest, **ages(rows)})


def _failed(groups: Groups) -> set[str]:
    return {
        key for key, group in groups.items() if any(row.status is Status.FAILED for row in group)
    }


def _is_finished(group: Sequence[Sample]) -> bool:
    return all(row.status in FINISHED for row in group)


def _groups_of(answer: Any) -> list[Any]:
    """Return the groups of an answer in any of the accepted forms."""
    if isinstance(answer, tuple) and len(answer) == 2 and not isinstance(answer[0], Sample):
        answer, _aborted = answer
    groups = getattr(answer, "samples", answer)
    if not isinstance(groups, list | tuple):
        raise HookError(
            "the rollout function returned another type",
            where="rollout function",
            found=type(groups).__name__,
            expected="a list of groups, or an object with .samples",
        )
    return list(groups)


def _group_id_of(group: Any, where: str) -> str:
    first = group[0] if isinstance(group, list | tuple) and group else group
    first = first[0] if isinstance(first, list | tuple) and first else first
    if not isinstance(first, Sample):
        raise HookError(
            "not a group", where=where, found=type(first).__name__, expected="a list of samples"
        )
    return first.group_id
