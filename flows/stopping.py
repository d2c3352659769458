"""SIGTERM (a preempted machine, a cancelled flow run): finish what runs if that is soon, checkpoint, stop.

    with Stopping(grace_s=30) as stopping:
        await stopping.unless_asked(iteration(run, k))

Known gap: Prefect installs a SIGTERM handler of its own whenever a flow run begins, so inside `iteration` that one is asked and
the process ends at once. This one is heard only between iterations, until it is joined with Prefect's.

Not here: Ctrl-C, which abandons at once; nothing that is finished is lost by either.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from rlpipe.errors import RlpipeError

Result = TypeVar("Result")


class Preempted(RlpipeError):
    """The process was asked to end. What is committed is safe; the same command goes on from there."""


class Stopping:
    """Hears SIGTERM while it is entered. Inside another one it is that one: a run's warm start stops with the run."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = asyncio.Event()
        self._outer: Stopping | None = None

    def __enter__(self) -> Stopping:
        self._outer = _CURRENT.get()
        if self._outer is not None:
            return self._outer
        _CURRENT.set(self)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._asked.set)
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            _CURRENT.set(None)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    async def unless_asked(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`. Once asked, it has `grace_s` seconds left, and nothing new begins.

        Raises: Preempted if asked before, or if the work did not finish in that time.
        """
        running = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            if self._asked.is_set():
                raise Preempted("asked to stop by SIGTERM", found="nothing new was begun", do=GO_ON)
            await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.wait({running}, timeout=self._grace_s)
            if not running.done():
                raise Preempted("asked to stop by SIGTERM", found=f"an iteration abandoned after {self._grace_s:g} s", do=GO_ON)
            return running.result()
        finally:
            for task in (running, asked):
                task.cancel()
            await asyncio.gather(running, asked, return_exceptions=True)


GO_ON = "the same command goes on from what is committed"
_CURRENT: ContextVar[Stopping | None] = ContextVar("stopping", default=None)
