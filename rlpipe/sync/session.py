"""What one push says to its engines, whatever moves the bytes.

    pause → flush → begin → load → end → echo the stamp → continue

Every step is taken by all engines at once. One that fails a step is out: it stays paused, on
weights that nobody knows, and the report says why. One that took them all samples with the new
weights.

Not here: how weights get into the engines (`load`: the transports), or what becomes of an engine
that is out (the fleet).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from rlpipe.engines.sglang.admin import Engine, PauseMode
from rlpipe.errors import DeadlineExceeded, EngineError, SyncError
from rlpipe.sync.transports.base import PushReport

Step = Callable[[Engine], Awaitable[None]]
CALLS_PER_PUSH = 4
"""One call to an engine may take so large a part of the push's time."""


class Session:
    """One push: the engines still in it, and why the others are not."""

    def __init__(self, engines: list[Engine], stamp: str) -> None:
        self.active = engines
        self.stamp = stamp
        self.unknown: dict[str, str] = {}
        self.current: list[str] = []
        self.tensors = self.size_bytes = self.buckets = 0
        self.doing = self._kind = "start"
        self.steps: dict[str, float] = {}
        """Seconds by what was done; all buckets are one."""
        self.paused_s = 0.0
        self._updating: set[str] = set()
        self._held_at_s = self._since_s = time.monotonic()

    def turn_to(self, doing: str, *, kind: str | None = None) -> None:
        """What the push does from here on. `kind`: under what it is counted in `steps`, if there
        are several of it."""
        now_s = time.monotonic()
        self.steps[self._kind] = self.steps.get(self._kind, 0.0) + now_s - self._since_s
        self.doing = doing
        self._kind = kind or doing
        self._since_s = now_s

    async def each(self, doing: str, step: Step, *, kind: str | None = None) -> None:
        """Take one step on every engine at once; one that fails is out. Raises: SyncError when none
        is left."""
        self.turn_to(doing, kind=kind)
        errors = await asyncio.gather(*(_error_of(step(engine)) for engine in self.active))
        for engine, error in zip(self.active, errors, strict=True):
            if error is not None:
                self.unknown[engine.url] = f"{doing}: {error}"
        self.active = [engine for engine in self.active if engine.url not in self.unknown]
        if not self.active:
            raise SyncError("no engine is left", where=f"push of {self.stamp}", found=self.unknown)

    async def all(self, doing: str, step: Step) -> None:
        """Take one step of a check on every engine at once. Raises: SyncError if any of them does
        not pass it."""
        self.turn_to(doing)
        errors = await asyncio.gather(*(_error_of(step(engine)) for engine in self.active))
        if found := {
            engine.url: str(error)
            for engine, error in zip(self.active, errors, strict=True)
            if error is not None
        }:
            raise SyncError(
                "an engine does not hold the weights that were sent (sync.check_weight_update_equal)",
                where=f"push of {self.stamp}: {doing}",
                found=found,
                do="an engine without /weights_checker (HTTP 404) cannot say: leave the check out",
            )

    async def hold(self, pause: PauseMode) -> None:
        """Pause and flush: from here on nothing is sampled, and no cache is left of the old
        weights.

        `pause`: what becomes of requests in flight. `retract` keeps them in the engine and computes
        their cache anew under the new weights; never `in_place`, with which old caches would be
        used on (see `Engine.pause`).
        """
        assert pause != "in_place"
        self._held_at_s = time.monotonic()
        await self.each("pause", lambda engine: engine.pause(pause))
        await self.each("flush the cache", Engine.flush)

    async def begin(self) -> None:
        """Open an update in each engine that has such a thing."""
        await self.each("begin", self._begin)

    async def end(self) -> None:
        """Close the update, where there is one: the engine makes what it derives from its
        weights."""
        await self.each("end", self._end)

    async def overwrite(self) -> None:
        """After a load: each engine remembers what it holds, and fills it with random numbers."""
        await self.all("remember the weights", lambda engine: engine.check_weights("snapshot"))
        await self.each(
            "overwrite the weights", lambda engine: engine.check_weights("reset_tensors")
        )

    async def compare(self) -> None:
        """After a load over random numbers. Raises: SyncError if an engine then holds anything else
        than it remembers."""
        await self.all("compare the weights", lambda engine: engine.check_weights("compare"))

    async def resume(self, *, goes_on: bool = True) -> None:
        """Echo and continue: engines that name the new weights sample with them.

        `goes_on` False leaves them paused: who gave up their cache has them continue when it is
        back.
        """
        await self.each("echo", self._echo)
        if goes_on:
            await self.each("continue", Engine.continue_)
        self.current = [engine.url for engine in self.active]
        self.paused_s = time.monotonic() - self._held_at_s

    def count(self, tensors: int, size_bytes: int) -> None:
        """Another bucket was sent."""
        self.tensors = self.tensors + tensors
        self.size_bytes = self.size_bytes + size_bytes
        self.buckets = self.buckets + 1

    async def _begin(self, engine: Engine) -> None:
        if await engine.begin_weight_update():
            self._updating.add(engine.url)

    async def _end(self, engine: Engine) -> None:
        if engine.url in self._updating:
            await engine.end_weight_update()

    async def _echo(self, engine: Engine) -> None:
        found = await engine.weight_version()
        if found != self.stamp:
            raise SyncError(
                "it names other weights", where=engine.url, found=found, expected=self.stamp
            )


async def push_session(
    urls: Sequence[str], stamp: str, work: Callable[[Session], Awaitable[None]], *, timeout_s: float
) -> PushReport:
    """Do the work of a push (`hold` … `resume`) with these engines, within a deadline.

    Raises: SyncError if the weights arrived nowhere; what else `work` raises.
    """
    start_s = time.monotonic()
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(url, deadline_s=timeout_s / CALLS_PER_PUSH))
            for url in urls
        ]
        session = Session(engines, stamp)
        try:
            async with asyncio.timeout(timeout_s):
                await work(session)
        except (TimeoutError, SyncError) as error:
            why = (
                str(error)
                if isinstance(error, SyncError)
                else f"not finished within {timeout_s:g} s ({session.doing})"
            )
            out = [url for url in urls if url not in session.current and url not in session.unknown]
            session.unknown.update(dict.fromkeys(out, why))
    session.turn_to("over")
    if not session.current:
        raise SyncError(
            "the weights arrived nowhere", where=f"push of {stamp}", found=session.unknown
        )
    sent = session.tensors, session.size_bytes, session.buckets
    seconds = time.monotonic() - start_s
    return PushReport(
        stamp,
        tuple(session.current),
        session.unknown,
        *sent,
        seconds,
        session.paused_s,
        session.steps,
    )


async def _error_of(step: Awaitable[None]) -> Exception | None:
    try:
        await step
    except (EngineError, DeadlineExceeded, SyncError) as error:
        return error
    return None
