"""Sample groups until a rollout has its batch, and write finished groups meanwhile.

    part 0 ─ sample ─ finished ─ judge ─┬─ accepted: the first rollout_batch_size groups
    part 1 …            │               ├─ rejected: dropped with a reason, or used as a fallback
                        │               └─ surplus:  buffered with its rows, not sampled again
                        └─ cut off when the batch is full: buffered, with or without its tokens

With `rollout.selection: first_finished` the groups are those of a `Pool`: none is cut off, and the
groups that are neither accepted nor dropped continue during the next rollout.

Every generated token becomes part of a row, also of groups that are dropped or cut off. Entry
point: `run_rollout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from rlpipe.errors import DeadlineExceeded, EngineError, RlpipeError, one_line
from rlpipe.rollout.generate import FINISHED, Generate, GroupFailed, failed_samples
from rlpipe.rollout.group_selection import GroupJudge, Selection, Verdict
from rlpipe.rollout.pool import Pool
from rlpipe.rollout.rollout_result import (
    RolloutProgress,
    RolloutResult,
    ages,
    build_result,
    dropped_by_buffer_filter,
)
from rlpipe.rollout.rollout_rows import Groups, PlanPart, Rows, num_response_tokens
from rlpipe.rollout.rollout_settings import RolloutSettings
from rlpipe.types import BufferedGroup, PlannedGroup, Sample, Status

NextPart = Callable[[PlanPart], PlanPart]
CutOff = Callable[[], Awaitable[None]]


async def run_rollout(
    parts: Sequence[PlanPart],
    settings: RolloutSettings,
    generate: Generate,
    rows: Rows,
    *,
    judge: GroupJudge,
    slots: asyncio.Semaphore,
    pool: Pool | None = None,
    next_part: NextPart | None = None,
    cut_off: CutOff | None = None,
    progress: Callable[[RolloutProgress], None] | None = None,
) -> RolloutResult:
    """Sample the parts of a plan, and further parts while too few groups are accepted.

    slots: bounds the number of groups that are sampled at once, also over several rollouts, first
        come, first served.
    pool: samples the groups in place of `slots`, and continues with open groups after the rollout.
        Parts are then planned before the pool runs out of groups to begin.
    next_part: plans the part after a part. None: no further parts.
    cut_off: makes `generate` return the partial samples.
    progress: called once the groups of a part are known, and after each group.

    Finished groups are written at least every `flush_interval_s`, and at the end, also if the
    rollout is cancelled or fails. A group for which `generate` raises an RlpipeError becomes failed
    rows. Failed rows are written last, and only if at least `min_completed_fraction` of the groups
    did not fail; a retry samples these groups again.

    Raises: DeadlineExceeded with the groups that still run after `timeout_s`; EngineError if too
    many groups failed, or if `max_rounds` parts did not make a batch.
    """
    plan = parts[0].plan
    where = f"rollout of {plan.branch} iteration {plan.iteration}"
    attempt = _Attempt(settings, generate, rows, judge, slots, pool, progress, where)
    sampling = asyncio.create_task(attempt.sample_all(list(parts), next_part, cut_off))
    flushing = asyncio.create_task(attempt.flush_periodically())
    # A flush that fails ends the rollout: its groups could not be stored either.
    flushing.add_done_callback(lambda _: sampling.cancel())
    try:
        async with asyncio.timeout(settings.timeout_s):
            await sampling
    except TimeoutError as error:
        running = sorted(attempt.running)
        names = ", ".join(running[:5]) + (" …" if len(running) > 5 else "")
        raise DeadlineExceeded(
            "groups are not finished",
            where=where,
            found=f"{len(running)} running ({names})",
            expected=f"{settings.batch_size} accepted groups within {settings.timeout_s:g} s",
            do="raise rollout.timeout_s, or look at the engine's log",
        ) from error
    finally:
        # Shielded: finished groups are written also while this rollout is cancelled.
        await asyncio.shield(attempt.finish_flushing(flushing))
    attempt.refuse_failures()
    await attempt.flush_failed_and_cut()
    return attempt.result()


class _Attempt:
    """State of one attempt at a rollout."""

    def __init__(
        self,
        settings: RolloutSettings,
        generate: Generate,
        rows: Rows,
        judge: GroupJudge,
        slots: asyncio.Semaphore,
        pool: Pool | None,
        on_progress: Callable[[RolloutProgress], None] | None,
        where: str,
    ) -> None:
        self.settings = settings
        self.generate = generate
        self.rows = rows
        self.judge = judge
        self.slots = slots
        self.pool = pool
        self.on_progress = on_progress
        self.where = where
        self.selection = Selection(
            settings.batch_size,
            in_order=settings.in_order,
            round_size=settings.groups_per_round,
        )
        self.progress = RolloutProgress(wanted_groups=settings.batch_size)
        self.parts: list[PlanPart] = []
        self.planned: dict[str, tuple[PlanPart, PlannedGroup]] = {}
        self.earlier: Groups = {}
        """Samples of unfinished groups from an earlier rollout or attempt."""
        self.done: dict[str, dict[str, int | None]] = {}
        """Ages of the groups with complete rows."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.running: set[str] = set()
        self.waiting: set[str] = set()
        """Groups that wait for room in the pool."""
        self.num_adopted = 0
        self.closed = False
        """True once the batch is full: later results change neither batch nor errors."""
        self.unjudged: list[list[Sample]] = []
        self.unflushed: list[list[Sample]] = []
        self.failed: Groups = {}
        self.cut: Groups = {}
        self.cut_by_earlier_attempt: Groups = {}
        self.scored: Groups = {}
        self.errors: dict[str, str] = {}
        self.has_unflushed = asyncio.Event()
        self.has_unjudged = asyncio.Event()
        self.has_changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.start_s = time.monotonic()

    async def sample_all(
        self, parts: list[PlanPart], next_part: NextPart | None, cut_off: CutOff | None
    ) -> None:
        """Sample and judge groups until the batch is full."""
        try:
            async with asyncio.TaskGroup() as tasks:
                judging = tasks.create_task(self._judge_finished_groups())
                for part in parts:
                    await self._open(part)
                while True:
                    self._start_groups(tasks)
                    await self._until_decided()
                    if self.selection.full or self.settings.static or next_part is None:
                        break
                    # With a pool the batch may be undecided. Without engines each group fails at
                    # once, so that the rollout would plan all its parts.
                    self.refuse_failures()
                    if self.selection.decided:
                        self._refuse_more_rounds()
                    await self._open(await asyncio.to_thread(next_part, self.parts[-1]))
                judging.cancel()
                await self._close(cut_off)
        except BaseExceptionGroup as several:
            # The first error caused the others, which are cancellations.
            raise several.exceptions[0] from several

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        for group_id, (_, group) in self.planned.items():
            if group_id not in self.tasks and group_id not in self.done:
                if self.pool is not None:
                    self.waiting.add(group_id)
                self.tasks[group_id] = tasks.create_task(self._sample(group))

    async def _open(self, part: PlanPart) -> None:
        """Add a part, with the rows of an earlier attempt and of earlier rollouts."""
        finished, cut = await asyncio.to_thread(self.rows.adopt, part)
        self.parts.append(part)
        self.selection.add(group.group_id for group in part.plan.groups)
        self.progress.groups += len(part.plan.groups)
        ids_of_plan: dict[str, list[str]] = {}
        for group in part.plan.groups:
            group_id = group.group_id
            self.planned[group_id] = (part, group)
            if group_id in finished:
                self.num_adopted += 1
                self._add_complete(group_id, finished[group_id])
            elif group_id in cut and self.settings.partial:
                self.earlier[group_id] = cut[group_id]
                self.cut_by_earlier_attempt[group_id] = cut[group_id]
            elif group.earlier:
                ids_of_plan.setdefault(group.earlier, []).append(group_id)
        for digest, group_ids in ids_of_plan.items():
            self.earlier |= await asyncio.to_thread(self.rows.earlier, digest, group_ids)
        # Looking for lost groups reads every shard of the rollout before.
        if self.pool is not None and not self.pool.is_complete(part.plan.before):
            late = await self._finished_late(part, self.pool.group_ids | set(finished))
            self.num_adopted += len(late)
            self.earlier |= late
        self._report()

    async def _finished_late(self, part: PlanPart, known: set[str]) -> Groups:
        """Return groups of the buffer that finished after the rollout before, and were lost with
        the pool. `known`: groups that are not looked for."""
        ids_of_plan: dict[str, list[str]] = {}
        wanted = {group.group_id for group in part.plan.groups} - known
        for waiting in part.plan.before.buffer:
            if waiting.finished is None and waiting.group_id in wanted:
                ids_of_plan.setdefault(waiting.plan, []).append(waiting.group_id)
        late: Groups = {}
        for digest, group_ids in ids_of_plan.items():
            late |= await asyncio.to_thread(self.rows.finished, digest, group_ids)
        return late

    async def _until_decided(self) -> None:
        """Wait until the batch is decided, or the pool has no further group to begin."""
        while not self.selection.decided and not self._needs_groups():
            self.has_changed.clear()
            await self.has_changed.wait()

    def _needs_groups(self) -> bool:
        has_rounds = len(self.parts) < self.settings.max_rounds
        return self.pool is not None and not self.waiting and has_rounds

    async def _sample(self, group: PlannedGroup) -> None:
        group_id = group.group_id
        so_far = self.earlier.get(group_id, [])
        if so_far and all(sample.status in FINISHED for sample in so_far):
            # An earlier rollout finished the group: its tokens are not counted again.
            self._add_finished(so_far)
            self.waiting.discard(group_id)
            return
        if self.pool is not None:
            await self.pool.begin(group, so_far, self.generate)
            self._begin(group_id)
            await self._finish(group, so_far, self.pool.result(group_id))
            return
        async with self.slots:
            self._begin(group_id)
            await self._finish(group, so_far, self.generate(group, so_far))

    def _begin(self, group_id: str) -> None:
        self.running.add(group_id)
        self.waiting.discard(group_id)
        self.has_changed.set()

    async def _finish(
        self, group: PlannedGroup, so_far: Sequence[Sample], sampling: Awaitable[list[Sample]]
    ) -> None:
        """Wait for the samples of a group and record them."""
        group_id = group.group_id
        try:
            samples = await _not_cancelled_inside(sampling)
            if self.closed and any(sample.status not in FINISHED for sample in samples):
                self.cut[group_id] = samples
                self._count(samples, so_far)
            else:
                self._count(samples, so_far)
                self._add_finished(samples)
        except RlpipeError as error:
            # Once the batch is full, the cut-off may cause failures: such groups wait.
            if not self.closed:
                self.errors[group_id] = one_line(
                    str(error.found if isinstance(error, GroupFailed) else error)
                )
                samples = failed_samples(group, error)
                self.failed[group_id] = samples
                self._count(samples, ())
                self._add_complete(group_id, samples)
        self.running.discard(group_id)

    def _add_finished(self, samples: list[Sample]) -> None:
        self.unflushed.append(samples)
        self.has_unflushed.set()
        self._add_complete(samples[0].group_id, samples)

    def _add_complete(self, group_id: str, samples: list[Sample]) -> None:
        """Record a group with complete rows, and judge the group now or soon."""
        self.done[group_id] = ages(samples)
        self.progress.finished_groups += 1
        verdict = self._stale(group_id) or self.judge.at_once(samples)
        if verdict is not None:
            self._decide(verdict)
        else:
            self.unjudged.append(samples)
            self.has_unjudged.set()
        self._report()

    def _stale(self, group_id: str) -> Verdict | None:
        """Return the verdict about a complete group that has too old tokens, else None."""
        allowed = self.settings.oldest_version
        oldest = self.done[group_id]["oldest"]
        newest = self.done[group_id]["finished"]
        # A group without `finished` failed.
        if allowed is None or oldest is None or newest is None or oldest >= allowed:
            return None
        if self.settings.mask_stale and newest >= allowed:
            return None
        return Verdict(group_id, "stale")

    def _report(self) -> None:
        if self.on_progress:
            self.on_progress(self.progress)

    async def _judge_finished_groups(self) -> None:
        while True:
            await self.has_unjudged.wait()
            self.has_unjudged.clear()
            groups = self.unjudged
            self.unjudged = []
            for verdict in await self.judge.verdicts(groups):
                self._decide(verdict)

    def _decide(self, verdict: Verdict) -> None:
        if self.closed:
            return
        self.selection.decide(verdict.group_id, verdict.reason, fallback=verdict.fallback)
        if verdict.samples:
            self.scored[verdict.group_id] = list(verdict.samples)
        if verdict.error is not None:
            self.errors.setdefault(verdict.group_id, verdict.error)
        self.progress.accepted_groups = len(self.selection.accepted)
        self.has_changed.set()

    def _count(self, samples: Sequence[Sample], so_far: Sequence[Sample]) -> None:
        self.progress.count(samples, so_far)
        self.progress.failed_groups += samples[0].status is Status.FAILED
        self.progress.seconds = time.monotonic() - self.start_s

    async def _close(self, cut_off: CutOff | None) -> None:
        """End the groups that run or wait for a slot."""
        self.closed = True
        for group_id, task in self.tasks.items():
            # Groups that wait for a slot have no tokens; without `cut_off` none can be returned.
            if group_id not in self.running or cut_off is None:
                task.cancel()
        if self.running and cut_off is not None:
            await cut_off()
        if self.tasks:
            await asyncio.wait(self.tasks.values())

    async def flush_periodically(self) -> None:
        """Write finished groups every `flush_interval_s` until the rollout ends."""
        while not self.ended.is_set():
            await self.has_unflushed.wait()
            # Groups that finish within one interval share a shard.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), self.settings.flush_interval_s)
            await self._flush_finished()

    async def finish_flushing(self, flushing: asyncio.Task[None]) -> None:
        """Stop the periodic flush and write the remaining finished groups."""
        self.ended.set()
        self.has_unflushed.set()
        await flushing
        await self._flush_finished()

    async def flush_failed_and_cut(self) -> None:
        """Write the failed and cut-off groups. Called once the rollout itself has not failed."""
        await self._write(list(self.failed.values()), cut=False)
        cut = [samples for samples in self.cut.values() if num_response_tokens(samples)]
        await self._write(cut, cut=True)

    async def _flush_finished(self) -> None:
        self.has_unflushed.clear()
        groups = self.unflushed
        self.unflushed = []
        await self._write(groups, cut=False)

    async def _write(self, groups: Sequence[list[Sample]], *, cut: bool) -> None:
        for part in self.parts:
            of_part = [group for group in groups if self.planned[group[0].group_id][0] is part]
            if of_part:
                await asyncio.to_thread(self.rows.write, part, of_part, cut=cut)

    def refuse_failures(self) -> None:
        """Raises: EngineError if too many groups failed."""
        num_groups = self.progress.groups
        fraction = self.settings.min_completed_fraction
        if num_groups - len(self.failed) >= fraction * num_groups:
            return
        first = next(iter(self.failed))
        raise EngineError(
            "too many groups failed",
            where=self.where,
            found=f"{len(self.failed)} of {num_groups}; the first is {first}:\n"
            f"    {self.errors[first]}",
            expected=f"at least {fraction:.0%} of the groups",
            do="repair the cause and run again (finished groups are kept), "
            "or lower rollout.min_completed_fraction",
        )

    def _refuse_more_rounds(self) -> None:
        max_rounds = self.settings.max_rounds
        if len(self.parts) < max_rounds:
            return
        raise EngineError(
            "too few groups were accepted",
            where=self.where,
            found=f"{len(self.selection.accepted)} of {self.progress.groups} in "
            f"{len(self.parts)} rounds; rejected: {self.selection.reasons()}",
            expected=f"{self.settings.batch_size} within {max_rounds} rounds "
            "(rollout.max_sampling_rounds)",
            do="look at the rejected rows, choose another filter or prompts, "
            "or raise rollout.max_sampling_rounds",
        )

    def result(self) -> RolloutResult:
        """Return the result once all rows are written."""
        accepted = self.selection.accepted
        dropped = self.selection.rejected | dropped_by_buffer_filter(self.parts)
        used = {*accepted, *dropped}
        unused = [
            self._buffered(group_id) for group_id in self.selection.planned if group_id not in used
        ]
        # Groups that came from the buffer return to its front, so that the oldest stay first.
        from_buffer = {waiting.group_id for waiting in self.parts[0].plan.before.buffer}
        return build_result(
            self.progress,
            self.parts,
            accepted,
            dropped,
            older=[group for group in unused if group.group_id in from_buffer],
            newer=[group for group in unused if group.group_id not in from_buffer],
            adopted_groups=self.num_adopted,
            cut_groups=len(self.cut),
            errors=self.errors,
            scored=self.scored,
            fallbacks=self.selection.fallbacks,
        )

    def _buffered(self, group_id: str) -> BufferedGroup:
        """Return the buffer's entry of a group that is neither accepted nor dropped."""
        part, group = self.planned[group_id]
        without_rows = BufferedGroup(group_id=group_id, plan=part.digest)
        if group_id in self.done:
            return without_rows.model_copy(update={"rows": part.digest, **self.done[group_id]})
        cut = self.cut.get(group_id) or self.cut_by_earlier_attempt.get(group_id) or []
        if num_response_tokens(cut):
            if not self.settings.partial:
                return without_rows
            return without_rows.model_copy(update={"rows": part.digest, **ages(cut)})
        earlier = self.earlier.get(group_id)
        if earlier:
            return without_rows.model_copy(update={"rows": group.earlier, **ages(earlier)})
        return without_rows


async def _not_cancelled_inside(sampling: Awaitable[list[Sample]]) -> list[Sample]:
    """Return the samples of a group. Raises: EngineError if they are cancelled, but not this task.

    A task group ignores a cancelled task: the rollout would wait for the group until its deadline.
    """
    try:
        return await sampling
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EngineError(
            "the generate function was cancelled",
            do="look in a user function for a task that is cancelled and awaited",
        ) from error
