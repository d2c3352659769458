"""`Fleet`: the engines of a cluster and their router, kept alive and kept at the published weights.

Each engine has a keeper: a coroutine that starts it again when it died, ends it when it hangs,
gives it the published weights and only then lets it take requests. A push to all goes through
`publish`. What an engine holds is what its server says; from before the first byte of a push until
its echo it is unknown, and nobody samples from it.

Not here: what is asked of one engine (`kept_engine`), which weights are published (the driver
says), how they are sent (`send`, given by the conductor), or requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ray.actor import ActorHandle

from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.engines.external import attempts, start_all
from rlpipe.actors.engines.kept_engine import KeptEngine
from rlpipe.actors.engines.kept_router import KeptRouter
from rlpipe.actors.ray.calls import gather
from rlpipe.actors.sharing import OF_ENGINES, Sharing
from rlpipe.config.model import EngineConfig
from rlpipe.errors import DeadlineExceeded, EngineUnavailable, RlpipeError, SyncError
from rlpipe.lineage.states import Lineage

CALL_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 2.0
ANSWER_S = 12.0
"""A healthy engine's actor answers sooner how it is, even if its server does not (10 s)."""
ATTEMPTS = 3
"""An engine that could not be brought back so many times in a row is in trouble; its keeper goes on
trying."""
SILENT = "its actor did not answer once it had them, or its server is another by now"


@dataclass(frozen=True)
class Weights:
    """Weights that engines are given."""

    digest: str
    """Of the node that made them."""
    version: int
    stamp: str
    """What an engine echoes: `branch@version@state digest`."""
    lineage: Lineage
    """How a trainer comes to hold them."""


@dataclass(frozen=True)
class Receivers:
    """Engines that weights are sent to."""

    urls: Callable[[], Sequence[str]]
    """Who they are. Called once the trainer is had: to restore it may have cost engines the weights
    that they held."""
    begin: Callable[[Sequence[str]], Awaitable[list[str]]]
    """Awaited right before the first byte, with whom it is for: which of them are sent to. None
    whose actor does not answer."""
    end: Callable[[Mapping[str, str]], Awaitable[None]]
    """Awaited after the last byte, before engines may sample again, with why what some of them hold
    is unknown, by URL."""
    idle: bool
    """They have no requests."""


class Send(Protocol):
    """Sends weights to engines."""

    async def __call__(
        self, weights: Weights, to: Receivers, *, must: bool
    ) -> dict[str, Any] | None:
        """`{"bytes", "seconds", "unknown": {url: why}}`, and through files their `share` of all
        weights.

        Unless it `must`, nothing is sent, and the answer is None, if the trainer would have to give
        up other weights for these.
        """
        ...


class Fleet:
    """All engines. Made and used on the conductor's event loop; `close` ends its keepers."""

    def __init__(
        self,
        engines: list[KeptEngine],
        make_router: Callable[[], ActorHandle],
        spec: EngineSpec,
        send: Send,
        *,
        can_send: Callable[[Weights], Awaitable[bool]],
        on_router: Callable[[str], Awaitable[None]],
        sharing: Sharing | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`can_send`: would `send` wait for nobody and disturb nothing? `on_router` hears of the
        router's URL.

        `sharing`: whose turn the GPUs are, if they are shared; `make_room` is awaited before
        engines are waited for of which none is up.
        """
        self._sharing = sharing or Sharing()
        self._make_room = make_room
        self.engines = engines
        self.spec = spec
        self.router = KeptRouter(make_router)
        self._send = send
        self._can_send = can_send
        self._on_router = on_router
        self.weights: Weights | None = None
        self._acceptable: set[str] = set()
        self._pushing = asyncio.Lock()
        self._pushes = 0  # and whatever else may keep an engine from generating
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def config(self) -> EngineConfig:
        return self.spec.engine

    @property
    def start_timeout_s(self) -> float:
        return self.spec.resources.start_timeout_s

    async def open(self) -> None:
        """Bring everything up, then keep it so. Raises: what keeps an engine or the router from
        coming up."""
        await start_all(self.engines, self.spec)
        await self._start_router()
        routed = await self.router.look()
        for engine in self.engines:
            await engine.look()
            engine.admitted = engine.url is not None and engine.url in (routed or ())
        self._keepers = [asyncio.create_task(self._keep(engine)) for engine in self.engines]
        self._keepers.append(asyncio.create_task(self._keep_router()))

    async def close(self) -> None:
        """Stop keeping; engines stay as they are."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()

    async def publish(
        self, weights: Weights, *, everyone: bool, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """From now on engines are given these weights: with `everyone` all of them, now; else those
        that come back.

        `check` raises if whoever asks has no right to any more, also after it waited. Answers
        `{"engines", "bytes", "seconds"}` of the push. Raises: SyncError if no engine holds them
        after it; EngineUnavailable if none comes up; what the trainer raised.
        """
        check()
        if self._only_joins(weights, everyone=everyone):
            return _nothing()
        await self._until_one_is_up()
        async with (
            self._pushing
        ):  # no keeper sends them before, so that what is answered is all that was sent
            check()
            if self._only_joins(weights, everyone=everyone):
                return _nothing()
            self.weights = weights
            self._acceptable = {weights.stamp}
            return await self._push_in_turn(
                [e for e in self.engines if e.url and not e.starting], must=everyone
            )

    def _only_joins(self, weights: Weights, *, everyone: bool) -> bool:
        """Unless they are for everyone, weights join what is published, if they are not older: then
        nothing is sent."""
        current = self.weights
        if everyone or current is None:
            return False
        if current.version <= weights.version:
            self.weights = weights
            self._acceptable = self._acceptable | {weights.stamp}
        return True

    async def keep(self, tags: Collection[str]) -> None:
        """All engines give up their GPU memory but this. One that does not is ended."""
        if set(tags) != set(OF_ENGINES):
            self._pushes += 1
        await asyncio.gather(*(engine.move("keep", tags) for engine in self.engines))

    async def take(self, tags: Collection[str]) -> None:
        """All engines take this GPU memory back. One that does not is ended."""
        await asyncio.gather(*(engine.move("take", tags) for engine in self.engines))

    def share(self, sharing: Sharing) -> None:
        """Engines go by these turns from now on."""
        self._sharing = sharing

    def forget(self) -> None:
        """Nothing is published any more: engines keep what they hold, and are given nothing until
        something is."""
        self.weights, self._acceptable = None, set()

    def status(self) -> list[dict[str, Any]]:
        """`{"number", "url", "alive", "stamp", "pid", "facts"}` of each engine as last seen."""
        kept = ("number", "url", "stamp", "pid", "facts")
        return [
            {"alive": e.url is not None, **{name: getattr(e, name) for name in kept}}
            for e in self.engines
        ]

    def trouble(self) -> RlpipeError | None:
        """Why nothing can be sampled, if no engine can be brought back."""
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
        """Returns if the engines say which weights sampled which token. Raises: as
        `Engine.require_spans`."""
        asks = [engine.actor.require_spans.remote() for engine in self.engines if engine.url]
        await gather(asks, where="engine.require_spans", deadline_s=CALL_TIMEOUT_S)

    async def stop_engines(self) -> None:
        """End all servers: what they hold is not what it should be. Their keepers start others."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    async def _keep(self, engine: KeptEngine) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                await self._care(engine)
                engine.failures = 0
                engine.trouble = None
            except Exception as error:  # noqa: BLE001 - a keeper outlives whatever its engine, or Ray, comes up with
                engine.failures += 1
                if engine.failures >= attempts(self.spec, ATTEMPTS, LOOK_INTERVAL_S):
                    engine.trouble = error

    async def _care(self, engine: KeptEngine) -> None:
        """One look at an engine, and what it needs."""
        if not await engine.look():
            async with self._sharing.room_to_start() as awake:
                if awake is None:
                    return
                await engine.start(self.spec, self.start_timeout_s)
                await engine.look()
                await engine.move("keep", awake.engines)
        elif self._is_test_due(engine):
            pushes = self._pushes
            hung = not await engine.generates(self.config.rollout_health_check_timeout)
            if hung and pushes == self._pushes and not self._pushing.locked():
                await self._leave_out([engine])
                return
        weights = self.weights
        if weights is None or (engine.stamp in self._acceptable and engine.admitted):
            return
        if engine.stamp in self._acceptable or await self._can_send(weights):
            await self._push([engine], must=False)

    def _is_test_due(self, engine: KeptEngine) -> bool:
        old = time.monotonic() - engine.tested_s > self.config.rollout_health_check_interval
        return old and engine.admitted and self._sharing.sampling

    async def _keep_router(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            with suppress(Exception):  # as in `_keep`; the next look tries again
                known = await self.router.look()
                if known is None:
                    await self._start_router()
                    known = []
                for engine in self.engines:
                    engine.admitted = engine.admitted and engine.url in known
                if gone := sorted(set(known) - {engine.url for engine in self.engines}):
                    await self.router.remove(gone)

    async def _start_router(self) -> None:
        urls = [engine.url for engine in self.engines if engine.url]
        await self._on_router(await self.router.start(self.spec, urls))

    async def _until_one_is_up(self) -> None:
        try:
            async with asyncio.timeout(self.start_timeout_s):
                while not await self._one_is_up():
                    if error := self.trouble():
                        raise error
                    if self._make_room is not None and not self._sharing.startable:
                        await self._make_room()
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise EngineUnavailable(
                "no engine came up",
                where="engines",
                found=f"none within {self.start_timeout_s:g} s",
                do="see the engines' logs",
            ) from error

    async def _one_is_up(self) -> bool:
        """All are asked at once. Who pushes should know of each how it is, but not wait for one
        that hangs if another is up."""
        looks = [asyncio.ensure_future(self._is_up(engine)) for engine in self.engines]
        try:
            done, late = await asyncio.wait(looks, timeout=ANSWER_S)
            while late and not any(look.result() for look in done):
                more, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            return any(look.result() for look in done)
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _is_up(self, engine: KeptEngine) -> bool:
        if not engine.starting:
            with suppress(DeadlineExceeded):
                return await engine.look()
        return False

    async def _push(self, engines: list[KeptEngine], *, must: bool) -> dict[str, Any]:
        """Give the published weights to those of these engines that are behind, and requests to
        those that hold them."""
        async with self._pushing:
            return await self._push_in_turn(engines, must=must)

    async def _push_in_turn(self, engines: list[KeptEngine], *, must: bool) -> dict[str, Any]:
        weights = self.weights
        if weights is None:
            return _nothing()
        behind = [
            engine for engine in engines if engine.url and engine.stamp not in self._acceptable
        ]
        sent = await self._send_to(behind, weights, must=must) if behind else _nothing()
        await self._admit(
            [e for e in engines if e.url and e.stamp in self._acceptable and not e.admitted]
        )
        return sent

    async def _send_to(
        self, behind: list[KeptEngine], weights: Weights, *, must: bool
    ) -> dict[str, Any]:
        begun: list[str] = []
        arrived: list[KeptEngine] = []

        async def begin(urls: Sequence[str]) -> list[str]:
            self._pushes += 1
            engines = self._with(urls)
            for engine in engines:
                engine.stamp = None
            marked = await self._marked(engines, unknown=True)
            begun.extend(url for url in urls if any(url == engine.url for engine in marked))
            if not begun:
                raise SyncError(
                    "no engine answers",
                    where=f"push of {weights.stamp}",
                    do="see the engines' logs",
                )
            return begun

        async def end(unknown: Mapping[str, str]) -> None:
            await self._leave_out(self._with(unknown))
            reached = [engine for engine in self._with(begun) if engine.url not in unknown]
            arrived.extend(await self._marked(reached, unknown=False))
            for engine in arrived:
                engine.stamp = weights.stamp

        try:
            idle = not any(engine.admitted for engine in behind)
            sent = await self._send(
                weights, Receivers(lambda: self._in_need(behind), begin, end, idle), must=must
            )
        except BaseException:  # engines that it had not begun with hold what they held
            await self._leave_out([engine for engine in self._with(begun) if engine not in arrived])
            raise
        if sent is None:
            return _nothing()
        if not arrived:
            found = {url: sent["unknown"].get(url, SILENT) for url in begun}
            raise SyncError(
                "the weights arrived nowhere", where=f"push of {weights.stamp}", found=found
            )
        return {
            "engines": len(arrived),
            **{key: value for key, value in sent.items() if key != "unknown"},
        }

    async def _marked(self, engines: list[KeptEngine], *, unknown: bool) -> list[KeptEngine]:
        """Those of them whose actors know that what they hold is unknown, or no longer. Others are
        left out."""
        answers = await asyncio.gather(
            *(engine.mark(unknown=unknown) for engine in engines), return_exceptions=True
        )
        silent = [
            engine for engine, answer in zip(engines, answers, strict=True) if answer is not None
        ]
        await self._leave_out(silent)
        return [engine for engine in engines if engine not in silent]

    def _with(self, urls: Collection[str]) -> list[KeptEngine]:
        """Engines whose servers are these now: one that was started again is another."""
        return [engine for engine in self.engines if engine.url in urls]

    def _in_need(self, behind: list[KeptEngine]) -> list[str]:
        """Of these, those that are still up; where GPUs are shared, with all that gave up their
        weights for the trainer."""
        asked = self.engines if self._sharing.active else behind
        return [
            e.url
            for e in asked
            if e.url and not e.starting and (e in behind or e.stamp not in self._acceptable)
        ]

    async def _admit(self, engines: list[KeptEngine]) -> None:
        if engines:
            await self.router.admit([str(engine.url) for engine in engines])
            for engine in engines:
                engine.admitted = True

    async def _leave_out(self, engines: list[KeptEngine]) -> None:
        """No requests to engines whose weights are unknown; each is ended, and its keeper starts
        another."""
        urls = [engine.url for engine in engines if engine.url]
        if urls:
            with suppress(RlpipeError):
                await self.router.remove(urls)
        await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)


def _nothing() -> dict[str, Any]:
    return {"engines": 0, "bytes": 0, "seconds": 0.0}
