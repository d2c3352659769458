"""Work beside the event loop of a push: reading tensors ahead, and calls that can stand still.

Threads are daemons: one that hangs in a collective with a dead engine must not keep its process
from ending. A new thread knows nothing of the CUDA device of the one that made it, so it is told.

Not here: what is read or called (`bucketed`, `distributed`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Ahead(Generic[T]):
    """An iterator that runs in a thread of its own, at most one item ahead of its reader. `async
    with`, then `async for`.

    However the block is left, the iterator is run to its end: the other ranks take part in it, item
    by item.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._ready: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()
        self._room, self._handing = threading.Semaphore(0), threading.Lock()
        self._abandoned = self._at_end = False

    async def __aenter__(self) -> Ahead[T]:
        self._loop = asyncio.get_running_loop()
        self._thread = start(self._run)
        return self

    async def __aexit__(self, *_error: object) -> None:
        with self._handing:
            self._abandoned = True
        self._room.release()
        self._thread.join()

    def __aiter__(self) -> Ahead[T]:
        return self

    async def __anext__(self) -> T:
        """Raises: what the iterator raised."""
        item, error = (None, None) if self._at_end else await self._ready.get()
        self._at_end = item is None
        if error is not None:
            raise error
        if item is None:
            raise StopAsyncIteration
        self._room.release()
        return item

    def _run(self) -> None:
        try:
            for item in self._items:
                self._hand_over(item, None)
                if not self._abandoned:
                    self._room.acquire()
        except BaseException as error:  # noqa: BLE001 - it is the reader's, whatever it is
            self._hand_over(None, error)
        else:
            self._hand_over(None, None)

    def _hand_over(self, item: T | None, error: BaseException | None) -> None:
        with self._handing:
            if not self._abandoned:
                self._loop.call_soon_threadsafe(self._ready.put_nowait, (item, error))


def aside(function: Callable[[], T]) -> Awaitable[T]:
    """Call a function that blocks, and may block for ever, in a thread. What awaits it can give up;
    the thread cannot."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.cancelled():
            return
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type]
        else:
            answer.set_exception(error)

    def run() -> None:
        try:
            outcome = function(), None
        except Exception as error:  # noqa: BLE001 - it is the caller's, whatever it is
            outcome = None, error
        with suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    start(run)
    return answer


def start(function: Callable[[], object]) -> threading.Thread:
    """Run a function in a daemon thread on the CUDA device of this one."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
