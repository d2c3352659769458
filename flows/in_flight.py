"""Iterations in flight: S + 1 in this process (S = async_buffer_size), or S + 2 as flow runs.

    async with open_iterations(config) as iterations:
        nodes = await iterations.finish(k)      # opens k and the next ones; k is committed now
        await iterations.reach(k + 1)           # opens the next ones without waiting for k + 1

Iterations open and finish in order. Leaving the block cancels the open ones: their finished nodes
stay in the store, and the next attempt reuses them. `tasks.ordering` decides when an iteration may
sample or train.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from copy import copy
from functools import wraps
from typing import Any, cast

from prefect import Flow
from prefect.states import Cancelled

from flows.iteration import iteration
from rlpipe.config.run import RunConfig
from rlpipe.errors import RlpipeError
from rlpipe.types import NodeRef
from tasks.cancellation import CANCELLED_MESSAGE, is_being_cancelled
from tasks.context import context
from tasks.ordering import abort_requests, is_committed


class IterationFailed(RlpipeError):
    """The flow run of an iteration ended without a commit, after all retries."""


class Iterations(ABC):
    """Iterations in flight: at most `ahead` after the one that finishes next."""

    def __init__(self, config: RunConfig, *, ahead: int) -> None:
        self._config = config
        self._ahead = ahead
        self._next = 0

    async def __aenter__(self) -> Iterations:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def finish(self, k: int) -> dict[str, NodeRef]:
        """Wait until iteration k is committed; return its handles. Raises: errors of its stages."""
        await self.reach(k)
        return await self.result(k)

    async def reach(self, k: int) -> None:
        """Open iteration k and the iterations in flight with it, unless they are open."""
        for number in range(max(k, self._next), min(k + self._ahead + 1, self._config.num_rollout)):
            await self.open(number)
            self._next = number + 1

    @abstractmethod
    async def open(self, k: int) -> None:
        """Begin iteration k."""

    @abstractmethod
    async def result(self, k: int) -> dict[str, NodeRef]:
        """Wait for an opened iteration; return its handles."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel the open iterations."""


class InProcess(Iterations):
    """Iterations as subflows of the current flow run."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, ahead=config.async_buffer_size)
        self._open: dict[int, asyncio.Task[dict[str, NodeRef]]] = {}

    async def open(self, k: int) -> None:
        """Begin iteration k as a task of this event loop."""
        self._open[k] = asyncio.create_task(numbered(k)(self._config.run, k), name=f"iteration {k}")

    async def result(self, k: int) -> dict[str, NodeRef]:
        """Wait for iteration k; return its handles. Cancelling the call cancels the iteration.

        Raises: IterationFailed if the iteration ended without a commit.
        """
        try:
            nodes = await self._open[k]
        finally:
            # A cancelled iteration stays open, so that `close` awaits it and aborts its requests.
            if self._open[k].done() and not self._open[k].cancelled():
                del self._open[k]
        # Prefect may return a result of an earlier attempt: only the commit in the store counts.
        if not await asyncio.to_thread(is_committed, await context(self._config.run), k):
            raise IterationFailed(
                "an iteration ended without a commit",
                where=f"{self._config.run}-{k}",
                expected="a commit in the store",
                do="the same command continues after the last commit",
            )
        return nodes

    async def close(self) -> None:
        """Cancel the open iterations and abort their requests."""
        for task in self._open.values():
            task.cancel()
        if self._open:
            await asyncio.gather(*self._open.values(), return_exceptions=True)
            await abort_requests(self._config.run)


def numbered(k: int) -> Flow[[str, int], Any]:
    """Return the iteration flow under a name of its own for iteration k.

    Prefect matches a subflow of a restarted flow run by function name and call count. With one name
    for all, the first iteration of a second attempt would match the first iteration of the first.
    """

    @wraps(iteration.fn)
    async def stages(run: str, k: int) -> dict[str, NodeRef]:
        try:
            return await iteration.fn(run, k)
        except asyncio.CancelledError:
            # Prefect calls a flow run whose task was cancelled Crashed, also after a Cancel.
            if await is_being_cancelled():
                return cast("dict[str, NodeRef]", Cancelled(message=CANCELLED_MESSAGE))
            raise

    stages.__qualname__ = f"{stages.__qualname__}_{k}"
    # Change a copy, because every iteration uses the original. `with_options` would read the source
    # and make the schema of the parameters again. Validation would check parameters that this
    # process made itself. Together they take about 10 ms of CPU time an iteration.
    flow = copy(iteration)
    flow.fn = stages
    flow.should_validate_parameters = False
    return flow
