"""Run a rollout: sample groups, a bounded number at a time, until its batch is full; hand finished
ones on meanwhile.

    part 0 ─ sample ─ finished ─ judge ─┬─ accepted (the first rollout_batch_size)
    part 1 …            │               ├─ rejected: dropped with a reason (a fallback fills a batch that is too small)
                        │               └─ surplus:  buffered with its rows, not sampled again
                        └─ cut off when the batch is full: buffered, with or without its tokens so far

All that was generated becomes rows, whatever became of it. Not here: how a group is sampled
(`generate`, `dataset`), which groups there are (`rlpipe.data`), where rows are kept (`rows`), which
groups are accepted (`selection`, `judge`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlpipe.errors import DeadlineExceeded, EngineError, RlpipeError
from rlpipe.rollout.generate import FINISHED, Generate, failed_samples
from rlpipe.rollout.judge import Judge, Verdict
from rlpipe.rollout.planner import discarded
from rlpipe.rollout.rows import Groups, Part, Rows
from rlpipe.rollout.selection import Selection
from rlpipe.types import BufferedGroup, DataState, PlannedGroup, Sample, Status


@dataclass(frozen=True)
class RolloutSettings:
    """What a rollout is to do."""

    batch_size: int
    """Groups to accept."""
    static: bool
    """Part 0 is all there is: also if groups fail, no more are asked for."""
    in_order: bool
    """Accept in the order of the plan, so that it does not matter which group finished first.
    Nothing is cut off then."""
    partial: bool
    """A group that is cut off goes on from its tokens later; False: it starts again."""
    max_rounds: int
    """Parts at most."""
    timeout_s: float
    flush_interval_s: float
    min_completed_fraction: float = 1.0
    """The rollout fails if fewer of its groups than this did not fail."""


@dataclass(slots=True)
class RolloutProgress:
    """Where a rollout stands; the same object is shown after each group."""

    groups: int = 0
    """Planned, in all parts so far."""
    finished_groups: int = 0
    """Those adopted from an earlier attempt included."""
    accepted_groups: int = 0
    wanted_groups: int = 0
    failed_groups: int = 0
    samples: int = 0
    """Sampled in this attempt; so are the tokens and the statuses."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second so far."""
        return self.response_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a rollout came to: each group of its parts is accepted, dropped or in the buffer of
    `after`."""

    progress: RolloutProgress
    parts: tuple[Part, ...]
    accepted: tuple[str, ...]
    dropped: dict[str, str]
    """Group id → reason."""
    after: DataState
    adopted_groups: int
    cut_groups: int
    errors: dict[str, str]
    """Group id → error text, of groups that failed or could not be judged."""
    scored: Groups = field(default_factory=dict)
    """Groups with their rewards, where the judge needed them."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Accepted groups that the filter did not keep, with its reason: they fill a batch for which
    too few groups were fit."""


async def run_rollout(
    parts: Sequence[Part],
    settings: RolloutSettings,
    generate: Generate,
    rows: Rows,
    *,
    judge: Judge,
    slots: asyncio.Semaphore,
    more: Callable[[Part], Part] | None = None,
    cut_off: Callable[[], Awaitable[None]] | None = None,
    progress: Callable[[RolloutProgress], None] | None = None,
) -> RolloutResult:
    """Sample the parts of a plan, and those that `more` adds while too few groups are accepted.

    `slots` bounds how many groups are sampled at once, also of several rollouts: first come, first
    served. `cut_off` makes `generate` return what it has. Finished groups are written together at
    least every `flush_interval_s`, and once more at the end, also when this is cancelled or fails.
    A group whose generation raises an RlpipeError becomes failed rows; they are written last, and
    only if at least `min_completed_fraction` of the groups did not fail; a retry samples them
    again.

    Raises: DeadlineExceeded naming groups still running after `timeout_s`; EngineError if too many
    groups failed, or if `max_rounds` parts did not make a batch.
    """
    plan = parts[0].plan
    run = _Run(settings, generate, rows, judge, slots, progress)
    where = f"rollout of {plan.branch} iteration {plan.iteration}"
    sampling = asyncio.create_task(run.sample_all(list(parts), more, cut_off, where))
    flushing = asyncio.create_task(run.flush_now_and_then())
    flushing.add_done_callback(lambda _: sampling.cancel())
    try:
        async with asyncio.timeout(settings.timeout_s):
            await sampling
    except TimeoutError as error:
        waiting = sorted(run.running)
        raise DeadlineExceeded(
            "groups are not finished",
            where=where,
            found=f"{len(waiting)} running ({', '.join(waiting[:5])}{' …' if len(waiting) > 5 else ''})",
            expected=f"{run.selection.batch_size} accepted groups within {settings.timeout_s:g} s",
            do="raise rollout.timeout_s, or look at the engine's log",
        ) from error
    finally:
        await asyncio.shield(run.finish(flushing))
    run.refuse_failures(where)
    await run.flush_rest()
    return run.result()


class _Run:
    """The state of one attempt."""

    def __init__(
        self, settings: RolloutSettings, generate: Generate, rows: Rows, judge: Judge, slots, show
    ) -> None:
        self.settings = settings
        self.generate = generate
        self.rows = rows
        self.judge = judge
        self.slots = slots
        self.show = show
        self.selection = Selection(settings.batch_size, in_order=settings.in_order)
        self.progress = RolloutProgress(wanted_groups=settings.batch_size)
        self.parts: list[Part] = []
        self.planned: dict[str, tuple[Part, PlannedGroup]] = {}
        self.begun: Groups = {}
        """What there is of groups from an earlier rollout or attempt."""
        self.done: dict[str, list[int]] = {}
        """Weight versions in each group that is finished."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.running: set[str] = set()
        self.adopted = 0
        self.closed = False
        self.unjudged: list[list[Sample]] = []
        self.finished: list[list[Sample]] = []
        self.failed: Groups = {}
        self.cut: Groups = {}
        self.cut_before: Groups = {}
        self.scored: Groups = {}
        self.errors: dict[str, str] = {}
        self.arrived, self.over, self.judged, self.to_judge = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.start_s = time.monotonic()

    async def sample_all(self, parts: list[Part], more, cut_off, where: str) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                judging = tasks.create_task(self._judge_what_comes())
                for part in parts:
                    await self._open(part)
                while True:
                    for group_id, (_, group) in self.planned.items():
                        if group_id not in self.tasks and group_id not in self.done:
                            self.tasks[group_id] = tasks.create_task(self._sample(group))
                    await self._until_over()
                    if self.selection.full or self.settings.static or more is None:
                        break
                    self.refuse_failures(where)
                    self._refuse_endless(where)
                    await self._open(await asyncio.to_thread(more, self.parts[-1]))
                judging.cancel()
                await self._close(cut_off)
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _open(self, part: Part) -> None:
        """Take a part in, with what an earlier attempt left of it and earlier rollouts of its
        groups."""
        finished, cut = await asyncio.to_thread(self.rows.adopt, part)
        self.parts.append(part)
        self.selection.add(group.group_id for group in part.plan.groups)
        self.progress.groups += len(part.plan.groups)
        earlier: dict[str, list[str]] = {}
        for group in part.plan.groups:
            self.planned[group.group_id] = (part, group)
            if group.group_id in finished:
                self.adopted += 1
                self._take(group.group_id, finished[group.group_id])
            elif group.group_id in cut and self.settings.partial:
                self.begun[group.group_id] = self.cut_before[group.group_id] = cut[group.group_id]
            elif group.earlier:
                earlier.setdefault(group.earlier, []).append(group.group_id)
        for digest, group_ids in earlier.items():
            self.begun |= await asyncio.to_thread(self.rows.earlier, digest, group_ids)

    async def _until_over(self) -> None:
        while not self.selection.over:
            self.judged.clear()
            await self.judged.wait()

    async def _sample(self, group: PlannedGroup) -> None:
        so_far = self.begun.get(group.group_id, [])
        if so_far and all(sample.status in FINISHED for sample in so_far):
            self._finish(so_far)
            return
        async with self.slots:
            self.running.add(group.group_id)
            try:
                self._came(group, await self.generate(group, so_far), so_far)
            except RlpipeError as error:
                if not self.closed:
                    self.errors[group.group_id] = str(error)
                    self.failed[group.group_id] = failed_samples(group, error)
                    self._count(self.failed[group.group_id], ())
                    self._take(group.group_id, self.failed[group.group_id])
            self.running.discard(group.group_id)

    def _came(self, group: PlannedGroup, samples: list[Sample], so_far: Sequence[Sample]) -> None:
        if self.closed and any(sample.status not in FINISHED for sample in samples):
            self.cut[group.group_id] = samples
            self._count(samples, so_far)
        else:
            self._finish(samples, so_far)

    def _finish(self, samples: list[Sample], so_far: Sequence[Sample] | None = None) -> None:
        """`so_far` None: it was finished before this rollout."""
        if so_far is not None:
            self._count(samples, so_far)
        self.finished.append(samples)
        self.arrived.set()
        self._take(samples[0].group_id, samples)

    def _take(self, group_id: str, samples: list[Sample]) -> None:
        """A group whose rows are complete: it is judged now or soon."""
        self.done[group_id] = [
            version for sample in samples for _, version in sample.weight_versions
        ]
        self.progress.finished_groups += 1
        verdict = self.judge.at_once(samples)
        if verdict is not None:
            self._decide(verdict)
        else:
            self.unjudged.append(samples)
            self.to_judge.set()
        if self.show:
            self.show(self.progress)

    async def _judge_what_comes(self) -> None:
        while True:
            await self.to_judge.wait()
            self.to_judge.clear()
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
        self.judged.set()

    def _count(self, samples: Sequence[Sample], so_far: Sequence[Sample]) -> None:
        now = self.progress
        now.failed_groups += samples[0].status is Status.FAILED
        now.samples += len(samples)
        now.prompt_tokens += sum(len(sample.prompt_ids) for sample in samples)
        now.response_tokens += _tokens(samples) - _tokens(so_far)
        now.statuses.update(sample.status.value for sample in samples)
        now.seconds = time.monotonic() - self.start_s

    async def _close(self, cut_off: Callable[[], Awaitable[None]] | None) -> None:
        """The batch is full: end what still runs or waits."""
        self.closed = True
        for group_id, task in self.tasks.items():
            if group_id not in self.running or cut_off is None:
                task.cancel()
        if self.running and cut_off is not None:
            await cut_off()
        if self.tasks:
            await asyncio.wait(self.tasks.values())

    async def flush_now_and_then(self) -> None:
        while not self.over.is_set():
            await self.arrived.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self.settings.flush_interval_s)
            await self._flush_finished()

    async def _flush_finished(self) -> None:
        self.arrived.clear()
        groups = self.finished
        self.finished = []
        await self._write(groups, cut=False)

    async def _write(self, groups: Sequence[list[Sample]], *, cut: bool) -> None:
        for part in self.parts:
            own = [group for group in groups if self.planned[group[0].group_id][0] is part]
            if own:
                await asyncio.to_thread(self.rows.write, part, own, cut=cut)

    async def finish(self, flushing: asyncio.Task[None]) -> None:
        """Stop the periodic flush and flush what is left."""
        self.over.set()
        self.arrived.set()
        await flushing
        await self._flush_finished()

    async def flush_rest(self) -> None:
        """What failed or was cut off, once it is sure that the rollout itself did not fail."""
        await self._write(list(self.failed.values()), cut=False)
        await self._write([samples for samples in self.cut.values() if _tokens(samples)], cut=True)

    def refuse_failures(self, where: str) -> None:
        groups = self.progress.groups
        least = self.settings.min_completed_fraction
        if groups - len(self.failed) >= least * groups:
            return
        group_id = next(iter(self.failed))
        raise EngineError(
            "too many groups failed",
            where=where,
            found=f"{len(self.failed)} of {groups}; the first is {group_id}: {self.errors[group_id]}",
            expected=f"at least {least:.0%} of the groups",
            do="repair the cause and run again (finished groups are kept), or lower rollout.min_completed_fraction",
        )

    def _refuse_endless(self, where: str) -> None:
        if len(self.parts) < self.settings.max_rounds:
            return
        raise EngineError(
            "too few groups were accepted",
            where=where,
            found=f"{len(self.selection.accepted)} of {self.progress.groups} in {len(self.parts)} rounds; "
            f"rejected: {self.selection.reasons()}",
            expected=f"{self.settings.batch_size} within {self.settings.max_rounds} rounds (rollout.max_sampling_rounds)",
            do="look at the rejected rows, choose another filter or prompts, or raise rollout.max_sampling_rounds",
        )

    def result(self) -> RolloutResult:
        accepted = self.selection.accepted
        dropped = dict(self.selection.rejected)
        dropped |= {
            group_id: "buffer_filter" for part in self.parts for group_id in discarded(part.plan)
        }
        used = {*accepted, *dropped}
        left = [
            self._buffered(group_id) for group_id in self.selection.planned if group_id not in used
        ]
        waited = {one.group_id for one in self.parts[0].plan.before.buffer}
        last = self.parts[-1].plan.after
        again, new = (
            [one for one in left if (one.group_id in waited) is old] for old in (True, False)
        )
        after = last.model_copy(update={"buffer": (*again, *last.buffer, *new)})
        counts = (self.adopted, len(self.cut), self.errors, self.scored, self.selection.fallbacks)
        return RolloutResult(self.progress, tuple(self.parts), accepted, dropped, after, *counts)

    def _buffered(self, group_id: str) -> BufferedGroup:
        """What the buffer says of a group that is neither accepted nor dropped."""
        part, group = self.planned[group_id]
        waiting = BufferedGroup(group_id=group_id, plan=part.digest)
        if group_id in self.done:
            versions = self.done[group_id]
            ages = {"oldest": min(versions, default=None), "finished": max(versions, default=None)}
            return waiting.model_copy(update={"rows": part.digest, **ages})
        cut = self.cut.get(group_id) or self.cut_before.get(group_id) or []
        if _tokens(cut):
            return waiting.model_copy(
                update={"rows": part.digest, **_ages(cut)} if self.settings.partial else {}
            )
        begun = self.begun.get(group_id)
        return (
            waiting.model_copy(update={"rows": group.earlier, **_ages(begun)}) if begun else waiting
        )


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.response_ids) for sample in samples)


def _ages(samples: Sequence[Sample]) -> dict[str, int | None]:
    """Oldest weight version of the tokens of a group, and newest if the group is finished."""
    versions = [version for sample in samples for _, version in sample.weight_versions]
    finished = all(sample.status in FINISHED for sample in samples)
    return {
        "oldest": min(versions, default=None),
        "finished": max(versions, default=None) if finished else None,
    }
