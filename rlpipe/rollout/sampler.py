"""Run a plan's groups, a bounded number at a time, and hand finished ones on while the rest still runs.

Not here: how a group is sampled (`generate`, `dataset`), where finished groups are kept (the caller's function), rewards, or
any choice of groups: every group of the plan is sampled once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rlpipe.errors import DeadlineExceeded, EngineError, RlpipeError
from rlpipe.rollout.generate import Generate, failed_samples
from rlpipe.types import Plan, PlannedGroup, Sample, Status

Flush = Callable[[list[list[Sample]]], None]
"""Takes finished groups and returns once they are safe. Runs on a thread; calls never overlap."""


@dataclass(slots=True)
class RolloutProgress:
    """Where a rollout stands; the same object is shown after each group."""

    groups: int
    finished_groups: int = 0
    """Those adopted from an earlier attempt included."""
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
    """What one attempt did: `RolloutProgress` at its end, and the errors of groups that failed."""

    progress: RolloutProgress
    adopted_groups: int
    errors: dict[str, str]
    """Group id → error text."""


async def run_rollout(
    plan: Plan,
    adopted: Collection[str],
    generate: Generate,
    flush: Flush,
    *,
    concurrency: int,
    timeout_s: float,
    flush_interval_s: float,
    min_completed_fraction: float = 1.0,
    progress: Callable[[RolloutProgress], None] | None = None,
) -> RolloutResult:
    """Sample every group of the plan that is not in `adopted` (group ids finished by an earlier attempt).

    Finished groups are flushed together at least every `flush_interval_s`, and once more at the end, also when this is
    cancelled or fails. A group whose generation raises an RlpipeError becomes failed rows; they are flushed last, and only if
    at least `min_completed_fraction` of the plan's groups did not fail. Otherwise the rollout fails; a retry samples them again.

    Raises: DeadlineExceeded naming groups still running after `timeout_s`; EngineError if too many groups failed.
    """
    run = _Run(plan, adopted, generate, flush, flush_interval_s, progress)
    where = f"rollout of {plan.branch} iteration {plan.iteration}"
    sampling = asyncio.create_task(run.sample_all(concurrency))
    flushing = asyncio.create_task(run.flush_now_and_then())
    flushing.add_done_callback(lambda _: sampling.cancel())
    try:
        async with asyncio.timeout(timeout_s):
            await sampling
    except TimeoutError as error:
        waiting = sorted(run.running)
        raise DeadlineExceeded(
            "groups are not finished",
            where=where,
            found=f"{len(waiting)} running ({', '.join(waiting[:5])}{' …' if len(waiting) > 5 else ''})",
            expected=f"all {len(plan.groups)} groups within {timeout_s:g} s",
            do="raise rollout.timeout_s, or look at the engine's log",
        ) from error
    finally:
        await asyncio.shield(run.finish(flushing))
    run.judge(where, min_completed_fraction)
    await run.flush_failed()
    return RolloutResult(run.progress, len(plan.groups) - len(run.todo), run.errors)


class _Run:
    """The state of one attempt."""

    def __init__(self, plan: Plan, adopted: Collection[str], generate: Generate, flush: Flush, interval_s: float, show) -> None:
        done = set(adopted)
        self.todo = [group for group in plan.groups if group.group_id not in done]
        self.generate, self.flush, self.interval_s, self.show = generate, flush, interval_s, show
        self.progress = RolloutProgress(groups=len(plan.groups), finished_groups=len(plan.groups) - len(self.todo))
        self.running: set[str] = set()
        self.finished: list[list[Sample]] = []
        self.failed: list[list[Sample]] = []
        self.errors: dict[str, str] = {}
        self.arrived, self.over = asyncio.Event(), asyncio.Event()
        self.start_s = time.monotonic()

    async def sample_all(self, concurrency: int) -> None:
        slots = asyncio.Semaphore(concurrency)
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in self.todo:
                    tasks.create_task(self._sample(group, slots))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _sample(self, group: PlannedGroup, slots: asyncio.Semaphore) -> None:
        async with slots:
            self.running.add(group.group_id)
            try:
                samples = await self.generate(group)
            except RlpipeError as error:
                self.errors[group.group_id] = str(error)
                self.failed.append(failed_samples(group, error))
                self._count(self.failed[-1])
            else:
                self.finished.append(samples)
                self._count(samples)
                self.arrived.set()
            self.running.discard(group.group_id)

    def _count(self, samples: list[Sample]) -> None:
        now = self.progress
        now.finished_groups += 1
        now.failed_groups += samples[0].status is Status.FAILED
        now.samples += len(samples)
        now.prompt_tokens += sum(len(sample.prompt_ids) for sample in samples)
        now.response_tokens += sum(len(sample.response_ids) for sample in samples)
        now.statuses.update(sample.status.value for sample in samples)
        now.seconds = time.monotonic() - self.start_s
        if self.show:
            self.show(now)

    async def flush_now_and_then(self) -> None:
        while not self.over.is_set():
            await self.arrived.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self.interval_s)
            await self._flush_finished()

    async def _flush_finished(self) -> None:
        self.arrived.clear()
        groups, self.finished = self.finished, []
        if groups:
            await asyncio.to_thread(self.flush, groups)

    async def finish(self, flushing: asyncio.Task[None]) -> None:
        """Stop the periodic flush and flush what is left."""
        self.over.set()
        self.arrived.set()
        await flushing
        await self._flush_finished()

    def judge(self, where: str, min_completed_fraction: float) -> None:
        groups = self.progress.groups
        if groups - len(self.failed) >= min_completed_fraction * groups:
            return
        group_id, text = next(iter(self.errors.items()))
        raise EngineError(
            "too many groups failed",
            where=where,
            found=f"{len(self.failed)} of {groups}; the first is {group_id}: {text}",
            expected=f"at least {min_completed_fraction:.0%} of the groups",
            do="repair the cause and run again (finished groups are kept), or lower rollout.min_completed_fraction",
        )

    async def flush_failed(self) -> None:
        self.finished = self.failed
        await self._flush_finished()
