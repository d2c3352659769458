"""`Fleet`: supervise the engines of a cluster and their router, and keep them at the published
weights.

Each engine has a supervisor coroutine. It starts an engine that died, stops an engine that hangs,
sends it the published weights, and only then admits it at the router. A push to all engines goes
through `publish`. The server's answer says which weights an engine holds; from before the first
byte of a push until the echo they are unknown, and the engine gets no requests.

The driver decides which weights are published. The conductor passes `send`, which transfers them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ray.actor import ActorHandle

from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.engines.supervised import SupervisedEngine, SupervisedRouter, start_engines
from rlpipe.actors.ray.calls import gather
from rlpipe.actors.sharing import ENGINE_PARTS, GpuSharing
from rlpipe.config.model import EngineConfig
from rlpipe.errors import DeadlineExceeded, EngineUnavailable, RlpipeError, SyncError
from rlpipe.lineage.states import Lineage

CALL_TIMEOUT_S = 60.0
CHECK_INTERVAL_S = 2.0
STATUS_S = 12.0
"""The actor of a healthy engine answers sooner, even if its server does not answer (10 s)."""
MAX_FAILED_CHECKS = 3
"""Failed checks in a row after which an engine is in trouble. Its supervisor continues to try."""
NOT_CONFIRMED = "its actor did not answer after the push, or its server was restarted"


@dataclass(frozen=True)
class Weights:
    """Weights for the engines."""

    digest: str
    """Digest of the node that made the weights."""
    version: int
    stamp: str
    """Weight version that an engine echoes: `branch@version@state digest`."""
    lineage: Lineage
    """Lineage from which a trainer restores the weights."""


@dataclass(frozen=True)
class Receivers:
    """Engines that weights are sent to."""

    urls: Callable[[], Sequence[str]]
    """Return their URLs. Called once the trainer is locked: a restore of the trainer may have
    released the weights of further engines."""
    begin_push: Callable[[Sequence[str]], Awaitable[list[str]]]
    """Awaited with these URLs right before the first byte; returns the URLs to send to. Engines
    without an answer of their actor are left out."""
    end_push: Callable[[Mapping[str, str]], Awaitable[None]]
    """Awaited after the last byte, before engines may sample again. The argument has the reason for
    each URL with unknown weights."""
    idle: bool
    """True if the engines have no requests."""


class Send(Protocol):
    """Function that sends weights to engines."""

    async def __call__(
        self, weights: Weights, to: Receivers, *, force: bool
    ) -> dict[str, Any] | None:
        """Return `{"bytes", "seconds", "unknown": {url: reason}}`; through files also `share`.

        `share` is the sent part of all weights. If the trainer holds other weights, send only with
        `force`; else return None.
        """
        ...


def max_failed_checks(spec: EngineSpec) -> int:
    """Return the failed checks in a row after which an engine is in trouble.

    A failed check of our own engine includes a whole start. An external engine is only checked
    every `CHECK_INTERVAL_S`, and may be away as long as a start takes.
    """
    if not spec.resources.external_engines:
        return MAX_FAILED_CHECKS
    return max(MAX_FAILED_CHECKS, math.ceil(spec.resources.start_timeout_s / CHECK_INTERVAL_S))


class Fleet:
    """All engines of a cluster. For the conductor's event loop; `close` ends the supervisors."""

    def __init__(
        self,
        engines: list[SupervisedEngine],
        make_router: Callable[[], ActorHandle],
        spec: EngineSpec,
        send: Send,
        *,
        can_send: Callable[[Weights], Awaitable[bool]],
        on_router: Callable[[str], Awaitable[None]],
        sharing: GpuSharing | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`can_send`: True if `send` would neither wait nor disturb others. `on_router` is awaited
        with the router's URL.

        `sharing`: the phases of GPUs shared with the trainer. `make_room` is awaited if no engine
        is up and the trainer's memory prevents a start.
        """
        self._sharing = sharing or GpuSharing()
        self._make_room = make_room
        self.engines = engines
        self.spec = spec
        self.router = SupervisedRouter(make_router)
        self._send = send
        self._can_send = can_send
        self._on_router = on_router
        self.weights: Weights | None = None
        self._acceptable: set[str] = set()
        """Stamps of weights that may sample."""
        self._pushing = asyncio.Lock()
        self._interruptions = 0
        """Number of pushes and memory releases: a health check across one proves nothing."""
        self._supervisors: dict[SupervisedEngine | None, asyncio.Task[None]] = {}
        """By engine; None: of the router."""

    @property
    def config(self) -> EngineConfig:
        return self.spec.engine

    async def open(self) -> None:
        """Start engines and router, then their supervisors. Raises: the error of a failed start."""
        await start_engines(self.engines, self.spec)
        await self._start_router()
        admitted = await self.router.check()
        for engine in self.engines:
            await engine.check()
            # A new conductor finds engines that are admitted already.
            engine.admitted = engine.url is not None and engine.url in (admitted or ())
        for engine in self.engines:
            self._supervisors[engine] = asyncio.create_task(self._supervise(engine))
        self._supervisors[None] = asyncio.create_task(self._supervise_router())

    async def close(self) -> None:
        """Stop supervising. Engines stay as they are."""
        await self._end_supervisors([*self._supervisors])

    def join(self, engine: SupervisedEngine) -> None:
        """Supervise one more engine. It samples once it has started and has the weights."""
        self.engines = sorted([*self.engines, engine], key=lambda each: each.number)
        self._supervisors[engine] = asyncio.create_task(self._supervise(engine))

    async def leave(self, leaving: Sequence[SupervisedEngine]) -> None:
        """Send no more requests to these engines, then end them. Their requests continue elsewhere.

        Wait for a push that runs.
        """
        async with self._pushing:
            self.engines = [engine for engine in self.engines if engine not in leaving]
            await self._end_supervisors(leaving)
            urls = [engine.url for engine in leaving if engine.url]
            with suppress(RlpipeError):  # a router that is down routes nothing
                await self.router.remove(urls)
        await asyncio.gather(*(engine.leave() for engine in leaving))

    async def _end_supervisors(self, of: Sequence[SupervisedEngine | None]) -> None:
        ending = [self._supervisors.pop(engine) for engine in of]
        for supervisor in ending:
            supervisor.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def publish(
        self, weights: Weights, *, everyone: bool, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Publish weights: send them to all engines now (`everyone`), else to engines that restart.

        `check` raises if the caller may no longer publish; it is called again after each wait.
        Return `{"engines", "bytes", "seconds"}` of the push. Raises: SyncError if no engine holds
        the weights afterwards; EngineUnavailable if no engine is up; errors of the trainer.
        """
        check()
        if self._add_without_push(weights, everyone=everyone):
            return _no_push()
        await self._wait_for_engine()
        # Supervisors cannot push now, so the returned counts cover all that is sent.
        async with self._pushing:
            check()
            if self._add_without_push(weights, everyone=everyone):
                return _no_push()
            self.weights = weights
            self._acceptable = {weights.stamp}
            ready = [engine for engine in self.engines if engine.url and not engine.starting]
            return await self._push_locked(ready, force=everyone)

    def _add_without_push(self, weights: Weights, *, everyone: bool) -> bool:
        """Publish weights next to the current ones, unless they are older or need a push.

        Return False if the weights need a push: they are for everyone, or the first ones.
        """
        current = self.weights
        if everyone or current is None:
            return False
        if current.version <= weights.version:
            self.weights = weights
            self._acceptable = self._acceptable | {weights.stamp}
        return True

    async def release_memory(self, keep: Collection[str]) -> None:
        """Release all GPU memory of all engines except `keep`. End an engine that fails."""
        # Keeping all parts interrupts nothing.
        if set(keep) != set(ENGINE_PARTS):
            self._interruptions += 1
        await asyncio.gather(
            *(engine.set_memory("release_memory", keep) for engine in self.engines)
        )

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Allocate this GPU memory of all engines again. End an engine that fails."""
        await asyncio.gather(*(engine.set_memory("resume_memory", tags) for engine in self.engines))

    def use_sharing(self, sharing: GpuSharing) -> None:
        """Use these phases of shared GPUs from now on."""
        self._sharing = sharing

    def forget_weights(self) -> None:
        """Forget the published weights. Engines keep theirs, and get none until the next ones."""
        self.weights = None
        self._acceptable = set()

    def status(self) -> list[dict[str, Any]]:
        """Return `{"number", "url", "alive", "stamp", "pid", "facts", "load", "gpus"}` of each
        engine, as last seen."""
        names = ("number", "url", "stamp", "pid", "facts", "load", "gpus")
        return [
            {"alive": each.url is not None, **{name: getattr(each, name) for name in names}}
            for each in self.engines
        ]

    def trouble(self) -> RlpipeError | None:
        """Return an error if no engine can be started, else None."""
        if any(engine.trouble is None for engine in self.engines):
            return None
        found = "\n".join(f"engine {engine.number}: {engine.trouble}" for engine in self.engines)
        return EngineUnavailable(
            "no engine can be brought back",
            where="engines",
            found=found,
            do="see the engines' logs",
        )

    async def require_spans(self) -> None:
        """Check that engines report the weight version of each token.

        Raises: as `Engine.require_spans`.
        """
        calls = [engine.actor.require_spans.remote() for engine in self.engines if engine.url]
        await gather(calls, where="engine.require_spans", deadline_s=CALL_TIMEOUT_S)

    async def stop_engines(self) -> None:
        """Stop all servers, because their weights are wrong. Supervisors start others."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    async def _supervise(self, engine: SupervisedEngine) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self._check_engine(engine)
                engine.failures = 0
                engine.trouble = None
            # A supervisor survives any error of its engine or of Ray.
            except Exception as error:  # noqa: BLE001
                engine.failures += 1
                if engine.failures >= max_failed_checks(self.spec):
                    engine.trouble = error

    async def _check_engine(self, engine: SupervisedEngine) -> None:
        """Check an engine once; start it, end it or send it weights if necessary."""
        if not await engine.check():
            async with self._sharing.room_to_start() as parts:
                if parts is None:
                    return
                await engine.start(self.spec, self.spec.resources.start_timeout_s)
                await engine.check()
                # A new server uses all memory; release what this phase does not allow.
                await engine.set_memory("release_memory", parts.engines)
        elif self._is_test_due(engine):
            interruptions = self._interruptions
            hangs = not await engine.generates(self.config.rollout_health_check_timeout)
            # An engine that was paused during the test does not hang.
            if hangs and interruptions == self._interruptions and not self._pushing.locked():
                await self._exclude([engine])
                return
        weights = self.weights
        # During a push the next check tries again: a wait would delay the start of a dead engine.
        is_done = engine.stamp in self._acceptable and engine.admitted
        if weights is None or is_done or self._pushing.locked():
            return
        # An engine with acceptable weights only needs its admission, and no trainer.
        if engine.stamp in self._acceptable or await self._can_send(weights):
            async with self._pushing:
                await self._push_locked([engine], force=False)

    def _is_test_due(self, engine: SupervisedEngine) -> bool:
        due = time.monotonic() - engine.tested_s > self.config.rollout_health_check_interval
        return due and engine.admitted and self._sharing.sampling

    async def _supervise_router(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with suppress(Exception):  # as in `_supervise`; the next check tries again
                admitted = await self.router.check()
                if admitted is None:
                    await self._start_router()
                    admitted = []  # a new router has no engines
                # The router decides: it may have been restarted without an engine.
                for engine in self.engines:
                    engine.admitted = engine.admitted and engine.url in admitted
                gone = sorted(set(admitted) - {engine.url for engine in self.engines})
                if gone:
                    await self.router.remove(gone)

    async def _start_router(self) -> None:
        urls = [engine.url for engine in self.engines if engine.url]
        await self._on_router(await self.router.start(self.spec, urls))

    async def _wait_for_engine(self) -> None:
        """Wait until at least one engine is up. Raises: EngineUnavailable."""
        try:
            async with asyncio.timeout(self.spec.resources.start_timeout_s):
                while not await self._any_engine_up():
                    if error := self.trouble():
                        raise error
                    if self._make_room is not None and not self._sharing.startable:
                        await self._make_room()
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise EngineUnavailable(
                "no engine came up",
                where="engines",
                found=f"none within {self.spec.resources.start_timeout_s:g} s",
                do="see the engines' logs",
            ) from error

    async def _any_engine_up(self) -> bool:
        """Check all engines at once; return True if one is up.

        A push needs the state of each engine, but does not wait for one that hangs if another is
        up, nor for those that were down before: the actor of a vanished node does not answer.
        """
        known = [engine for engine in self.engines if engine.url] or self.engines
        checks = [asyncio.ensure_future(self._is_up(engine)) for engine in known]
        try:
            done, late = await asyncio.wait(checks, timeout=STATUS_S)
            while late and not any(check.result() for check in done):
                more, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            return any(check.result() for check in done)
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _is_up(self, engine: SupervisedEngine) -> bool:
        if not engine.starting:
            with suppress(DeadlineExceeded):
                return await engine.check()
        return False

    async def _push_locked(self, engines: list[SupervisedEngine], *, force: bool) -> dict[str, Any]:
        """Send the published weights to outdated engines of these, then admit those that hold them.

        The caller holds the lock `_pushing`.
        """
        weights = self.weights
        if weights is None:
            return _no_push()
        outdated = [
            engine for engine in engines if engine.url and engine.stamp not in self._acceptable
        ]
        report = await self._send_to(outdated, weights, force=force) if outdated else _no_push()
        await self._admit(
            [
                engine
                for engine in engines
                if engine.url and engine.stamp in self._acceptable and not engine.admitted
            ]
        )
        return report

    async def _send_to(
        self, outdated: list[SupervisedEngine], weights: Weights, *, force: bool
    ) -> dict[str, Any]:
        begun: list[str] = []
        arrived: list[SupervisedEngine] = []

        async def begin_push(urls: Sequence[str]) -> list[str]:
            self._interruptions += 1
            engines = self._with_urls(urls)
            # From here on the weights are unknown, also if this process is cancelled.
            for engine in engines:
                engine.stamp = None
            marked = await self._mark(engines, unknown=True)
            begun.extend(url for url in urls if any(url == engine.url for engine in marked))
            if not begun:
                raise SyncError(
                    "no engine answers",
                    where=f"push of {weights.stamp}",
                    do="see the engines' logs",
                )
            return begun

        async def end_push(unknown: Mapping[str, str]) -> None:
            await self._exclude(self._with_urls(unknown))
            # An engine that restarted during the push has another URL and is not among them.
            reached = [engine for engine in self._with_urls(begun) if engine.url not in unknown]
            arrived.extend(await self._mark(reached, unknown=False))
            for engine in arrived:
                engine.stamp = weights.stamp

        idle = not any(engine.admitted for engine in outdated)
        receivers = Receivers(lambda: self._without_weights(outdated), begin_push, end_push, idle)
        try:
            sent = await self._send(weights, receivers, force=force)
        except BaseException:
            # Engines that the push had not begun with still hold their weights.
            partial = [engine for engine in self._with_urls(begun) if engine not in arrived]
            await self._exclude(partial)
            raise
        if sent is None:
            return _no_push()
        if not arrived:
            raise SyncError(
                "the weights arrived nowhere",
                where=f"push of {weights.stamp}",
                found={url: sent["unknown"].get(url, NOT_CONFIRMED) for url in begun},
            )
        report = {key: value for key, value in sent.items() if key != "unknown"}
        return {"engines": len(arrived), **report}

    async def _mark(
        self, engines: list[SupervisedEngine], *, unknown: bool
    ) -> list[SupervisedEngine]:
        """Set on the engines' actors whether their weights are unknown.

        Return the engines with an actor that answered; exclude the others.
        """
        answers = await asyncio.gather(
            *(engine.mark(unknown=unknown) for engine in engines), return_exceptions=True
        )
        silent = [
            engine for engine, answer in zip(engines, answers, strict=True) if answer is not None
        ]
        await self._exclude(silent)
        return [engine for engine in engines if engine not in silent]

    def _with_urls(self, urls: Collection[str]) -> list[SupervisedEngine]:
        """Return the engines with these URLs. A restarted engine has another URL."""
        return [engine for engine in self.engines if engine.url in urls]

    def _without_weights(self, outdated: list[SupervisedEngine]) -> list[str]:
        """Return the URLs of outdated engines that are still up.

        With shared GPUs, include all engines that released their weights for the trainer.
        """
        candidates = self.engines if self._sharing.active else outdated
        return [
            engine.url
            for engine in candidates
            if engine.url
            and not engine.starting
            and (engine in outdated or engine.stamp not in self._acceptable)
        ]

    async def _admit(self, engines: list[SupervisedEngine]) -> None:
        if engines:
            await self.router.admit([str(engine.url) for engine in engines])
            for engine in engines:
                engine.admitted = True

    async def _exclude(self, engines: list[SupervisedEngine]) -> None:
        """Remove engines with unknown weights from the router and stop them.

        Their supervisors start others.
        """
        urls = [engine.url for engine in engines if engine.url]
        if urls:
            with suppress(RlpipeError):  # a router that is down routes nothing
                await self.router.remove(urls)
        await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)


def _no_push() -> dict[str, Any]:
    return {"engines": 0, "bytes": 0, "seconds": 0.0}
