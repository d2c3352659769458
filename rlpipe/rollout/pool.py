"""Groups that are sampled across rollouts (`rollout.selection: first_finished`).

    rollout k      begins groups, at most `size` at once, and takes the first that finish
    between        the other groups continue; those that finish are written
    rollout k + 1  takes them from here by their ids, and begins further groups

The pool is a cache. The store has the ids, prompts and seeds of its groups (plans), the finished
ones (shards), and which groups are open (the buffer of the data state). After the loss of a pool,
the next rollout adopts the finished groups and samples the others again.

Only a rollout begins groups: the engines then hold weights that its iteration may train on.

Entry point: `Pool`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from rlpipe.errors import StoreError
from rlpipe.rollout.generate import FINISHED, Generate
from rlpipe.rollout.rollout_result import RolloutResult
from rlpipe.rollout.rollout_rows import PlanPart, Rows
from rlpipe.types import DataState, PlannedGroup, Sample

_LOG = logging.getLogger(__name__)


class Pool:
    """The groups in flight of one run. All methods are called on one event loop."""

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)
        self._sampling: dict[str, asyncio.Task[list[Sample]]] = {}
        self._begun_with: dict[int, set[asyncio.Task[list[Sample]]]] = {}
        """Groups by the `id` of their generate function."""
        self._hosts: set[asyncio.Task[None]] = set()
        self._left: DataState | None = None
        self._writing: asyncio.Task[None] | None = None
        """Writes the groups that finish while no rollout runs."""

    def leave(
        self, result: RolloutResult, rows: Rows, interval_s: float, *, is_last: bool = False
    ) -> None:
        """Continue with the open groups of a rollout's result, and forget all others.

        Groups that finish before `stop_writing` are written every `interval_s`, and stay in the
        pool. is_last: forget the open groups too, because no rollout follows.
        """
        part_of = {group.group_id: part for part in result.parts for group in part.plan.groups}
        still_open = {one.group_id for one in result.after.buffer if one.finished is None}
        continued = set() if is_last else still_open & part_of.keys()
        self.retain(continued)
        self._left = result.after if still_open <= continued else None
        self._writing = asyncio.create_task(self._write_finished(part_of, rows, interval_s))
        # The next rollout writes the same groups, and raises the error of a wrong row.
        self._writing.add_done_callback(_see_error)

    async def stop_writing(self) -> None:
        """Write no further groups: the next rollout does. A write that has begun ends first."""
        if self._writing is not None:
            # A second cancellation would not wait for the write.
            if not self._writing.cancelling():
                self._writing.cancel()
            await asyncio.wait({self._writing})

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

    async def _write_finished(
        self, part_of: Mapping[str, PlanPart], rows: Rows, interval_s: float
    ) -> None:
        """Write the groups of the pool as they finish, until cancelled.

        `part_of`: group id → part whose plan has the group.
        """
        unwritten = {task: part_of[group_id] for group_id, task in self._sampling.items()}
        while unwritten:
            await asyncio.wait(unwritten, return_when=asyncio.FIRST_COMPLETED)
            # Groups that finish within one interval share a shard.
            await asyncio.sleep(interval_s)
            ended = [task for task in unwritten if task.done()]
            for part in {unwritten[task].digest: unwritten[task] for task in ended}.values():
                of_part = [task for task in ended if unwritten[task].digest == part.digest]
                finished = [samples for task in of_part if (samples := _finished(task))]
                if finished and not await _write(rows, part, finished):
                    continue  # tried again after the interval
                for task in of_part:
                    del unwritten[task]

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
            if not host.done():
                host.add_done_callback(_report_error)

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
        await self.stop_writing()
        self._left = None
        self.retain(())
        if self._hosts:
            await asyncio.wait(self._hosts)

    def _end(self, task: asyncio.Task[list[Sample]]) -> None:
        self._slots.release()
        _see_error(task)  # `result` raises it


def _finished(task: asyncio.Task[list[Sample]]) -> list[Sample] | None:
    """Return the samples of a group that is complete, else None."""
    if task.cancelled() or task.exception() is not None:
        return None
    samples = task.result()
    return samples if all(sample.status in FINISHED for sample in samples) else None


async def _write(rows: Rows, part: PlanPart, groups: Sequence[list[Sample]]) -> bool:
    """Write groups; return False if the store failed.

    If this call is cancelled, the write ends before the call does.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(rows.write, part, groups))
    writing.add_done_callback(_see_error)
    try:
        await asyncio.shield(writing)
    except StoreError:
        return False
    finally:
        await asyncio.wait({writing})
    return True


def _report_error(host: asyncio.Task[None]) -> None:
    """Log an error that comes after the end of a lease: the groups have their samples."""
    if not host.cancelled() and (error := host.exception()):
        _LOG.error("servers of a rollout did not stop", exc_info=error)


def _see_error(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as seen, for tasks with errors that appear elsewhere."""
    if not task.cancelled():
        task.exception()
