"""One push from the engines' side, for any transport.

    pause → flush → begin → load → end → check the stamp → resume

An engine that the run started gets one request for the steps before the load, and one for those
after it (`engines.sglang.push_routes`). `run_session` opens a `Session` and runs the push in it.
Every step runs on all engines at once. An engine that fails a step leaves the session paused, with
unknown weights, and `PushReport.unknown` gives the reason. The fleet then replaces it. Other
engines sample with the new weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rlpipe.engines.sglang.admin import Engine, PauseMode
from rlpipe.errors import DeadlineExceeded, EngineError, SyncError

Call = Callable[[Engine], Awaitable[None]]
CALLS_PER_PUSH = 4
"""One call to an engine may take this fraction (1 / 4) of the push's deadline."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of a push. On trainer ranks other than 0 only `stamp` and `size_bytes` are set."""

    stamp: str
    engines: tuple[str, ...] = ()
    """URLs of the engines that hold all new weights."""
    unknown: dict[str, str] = field(default_factory=dict)
    """URL → reason, of the engines that stay paused with unknown weights.

    The fleet keeps them off the router and replaces them; it pushes again to engines of users."""
    tensors: int = 0
    size_bytes: int = 0
    buckets: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    """Part of `seconds` in which engines sampled nothing."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds by kind of step. `tensors` is the wait for the next gathered and packed bucket,
    `bucket` the load in the engines."""


class Session:
    """The engines of one push, and its counters."""

    def __init__(self, engines: list[Engine], stamp: str) -> None:
        self.active = engines
        self.stamp = stamp
        self.unknown: dict[str, str] = {}
        self.current: list[str] = []
        """URLs of the engines that passed every step."""
        self.tensors = 0
        self.size_bytes = 0
        self.buckets = 0
        self.step = "start"
        self.steps: dict[str, float] = {}
        """Seconds by kind of step. All buckets are one kind."""
        self.paused_s = 0.0
        self._kind = self.step
        self._updating: set[str] = set()
        self._step_start_s = time.monotonic()
        self._pause_start_s = self._step_start_s

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the active engines, in order."""
        return tuple(engine.url for engine in self.active)

    def start_step(self, step: str, *, kind: str | None = None) -> None:
        """End the running step and start another. `steps` counts its time as `kind`, or `step`."""
        now_s = time.monotonic()
        self.steps[self._kind] = self.steps.get(self._kind, 0.0) + now_s - self._step_start_s
        self.step = step
        self._kind = kind or step
        self._step_start_s = now_s

    async def each(self, step: str, call: Call, *, kind: str | None = None) -> None:
        """Call every engine at once and drop the engines that fail.

        Raises: SyncError if no engine remains.
        """
        self.start_step(step, kind=kind)
        errors = await asyncio.gather(*(_error_of(call(engine)) for engine in self.active))
        for engine, error in zip(self.active, errors, strict=True):
            if error is not None:
                self.unknown[engine.url] = f"{step}: {error}"
        self.active = [engine for engine in self.active if engine.url not in self.unknown]
        if not self.active:
            raise SyncError("no engine is left", where=f"push of {self.stamp}", found=self.unknown)

    async def check_all(self, step: str, call: Call) -> None:
        """Call every engine at once for a check. Raises: SyncError if any engine fails it."""
        self.start_step(step)
        errors = await asyncio.gather(*(_error_of(call(engine)) for engine in self.active))
        failed = {
            engine.url: str(error)
            for engine, error in zip(self.active, errors, strict=True)
            if error is not None
        }
        if failed:
            raise SyncError(
                "an engine does not hold the weights that were sent "
                "(sync.check_weight_update_equal)",
                where=f"push of {self.stamp}: {step}",
                found=failed,
                do="turn the check off for an engine without /weights_checker (HTTP 404)",
            )

    async def open(self, mode: PauseMode, *, begin: bool = True) -> None:
        """Pause the engines, flush their caches, and with `begin` open a weight update.

        `mode` decides about requests in flight. `retract` keeps them in the engine, which computes
        their cache again under the new weights. `in_place` is not allowed: later requests would
        read caches of the old weights (see `Engine.pause`).
        """
        assert mode != "in_place"
        self._pause_start_s = time.monotonic()
        seconds: list[dict[str, float]] = []

        async def open_one(engine: Engine) -> None:
            opened = await engine.open_update(mode, begin=begin)
            seconds.append(opened.seconds)
            if opened.begun:
                self._updating.add(engine.url)

        await self.each("open", open_one)
        self._split_step(seconds)

    async def begin_again(self) -> None:
        """Open another weight update after `end`, in every engine that has that call."""
        await self.each("begin", self._begin)

    async def end(self) -> None:
        """Close the weight update. The engine then builds what it derives from its weights.

        `resume` closes an update that is still open.
        """
        await self.each("end", self._end)

    async def overwrite(self) -> None:
        """Have each engine remember its weights and overwrite them with random numbers."""
        await self.check_all(
            "remember the weights", lambda engine: engine.check_weights("snapshot")
        )
        await self.each(
            "overwrite the weights", lambda engine: engine.check_weights("reset_tensors")
        )

    async def compare(self) -> None:
        """Compare the weights with those before `overwrite`. Raises: SyncError if they differ."""
        await self.check_all("compare the weights", lambda engine: engine.check_weights("compare"))

    async def resume(self, *, sampling: bool = True) -> None:
        """End the weight update, check the stamp in each engine, then let the engines sample.

        With `sampling=False` the engines stay paused. Engines that released their cache continue
        when they have taken it back.
        """
        seconds: list[dict[str, float]] = []

        async def close_one(engine: Engine) -> None:
            closed = await engine.close_update(
                self.stamp, end=engine.url in self._updating, sample=sampling
            )
            seconds.append(closed.seconds)
            self._check_stamp(engine, closed.weight_version)

        await self.each("close", close_one)
        self._split_step(seconds)
        self.current = [engine.url for engine in self.active]
        self.paused_s = time.monotonic() - self._pause_start_s

    def _split_step(self, seconds: Sequence[dict[str, float]]) -> None:
        """Count the parts of the running step, of the slowest engine, as steps of their own."""
        slowest = max(seconds, key=lambda parts: sum(parts.values()))
        for step, part_s in slowest.items():
            self.steps[step] = self.steps.get(step, 0.0) + part_s
            self._step_start_s += part_s

    def count_bucket(self, tensors: int, size_bytes: int) -> None:
        """Add one loaded bucket to the counters."""
        self.tensors += tensors
        self.size_bytes += size_bytes
        self.buckets += 1

    async def _begin(self, engine: Engine) -> None:
        if await engine.begin_weight_update():
            self._updating.add(engine.url)

    async def _end(self, engine: Engine) -> None:
        if engine.url in self._updating:
            await engine.end_weight_update()
            self._updating.discard(engine.url)

    def _check_stamp(self, engine: Engine, stamp: str) -> None:
        if stamp != self.stamp:
            raise SyncError(
                "the engine reports other weights",
                where=engine.url,
                found=stamp,
                expected=self.stamp,
            )


async def run_session(
    urls: Sequence[str], stamp: str, work: Callable[[Session], Awaitable[None]], *, timeout_s: float
) -> PushReport:
    """Run a push (`Session.open` to `Session.resume`) on these engines within a deadline.

    Raises: SyncError if no engine got the weights (`found` maps URL → reason); any other error of
    `work`.
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
        except TimeoutError:
            _drop_rest(session, urls, f"not finished within {timeout_s:g} s ({session.step})")
        except SyncError as error:
            _drop_rest(session, urls, str(error))
    session.start_step("over")
    if not session.current:
        raise SyncError(
            "the weights arrived nowhere", where=f"push of {stamp}", found=session.unknown
        )
    return PushReport(
        stamp=stamp,
        engines=tuple(session.current),
        unknown=session.unknown,
        tensors=session.tensors,
        size_bytes=session.size_bytes,
        buckets=session.buckets,
        seconds=time.monotonic() - start_s,
        paused_s=session.paused_s,
        steps=session.steps,
    )


def _drop_rest(session: Session, urls: Sequence[str], reason: str) -> None:
    for url in urls:
        if url not in session.current:
            session.unknown.setdefault(url, reason)


async def _error_of(call: Awaitable[None]) -> Exception | None:
    try:
        await call
    except (EngineError, DeadlineExceeded, SyncError) as error:
        return error
    return None
