"""Stop a run on SIGTERM: finish current work if it is short, begin no new work.

    with Stopping(grace_s=30) as stopping:
        await stopping.run(iteration(run, k))

Prefect installs its own SIGTERM handler when a flow run begins in the main thread. That handler
raises at an arbitrary line and takes the event loop down. `handle_sigterm`, a hook of our flows,
restores ours when the flow run is Running. SIGTERM in the few ten milliseconds before that still
ends the process at once.

After a Cancel, Prefect's worker sends SIGTERM, waits 30 s, sends SIGKILL, and marks the run
Cancelled itself. Ctrl-C abandons work at once. Finished nodes survive both.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar, cast

from prefect.exceptions import CancelledRun
from prefect.states import Cancelled

from rlpipe.errors import RlpipeError
from tasks.cancellation import is_being_cancelled

Result = TypeVar("Result")
RESUME_HINT = "the same command continues after the last commit"


class Preempted(RlpipeError):
    """The process received SIGTERM. Commits are safe; the same command continues after them."""


class Stopping:
    """Context that handles SIGTERM (preemption, or Cancel in Prefect's UI).

    A nested context is the outer one: a warm start stops with its run.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._requested = asyncio.Event()
        self._outer: Stopping | None = None
        self._previous_handler: Any = None

    def __enter__(self) -> Stopping:
        self._outer = _CURRENT.get()
        if self._outer is not None:
            return self._outer
        # A context variable: subflows in the same task see the outer context.
        _CURRENT.set(self)
        self._loop = asyncio.get_running_loop()
        self._previous_handler = signal.getsignal(signal.SIGTERM)
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            _CURRENT.set(None)
            if _in_main_thread():
                signal.signal(signal.SIGTERM, self._previous_handler)

    def install(self) -> None:
        """Install the SIGTERM handler. Python allows that only in the main thread."""
        if _in_main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`. After SIGTERM, `work` has `grace_s` seconds; 0 on a
        Cancel.

        Raises: Preempted if SIGTERM came before, or if `work` did not finish in time.
        """
        running = asyncio.ensure_future(work)
        requested = asyncio.ensure_future(self._requested.wait())
        try:
            if self._requested.is_set():
                raise Preempted(
                    "stopped by SIGTERM", found="no new iteration was begun", do=RESUME_HINT
                )
            await asyncio.wait({running, requested}, return_when=asyncio.FIRST_COMPLETED)
            grace_s = self._grace_s
            if not running.done():
                # A Cancel discards the work, so waiting for it is useless.
                grace_s = 0.0 if await is_being_cancelled() else grace_s
                await asyncio.wait({running}, timeout=grace_s)
            if not running.done():
                raise Preempted(
                    "stopped by SIGTERM",
                    found=f"an iteration was abandoned after {grace_s:g} s",
                    do=RESUME_HINT,
                )
            return running.result()
        finally:
            for task in (running, requested):
                task.cancel()
            await asyncio.gather(running, requested, return_exceptions=True)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # A signal handler runs between two bytecodes: it must not touch asyncio objects directly.
        self._loop.call_soon_threadsafe(self._requested.set)


async def result_or_cancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, or the state `Cancelled` if a Cancel ended it.

    Raises: errors of `work`.
    """
    try:
        return await work
    except (Preempted, CancelledRun) as error:
        if await is_being_cancelled():
            return cast("Result", Cancelled(message=str(error)))
        raise


def handle_sigterm(flow: Any, flow_run: Any, state: Any) -> None:
    """Hook of a flow that starts running: install the handler of the active `Stopping` again."""
    if (current := _CURRENT.get()) is not None:
        current.install()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_CURRENT: ContextVar[Stopping | None] = ContextVar("stopping", default=None)
