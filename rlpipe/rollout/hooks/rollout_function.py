"""A whole rollout by a function of the user: `rollout.rollout_function_path` (slime's
`--rollout-function-path`).

    generate_rollout(args, rollout_id, data_source, evaluation=False) -> groups, plain or async

`data_source.get_samples(n)` gives the next n groups of the plan, as lists of samples with the
prompt's tokens; its `add_samples(groups)` hands back what is not for this batch. The answer is a
list of groups (where a rollout fanned out, a list in its place), an object with `.samples` (and
`.metrics`), or slime's pair of either and what was aborted. In an evaluation it may also be `{name:
{"samples": …}}`, or an object with such a `.data`.

Every group the function got is then accounted for: the first `rollout_batch_size` it returned make
the batch, in their order; others that it returned or added wait in the buffer with what was sampled
of them; what it kept is dropped as `not_returned`. The plan's groups that it did not ask for wait
as they are. Rows are written once the function is done, so one that is killed is called again with
the same groups; those whose rows were written are taken over, and not handed out a second time.

Not here: functions that sample one rollout (`custom`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.data import RewardConfig
from rlpipe.config.hooks import ROLLOUT_NAMES, check_call, load_hook
from rlpipe.errors import DeadlineExceeded, HookError
from rlpipe.rollout.generate import FINISHED, planned_sample
from rlpipe.rollout.hooks.checked import Limits, as_rows
from rlpipe.rollout.hooks.generate_function import called, rollout_of, session_id
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.rollout.hooks.own_rewards import score_by_own_functions
from rlpipe.rollout.planner import discarded
from rlpipe.rollout.rows import Groups, Part, Rows
from rlpipe.rollout.sampler import RolloutProgress, RolloutResult
from rlpipe.types import BufferedGroup, PlannedGroup, Sample, Status

EXPECTED = "generate_rollout(args, rollout_id, data_source, evaluation=False)"


def load_rollout_function(
    path: str, key: str = "rollout.rollout_function_path"
) -> Callable[..., Any]:
    """The function. Raises: ConfigError showing the signature it should have."""
    function = load_hook(path, ROLLOUT_NAMES)
    check_call(function, None, 0, None, path=path, key=key, expected=EXPECTED, evaluation=False)
    return function


class DataSourceView:
    """What the function gets as `data_source`: the plan, part after part. Used from one thread at a
    time."""

    def __init__(
        self,
        parts: list[Part],
        more: Callable[[Part], Part] | None,
        finished: Groups,
        begun: Groups,
    ) -> None:
        """`finished` are not handed out; `begun` go on from what was sampled of them."""
        self.parts = parts
        self._more = more
        self._finished = finished
        self._begun = begun
        self.given: dict[str, tuple[Part, PlannedGroup]] = {}
        self.added: list[Any] = []
        self._lock = threading.Lock()
        self._waiting = [
            (part, group)
            for part in parts
            for group in part.plan.groups
            if group.group_id not in finished
        ]

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next groups. Raises: HookError if there are no more of them."""
        with self._lock:
            while len(self._waiting) < num_samples:
                if self._more is None:
                    found = f"{num_samples} groups asked for"
                    expected = f"at most {len(self._waiting)} more"
                    raise HookError(
                        "the data source has no more groups",
                        where="get_samples",
                        found=found,
                        expected=expected,
                    )
                part = self._more(self.parts[-1])
                self.parts.append(part)
                self._waiting += [(part, group) for group in part.plan.groups]
            now = self._waiting[:num_samples]
            self._waiting = self._waiting[num_samples:]
            self.given |= {group.group_id: (part, group) for part, group in now}
            return [self._samples(group) for _, group in now]

    def add_samples(self, samples: Sequence[Any]) -> None:
        """Groups that wait for a later rollout."""
        with self._lock:
            self.added += list(samples)

    def __len__(self) -> int:
        return len(self._waiting)

    def _samples(self, group: PlannedGroup) -> list[Sample]:
        begun = self._begun.get(group.group_id) or [
            planned_sample(group, index) for index in range(len(group.seeds))
        ]
        for sample in begun:
            sample.rollout_id, sample.session_id = (
                rollout_of(sample),
                session_id(group, rollout_of(sample)),
            )
        return begun


class FunctionRollout:
    """One attempt at a rollout by a function."""

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
    ) -> None:
        """`iteration`, of an evaluation the weight version, is its `rollout_id`. `reward`:
        deadlines of samples' own rewards."""
        self.function = function
        self.path = path
        self.args = args
        self.journal = journal
        self.limits = limits
        self.iteration = iteration
        self.timeout_s = timeout_s
        self.reward = reward

    async def train(
        self,
        parts: list[Part],
        rows: Rows,
        *,
        batch_size: int,
        partial: bool,
        more: Callable[[Part], Part],
    ) -> RolloutResult:
        """Call it for an iteration, write the rows. Raises: HookError, DeadlineExceeded, and what
        the store says."""
        start_s = time.monotonic()
        iteration = self.iteration
        adopted: Groups = {}
        begun: Groups = {}
        for part in parts:
            finished, cut = await asyncio.to_thread(rows.adopt, part)
            adopted |= finished
            begun |= cut if partial else {}
            for digest in dict.fromkeys(
                group.earlier for group in part.plan.groups if group.earlier
            ):
                wanted = [group.group_id for group in part.plan.groups if group.earlier == digest]
                begun |= await asyncio.to_thread(rows.earlier, digest, wanted)
        view = DataSourceView(parts, more, adopted, begun)
        before = {
            group_id: {row.index: row for row in groups} for group_id, groups in begun.items()
        }
        returned: Groups = {}
        aside: Groups = {}
        if len(adopted) < batch_size:
            answer = await self._called(iteration, view, evaluation=False)
            returned = self._read(_groups_of(answer), view, before)
            aside = self._read(view.added, view, before)
            await self._score(returned)
        self._check(returned, adopted, aside, batch_size, iteration)
        await self._write(
            view,
            rows,
            {**returned, **{key: group for key, group in aside.items() if _finished(group)}},
        )
        await self._write(
            view,
            rows,
            {key: g for key, g in aside.items() if not _finished(g) and _tokens(g)},
            cut=True,
        )
        return self._result(view, adopted, returned, aside, batch_size, time.monotonic() - start_s)

    async def evaluate(self, part: Part, name: str, rows: Rows) -> RolloutResult:
        """Call it for a held-out set, write the rows. Raises: HookError, DeadlineExceeded."""
        version = self.iteration
        start_s = time.monotonic()
        view = DataSourceView([part], None, {}, {})
        answer = await self._called(version, view, evaluation=True)
        data = getattr(answer, "data", answer)
        if isinstance(data, dict):
            if name not in data:
                raise HookError(
                    "nothing of this held-out set",
                    where=self.path,
                    found=sorted(data),
                    expected=name,
                )
            answer = data[name]["samples"]
        groups = _groups_of(answer)
        if groups and all(isinstance(sample, Sample) for sample in groups):
            groups = _by_group(groups)
        returned = self._read(groups, view, {})
        await self._score(returned)
        await self._write(view, rows, returned)
        return self._result(view, {}, returned, {}, len(returned), time.monotonic() - start_s)

    async def _called(self, iteration: int, view: DataSourceView, *, evaluation: bool) -> Any:
        where = f"{self.path} in {'the evaluation of version' if evaluation else 'iteration'} {iteration}"
        try:
            async with asyncio.timeout(self.timeout_s):
                return await called(
                    self.function, self.args, iteration, view, evaluation=evaluation
                )
        except TimeoutError as error:
            expected = f"an answer within {self.timeout_s:g} s (rollout.timeout_s)"
            raise DeadlineExceeded(
                "the rollout function does not come back", where=where, expected=expected
            ) from error
        except HookError:
            raise
        except Exception as error:  # a hook may raise anything
            raise HookError(
                "the rollout function failed", where=where, found=f"{type(error).__name__}: {error}"
            ) from error

    async def _score(self, groups: Groups) -> None:
        """Raises: HookError for a sample that its own reward function could not score."""
        samples = [sample for group in groups.values() for sample in group]
        failed_before = {id(sample) for sample in samples if sample.error is not None}
        await score_by_own_functions(samples, self.reward, self.args)
        failed = next(
            (
                sample
                for sample in samples
                if sample.error is not None and id(sample) not in failed_before
            ),
            None,
        )
        if failed is not None:
            raise HookError(
                "a sample's own reward function failed", where=self.path, found=failed.error
            )

    def _read(
        self, groups: Sequence[Any], view: DataSourceView, before: dict[str, dict[int, Sample]]
    ) -> Groups:
        """Rows of groups that the function gave back, by id."""
        found: Groups = {}
        for number, group in enumerate(groups):
            group_id = _id_of(group, f"{self.path}, group {number}")
            if group_id not in view.given or group_id in found:
                problem = (
                    "a group that was not handed out"
                    if group_id not in view.given
                    else "a group that is there twice"
                )
                expected = "the groups of data_source.get_samples, each once"
                raise HookError(
                    problem,
                    where=f"{self.path}, group {number}",
                    found=repr(group_id),
                    expected=expected,
                )
            planned = view.given[group_id][1]
            found[group_id] = self._rows(group, planned, before.get(group_id, {}))
        return found

    def _rows(
        self, group: Sequence[Any], planned: PlannedGroup, before: dict[int, Sample]
    ) -> list[Sample]:
        rows: list[Sample] = []
        for place, one in enumerate(group):
            first = one[0] if isinstance(one, list | tuple) else one
            rollout = first.rollout_id if first.rollout_id is not None else place
            where = f"{self.path} on {planned.group_id}/{rollout}"
            if not 0 <= rollout < len(planned.seeds):
                raise HookError(
                    "no such rollout in the group",
                    where=where,
                    found=rollout,
                    expected=f"below {len(planned.seeds)}",
                )
            if first.status is Status.PENDING and not first.response_ids:
                first.status = Status.ABORTED
            rows += as_rows(
                one,
                planned,
                rollout,
                self.journal,
                self.limits,
                before=before.get(rollout),
                where=where,
            )
        missing = set(range(len(planned.seeds))) - {row.rollout_id for row in rows}
        if missing or len({row.index for row in rows}) < len(rows):
            found = f"rollouts {[row.rollout_id for row in rows]}"
            expected = (
                f"one for each of {len(planned.seeds)}; what fanned out as a list in its place"
            )
            raise HookError(
                "a group is not complete",
                where=f"{self.path} on {planned.group_id}",
                found=found,
                expected=expected,
            )
        return sorted(rows, key=lambda row: row.index)

    def _check(
        self, returned: Groups, adopted: Groups, aside: Groups, batch_size: int, iteration: int
    ) -> None:
        where = f"{self.path} in iteration {iteration}"
        if both := sorted(set(returned) & set(aside)):
            raise HookError(
                "groups both returned and added to the data source",
                where=where,
                found=both,
                expected="one of them",
            )
        unfinished = [
            key for key, group in returned.items() if any(row.status in UNFINISHED for row in group)
        ]
        if unfinished:
            do = "give them to data_source.add_samples"
            raise HookError(
                "groups of the batch are not finished", where=where, found=unfinished, do=do
            )
        good = [
            key
            for key, group in returned.items()
            if all(row.status is not Status.FAILED for row in group)
        ]
        if len(good) + len(adopted) < batch_size:
            found = (
                f"{len(good) + len(adopted)} groups, and {len(returned) - len(good)} that failed"
            )
            raise HookError(
                "too few groups",
                where=where,
                found=found,
                expected=f"{batch_size} (rollout.rollout_batch_size)",
            )

    async def _write(
        self, view: DataSourceView, rows: Rows, groups: Groups, *, cut: bool = False
    ) -> None:
        for part in view.parts:
            own = [group for key, group in groups.items() if view.given[key][0] is part]
            if own:
                await asyncio.to_thread(rows.write, part, own, cut=cut)

    def _result(
        self,
        view: DataSourceView,
        adopted: Groups,
        returned: Groups,
        aside: Groups,
        batch_size: int,
        seconds: float,
    ) -> RolloutResult:
        failed = {
            key
            for key, rows in returned.items()
            if any(row.status is Status.FAILED for row in rows)
        }
        fit = [*adopted, *(key for key in returned if key not in failed)]
        accepted = fit[:batch_size]
        dropped = dict.fromkeys(failed, "failed") | {
            key: "buffer_filter" for part in view.parts for key in discarded(part.plan)
        }
        dropped |= {
            key: "not_returned" for key in view.given if key not in returned and key not in aside
        }
        there = {**adopted, **returned, **aside}
        buffer = [
            _buffered(part, group, there.get(group.group_id))
            for part in view.parts
            for group in part.plan.groups
            if group.group_id not in dropped and group.group_id not in accepted
        ]
        last = view.parts[-1].plan.after
        after = last.model_copy(update={"buffer": (*last.buffer, *buffer)})
        progress = RolloutProgress(
            wanted_groups=batch_size, accepted_groups=len(accepted), finished_groups=len(fit)
        )
        progress.groups = sum(len(part.plan.groups) for part in view.parts)
        progress.failed_groups = len(failed)
        progress.seconds = seconds
        for rows in (*returned.values(), *aside.values()):
            progress.samples += len(rows)
            progress.prompt_tokens += sum(len(row.prompt_ids) for row in rows)
            progress.response_tokens += _tokens(rows)
            progress.statuses.update(row.status.value for row in rows)
        errors = {key: row.error for key in failed for row in returned[key] if row.error}
        cut = sum(not _finished(rows) for rows in aside.values())
        return RolloutResult(
            progress, tuple(view.parts), tuple(accepted), dropped, after, len(adopted), cut, errors
        )


UNFINISHED = (Status.ABORTED, Status.PENDING)


def _groups_of(answer: Any) -> list[Any]:
    """The groups in any of the forms a rollout function may answer."""
    if isinstance(answer, tuple) and len(answer) == 2 and not isinstance(answer[0], Sample):
        answer = answer[0]
    groups = getattr(answer, "samples", answer)
    if not isinstance(groups, list | tuple):
        found = type(groups).__name__
        expected = "a list of groups, or an object with .samples"
        raise HookError(
            "it gave back something else", where="rollout function", found=found, expected=expected
        )
    return list(groups)


def _by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def _id_of(group: Any, where: str) -> str:
    first = group[0] if isinstance(group, list | tuple) and group else group
    first = first[0] if isinstance(first, list | tuple) and first else first
    if not isinstance(first, Sample):
        raise HookError(
            "not a group", where=where, found=type(first).__name__, expected="a list of samples"
        )
    return first.group_id


def _finished(rows: Sequence[Sample]) -> bool:
    return all(row.status in FINISHED for row in rows)


def _tokens(rows: Sequence[Sample]) -> int:
    return sum(len(row.response_ids) for row in rows)


def _buffered(part: Part, group: PlannedGroup, rows: Sequence[Sample] | None) -> BufferedGroup:
    """What the buffer says of a group that is neither accepted nor dropped."""
    waiting = BufferedGroup(group_id=group.group_id, plan=part.digest, rows=group.earlier)
    if not rows or not _tokens(rows):
        return waiting
    versions = [version for row in rows for _, version in row.weight_versions]
    newest = max(versions, default=None) if _finished(rows) else None
    return waiting.model_copy(
        update={"rows": part.digest, "oldest": min(versions, default=None), "finished": newest}
    )
