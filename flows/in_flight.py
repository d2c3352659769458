"""The iterations that are open: S + 1 of them in this process, or one more as flow runs of their
own.

    async with open_iterations(config) as iterations:
        nodes = await iterations.finish(k)      # k and the ones after it are open; k is committed now
        await iterations.reach(k + 1)           # what may sample now does, whatever else is done before k + 1 is waited for

Both open in order and are finished in order. Whatever is open when the block ends is cancelled:
what its stages have finished is in the store, and the next attempt goes on from it.

Not here: when an iteration may sample or train (`tasks.turn`), or what is done about a finished one
(`flows.train`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import wraps
from types import TracebackType
from typing import Any

from prefect import Flow

from flows.iteration import iteration
from rlpipe.config.run import RunConfig
from rlpipe.errors import RlpipeError
from rlpipe.types import NodeRef
from tasks.context import context
from tasks.turn import abandon, is_committed


class IterationFailed(RlpipeError):
    """The flow run of an iteration did not come to its commit, as often as it may be put back."""


class Iterations(ABC):
    """Iterations in flight: up to `ahead` later than the one that is to finish next."""

    def __init__(self, config: RunConfig, *, ahead: int) -> None:
        self._config = config
        self._ahead = ahead
        self._next = 0

    async def __aenter__(self) -> Iterations:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def finish(self, k: int) -> dict[str, NodeRef]:
        """Wait until iteration k is committed; its stages' handles. Raises: what its stages
        raise."""
        await self.reach(k)
        return await self.result(k)

    async def reach(self, k: int) -> None:
        """Open iteration k and those that are in flight with it, as far as they are not."""
        for number in range(max(k, self._next), min(k + self._ahead + 1, self._config.num_rollout)):
            await self.open(number)
            self._next = number + 1

    @abstractmethod
    async def open(self, k: int) -> None:
        """Begin iteration k."""

    @abstractmethod
    async def result(self, k: int) -> dict[str, NodeRef]:
        """The handles of an iteration that was opened."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel what is open."""


class InProcess(Iterations):
    """Subflows of the flow that runs here."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, ahead=config.async_buffer_size)
        self._open: dict[int, asyncio.Task[dict[str, NodeRef]]] = {}

    async def open(self, k: int) -> None:
        """Begin iteration k as a task of this event loop."""
        self._open[k] = asyncio.create_task(numbered(k)(self._config.run, k), name=f"iteration {k}")

    async def result(self, k: int) -> dict[str, NodeRef]:
        """Wait for its end. Cancelling this cancels the iteration. Raises: IterationFailed if it
        ended without its commit."""
        try:
            nodes = await self._open[k]
        finally:
            if self._open[k].done() and not self._open[k].cancelled():
                del self._open[k]
        if not await asyncio.to_thread(is_committed, await context(self._config.run), k):
            raise IterationFailed(
                "an iteration ended without its commit",
                where=f"{self._config.run}-{k}",
                expected="its commit in the store",
                do="the same command goes on from the last one committed",
            )
        return nodes

    async def close(self) -> None:
        """Cancel what is open, and have its requests aborted."""
        for task in self._open.values():
            task.cancel()
        if self._open:
            await asyncio.gather(*self._open.values(), return_exceptions=True)
            await abandon(self._config.run)


def numbered(k: int) -> Flow[[str, int], Any]:
    """The flow of an iteration, as that of iteration k alone.

    Prefect knows a subflow of a flow run that is started again by its function's name and by how
    many of that name were called before it. Under one name the first iteration of the second
    attempt would be taken for the first one of the first.
    """

    @wraps(iteration.fn)
    async def stages(run: str, k: int) -> dict[str, NodeRef]:
        return await iteration.fn(run, k)

    stages.__qualname__ = f"{stages.__qualname__}_{k}"
    own = iteration.with_options()
    own.fn = stages
    return own
