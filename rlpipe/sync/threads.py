"""Threads that run next to the event loop of a push.

`ReadAhead` reads an iterator in a thread, one item ahead. `in_thread` awaits a call that can block
for ever. All threads are daemons: a thread that hangs in a collective with a dead engine must not
keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Read an iterator in a thread, at most one item ahead of the consumer.

    Use `async with`, then `async for`. On leaving the block the iterator is read to its end,
    because the other ranks take part in every item.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._ready: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()
        self._free_slots = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._abandoned = False
        self._at_end = False

    async def __aenter__(self) -> ReadAhead[T]:
        self._loop = asyncio.get_running_loop()
        self._thread = start_thread(self._read)
        return self

    async def __aexit__(self, *_error: object) -> None:
        with self._lock:
            self._abandoned = True
        self._free_slots.release()
        self._thread.join()

    def __aiter__(self) -> ReadAhead[T]:
        return self

    async def __anext__(self) -> T:
        """Return the next item. Raises: the iterator's own errors."""
        item, error = (None, None) if self._at_end else await self._ready.get()
        self._at_end = item is None
        if error is not None:
            raise error
        if item is None:
            raise StopAsyncIteration
        self._free_slots.release()
        return item

    def _read(self) -> None:
        try:
            for item in self._items:
                self._put(item, None)
                if not self._abandoned:
                    self._free_slots.acquire()
        except BaseException as error:  # noqa: BLE001 - raised again in `__anext__`
            self._put(None, error)
        else:
            self._put(None, None)

    def _put(self, item: T | None, error: BaseException | None) -> None:
        # Under the lock: after `__aexit__` the loop may be closed.
        with self._lock:
            if not self._abandoned:
                self._loop.call_soon_threadsafe(self._ready.put_nowait, (item, error))


def in_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Call a function that may block for ever in a thread, and return an awaitable of its result.

    The awaitable can be cancelled; the thread cannot. `asyncio.to_thread` is not enough: its
    threads are joined when the process ends.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        else:
            result.set_exception(error)

    def run() -> None:
        try:
            outcome = function(), None
        except Exception as error:  # noqa: BLE001 - raised again where the result is awaited
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: the push has ended
            loop.call_soon_threadsafe(settle, *outcome)

    start_thread(run)
    return result


def start_thread(function: Callable[[], object]) -> threading.Thread:
    """Run a function in a daemon thread on the CUDA device of the calling thread."""
    # A new thread begins on device 0, whatever device its creator uses.
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
