"""Groups that are sampled across rollouts (`rollout.selection: first_finished`).

    rollout k      begins groups, at most `size` at once, and takes the first that finish
    between        the other groups continue; `keep` writes those that finish
    rollout k + 1  takes them from here by their ids, and begins further groups

The pool is a cache. The store has the ids, prompts and seeds of its groups (plans), the finished
ones (shards), and which groups are open (the buffer of the data state). After the loss of a pool,
the next rollout adopts the finished groups and samples the others again.

Only a rollout begins groups: the engines then hold weights that its iteration may train on.

Entry point: `Pool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rlpipe.rollout.generate import FINISHED, Generate
from rlpipe.rollout.rollout_rows import PlanPart, Rows
from rlpipe.types import DataState, PlannedGroup, Sample


class Pool:
    """The groups in flight of one run. All methods are called on one event loop."""

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)
        self._sampling: dict[str, asyncio.Task[list[Sample]]] = {}
        self._begun_with: dict[int, set[asyncio.Task[list[Sample]]]] = {}
        """Groups by the `id` of their generate function."""
        self._hosts: set[asyncio.Task[None]] = set()
        self._left: DataState | None = None

    def leave(self, after: DataState, group_ids: Collection[str]) -> None:
        """Continue with these groups after a rollout, and forget all others.

        after: data state of the rollout's result.
        """
        self.retain(group_ids)
        still_open = {group.group_id for group in after.buffer if group.finished is None}
        self._left = after if still_open <= set(group_ids) else None

    def is_complete(self, before: DataState) -> bool:
        """True if every group that has finished since this state is in the pool."""
        return self._left == before

    @property
    def group_ids(self) -> set[str]:
        """Groups that are sampled, or finished and not taken yet."""
        return set(self._sampling)

    async def begin(
        self, group: PlannedGroup, so_far: Sequence[Sample], generate: Generate
    ) -> None:
        """Begin to sample a group once there is room. Return at once if the group has begun."""
        if group.group_id in self._sampling:
            return
        await self._slots.acquire()
        task = asyncio.ensure_future(generate(group, so_far))
        task.add_done_callback(self._end)
        self._sampling[group.group_id] = task
        self._begun_with.setdefault(id(generate), set()).add(task)

    async def result(self, group_id: str) -> list[Sample]:
        """Return the samples of a group that has begun. A cancelled call does not end the group.

        Raises: the error of its generate function. The next `begin` then samples the group again.
        """
        task = self._sampling[group_id]
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            self._sampling.pop(group_id, None)
        return task.result()

    def retain(self, group_ids: Collection[str]) -> None:
        """Forget all other groups, and end those that are still sampled."""
        for group_id in self.group_ids - set(group_ids):
            self._sampling.pop(group_id).cancel()

    async def keep(self, parts: Mapping[str, PlanPart], rows: Rows, interval_s: float) -> None:
        """Write groups that finish while no rollout runs, every `interval_s`, until cancelled.

        `parts`: group id → part whose plan has the group. A group stays in the pool. A write that
        has begun ends before the call does.
        """
        waiting = {task: group_id for group_id, task in self._sampling.items() if group_id in parts}
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # Groups that finish within one interval share a shard.
            await asyncio.sleep(interval_s)
            ended = [task for task in waiting if task.done()]
            finished = {
                waiting.pop(task): samples for task in ended if (samples := _finished(task))
            }
            writing = asyncio.ensure_future(_write(finished, parts, rows))
            try:
                await asyncio.shield(writing)
            finally:
                await asyncio.wait({writing})
            for task in ended:
                waiting.pop(task, None)

    @asynccontextmanager
    async def lease(self, opened: AbstractAsyncContextManager[Generate]) -> AsyncIterator[Generate]:
        """Yield the function of `open_generate_function`.

        Its servers run until the block has ended, and all groups that began with the function.
        """
        ready: asyncio.Future[Generate] = asyncio.get_running_loop().create_future()
        ended = asyncio.Event()
        host = asyncio.create_task(self._host(opened, ready, ended))
        self._hosts.add(host)
        host.add_done_callback(self._hosts.discard)
        try:
            await asyncio.wait({host, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                host.result()  # raises
            yield await ready
        finally:
            ended.set()

    async def _host(
        self,
        opened: AbstractAsyncContextManager[Generate],
        ready: asyncio.Future[Generate],
        ended: asyncio.Event,
    ) -> None:
        # One task enters and leaves: servers may bind themselves to the task.
        async with opened as generate:
            ready.set_result(generate)
            await ended.wait()
            if begun := self._begun_with.pop(id(generate), None):
                await asyncio.wait(begun)

    async def close(self) -> None:
        """End all groups and their servers."""
        self._left = None
        self.retain(())
        if self._hosts:
            await asyncio.wait(self._hosts)

    def _end(self, task: asyncio.Task[list[Sample]]) -> None:
        self._slots.release()
        if not task.cancelled():
            task.exception()  # marks the error as seen; `result` raises it


def _finished(task: asyncio.Task[list[Sample]]) -> list[Sample] | None:
    """Return the samples of a group that is complete, else None."""
    if task.cancelled() or task.exception() is not None:
        return None
    samples = task.result()
    return samples if all(sample.status in FINISHED for sample in samples) else None


async def _write(
    finished: Mapping[str, list[Sample]], parts: Mapping[str, PlanPart], rows: Rows
) -> None:
    by_part: dict[str, list[list[Sample]]] = {}
    for group_id, samples in finished.items():
        by_part.setdefault(parts[group_id].digest, []).append(samples)
    for digest, groups in by_part.items():
        part = next(part for part in parts.values() if part.digest == digest)
        await asyncio.to_thread(rows.write, part, groups)
