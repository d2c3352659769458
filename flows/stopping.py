"""SIGTERM (a preempted machine, Cancel in Prefect's pages): finish what runs if that is soon, then
stop.

    with Stopping(grace_s=30) as stopping:
        await stopping.unless_asked(iteration(run, k))

Prefect installs a SIGTERM handler of its own whenever a flow run begins in the main thread: it
raises wherever the process just is, and takes the event loop down. `hear_sigterm`, a hook of our
flows, puts ours back as soon as the flow run is Running; in the few ten milliseconds before that,
SIGTERM still ends the process at once. Prefect's worker then finds nobody to tell of a Cancel
before its SIGTERM, so it waits for the process to end (30 s, then SIGKILL) and marks the run
Cancelled itself.

Not here: Ctrl-C, which abandons at once; nothing that is finished is lost by either.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Cancelled

from flows.output import UNDER_A_WORKER
from rlpipe.errors import RlpipeError

Result = TypeVar("Result")
LOOK_TIMEOUT_S = 5.0


class Preempted(RlpipeError):
    """The process was asked to end. What is committed is safe; the same command goes on from
    there."""


class Stopping:
    """Hears SIGTERM while it is entered. Inside another one it is that one: a run's warm start
    stops with the run."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = asyncio.Event()
        self._outer: Stopping | None = None
        self._before: Any = None

    def __enter__(self) -> Stopping:
        self._outer = _CURRENT.get()
        if self._outer is not None:
            return self._outer
        _CURRENT.set(self)
        self._loop = asyncio.get_running_loop()
        self._before = signal.getsignal(signal.SIGTERM)
        self.hear()
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            _CURRENT.set(None)
            if _in_main_thread():
                signal.signal(signal.SIGTERM, self._before)

    def hear(self) -> None:
        """Be the one who is told of SIGTERM, whoever was before. Only the main thread can be."""
        if _in_main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    async def unless_asked(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`. Once asked, nothing new begins, and it has `grace_s` seconds left;
        none on a Cancel.

        Raises: Preempted if asked before, or if the work did not finish in that time.
        """
        running = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            if self._asked.is_set():
                raise Preempted("asked to stop by SIGTERM", found="nothing new was begun", do=GO_ON)
            await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
            grace_s = self._grace_s
            if not running.done():
                grace_s = 0.0 if await being_cancelled() else grace_s
                await asyncio.wait({running}, timeout=grace_s)
            if not running.done():
                raise Preempted(
                    "asked to stop by SIGTERM",
                    found=f"an iteration abandoned after {grace_s:g} s",
                    do=GO_ON,
                )
            return running.result()
        finally:
            for task in (running, asked):
                task.cancel()
            await asyncio.gather(running, asked, return_exceptions=True)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._asked.set)


async def or_cancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """What a flow answers: the result of `work`, or its state `Cancelled` if that ended because
    somebody cancelled it.

    Raises: what `work` raises.
    """
    try:
        return await work
    except (Preempted, CancelledRun) as error:
        if await being_cancelled():
            return cast("Result", Cancelled(message=str(error)))
        raise


async def being_cancelled() -> bool:
    """Has somebody cancelled the flow run that runs here, or the one that a worker started this
    process for, of which this one is a part (a fork's training, a warm start)? A server that does
    not say so at once counts as no."""
    found = {this_flow_run.get_id(), os.environ.get(UNDER_A_WORKER)} - {None}
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S), get_client() as client:
            states = [(await client.read_flow_run(UUID(run))).state for run in found]
    except (TimeoutError, httpx.HTTPError):
        return False
    return any(
        state is not None and (state.is_cancelling() or state.is_cancelled()) for state in states
    )


def hear_sigterm(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a flow that has begun to run: SIGTERM is for `Stopping` again."""
    if (current := _CURRENT.get()) is not None:
        current.hear()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


GO_ON = "the same command goes on from what is committed"
_CURRENT: ContextVar[Stopping | None] = ContextVar("stopping", default=None)
