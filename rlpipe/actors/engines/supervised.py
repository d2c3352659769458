"""Engine and router handles for their supervisor, the fleet.

`SupervisedEngine` is one engine with the server on each node that it spans. Servers of several
nodes compute every token together, so they live and die together: they start together, and when one
has gone, the others are ended. The server on node 0 answers for the engine. `SupervisedRouter` is
the router. `start_engines` starts all engines of a fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from ray.actor import ActorHandle

from rlpipe.actors.engines.engine import FILES, EngineSpec
from rlpipe.actors.ray.calls import HangDetector, call, gather, kill_actors
from rlpipe.config.model import ResourcesConfig
from rlpipe.engines.sglang.admin import EngineLoad
from rlpipe.errors import ActorLost, DeadlineExceeded, EngineUnavailable, RlpipeError
from rlpipe.system.gpus import GpuReading

CALL_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 120.0
MEMORY_TIMEOUT_S = 200.0
"""Longer than three calls of `engine.MEMORY_TIMEOUT_S`."""
NOT_RUNNING: dict[str, Any] = {
    "url": None,
    "alive": False,
    "stamp": None,
    "pid": None,
    "facts": {},
    "load": None,
    "gpus": [],
}
"""Status of a server that does not run."""


class SupervisedEngine:
    """One engine, and its state as last seen. `actors`: of its servers, in order of nodes."""

    def __init__(
        self, number: int, make: Callable[[int, int], ActorHandle], nodes: int = 1
    ) -> None:
        """`make(engine, node)` finds or starts an actor."""
        self.number = number
        self._make = make
        self.actors = [make(number, node) for node in range(nodes)]
        self.url: str | None = None
        self.stamp: str | None = None
        self.pid: int | None = None
        self.facts: dict[str, Any] = {}
        self.load: EngineLoad | None = None
        self.gpus: list[GpuReading] = []
        """Those of all nodes."""
        self.admitted = False
        """True if the router sends requests to this engine."""
        self.failures = 0
        """Failed checks in a row."""
        self.trouble: Exception | None = None
        """Error of an engine that could not be started several times in a row."""
        self.tested_s = time.monotonic()
        """Time of the last generated token of a health check."""
        self.starting = False
        self._stops = 0
        """Incremented at the beginning and at the end of each stop."""
        self._hang_detectors = [HangDetector() for _ in self.actors]

    @classmethod
    def all_of(
        cls,
        resources: ResourcesConfig,
        make: Callable[[int, int], ActorHandle],
        numbers: Iterable[int],
    ) -> list[SupervisedEngine]:
        """Return engines of a layout. Blocks while Ray finds or starts each actor."""
        return [cls(number, make, resources.engine_nodes) for number in numbers]

    @property
    def actor(self) -> ActorHandle:
        """Actor that answers calls about weights, memory and tokens."""
        return self.actors[0]

    async def check(self) -> bool:
        """Update the state from the actors. Return True if all servers are alive.

        If only some servers are alive, end them. Replace an actor that died; kill an actor that
        hangs. Raises: DeadlineExceeded if an actor does not answer.
        """
        stops = None
        # A status from before or during a stop does not describe the engine afterwards: ask again.
        while stops != self._stops:
            stops = self._stops
            results = await asyncio.gather(*map(self._status, self._nodes), return_exceptions=True)
            statuses = [_raise_if_error(result) for result in results]
        alive = [status["alive"] for status in statuses]
        # During a start the servers come up one after the other.
        if any(alive) and not all(alive) and not self.starting:
            with suppress(RlpipeError):  # the next check tries again
                await self.stop()
        status = statuses[0] if all(alive) else NOT_RUNNING
        self.stamp = status["stamp"]
        self.pid = status["pid"]
        self.facts = status["facts"]
        self.load = status["load"]
        self.gpus = [gpu for one in statuses for gpu in one["gpus"]]
        self.admitted = self.admitted and status["alive"] and status["url"] == self.url
        self.url = status["url"]
        return status["alive"]

    async def start(self, spec: EngineSpec, deadline_s: float) -> None:
        """Start the servers, without weights of the run. Raises: as `EngineActor.start`."""
        self.starting = True
        try:
            rendezvous = await self._rendezvous(spec, deadline_s)
            starts = [
                self._call("start", deadline_s, spec, rendezvous, node=node) for node in self._nodes
            ]
            url = await self._start_together(starts)
        finally:
            self.starting = False
        # A server that was up already keeps its URL and its admission.
        self.admitted = self.admitted and url == self.url
        self.url = url
        self.tested_s = time.monotonic()

    async def mark(self, *, unknown: bool) -> None:
        """Tell the actor whether the held weights are unknown, as `EngineActor.mark`."""
        await call(
            self.actor.mark.remote(unknown=unknown),
            where=f"engine/{self.number}.mark",
            deadline_s=CALL_TIMEOUT_S,
        )

    async def fetch_weights(
        self, root: str, stamp: str, folder: str, deadline_s: float, *, before: str | None = None
    ) -> str:
        """Copy a weight version to each machine of the engine, as `EngineActor.fetch_weights`."""
        refs = [
            actor.fetch_weights.options(concurrency_group=FILES).remote(
                root, stamp, folder, deadline_s, before=before
            )
            for actor in self.actors
        ]
        return (
            await gather(refs, where=f"engine/{self.number}.fetch_weights", deadline_s=deadline_s)
        )[0]

    async def stop(self) -> None:
        """Stop the servers; the supervisor starts others."""
        # before the calls, so that no push begins with this engine meanwhile
        self.url = None
        self.stamp = None
        self.admitted = False
        self._stops += 1
        stops = (self._call("stop", CALL_TIMEOUT_S, node=node) for node in self._nodes)
        results = await asyncio.gather(*stops, return_exceptions=True)
        self._stops += 1
        for result in results:
            _raise_if_error(result)

    async def leave(self) -> None:
        """End requests with their tokens so far, then servers and actors, whatever fails."""
        with suppress(RlpipeError):
            if self.url is not None:
                await self._call("hand_back", CALL_TIMEOUT_S)
        with suppress(RlpipeError):
            await self.stop()
        await asyncio.to_thread(kill_actors, self.actors)

    async def set_memory(
        self, method: Literal["release_memory", "resume_memory"], tags: Collection[str]
    ) -> None:
        """Call this method of `EngineActor`. Stop the engine if the call fails."""
        if self.url is None:
            return
        try:
            await self._call(method, MEMORY_TIMEOUT_S, tuple(tags))
        except RlpipeError:
            with suppress(RlpipeError):
                await self.stop()
        # the fleet must not count the engine as current before its next push
        if method == "release_memory" and "weights" not in tags:
            self.stamp = None

    async def generates(self, timeout_s: float) -> bool:
        """True if the engine generates a token within this time."""
        # before the call: a test that hangs must not be repeated at every check
        self.tested_s = time.monotonic()
        return await self._call("generates", timeout_s + CALL_TIMEOUT_S, timeout_s)

    @property
    def _nodes(self) -> range:
        return range(len(self.actors))

    async def _status(self, node: int) -> dict[str, Any]:
        """Return the status of one server; replace its actor if it died."""
        try:
            status = await self._call("status", STATUS_TIMEOUT_S, node=node)
        except ActorLost:
            self.actors[node] = await asyncio.to_thread(self._make, self.number, node)
            return NOT_RUNNING
        except DeadlineExceeded:
            await self._hang_detectors[node].missed(self.actors[node])
            raise
        self._hang_detectors[node].answered()
        return status if status["alive"] else NOT_RUNNING

    async def _rendezvous(self, spec: EngineSpec, deadline_s: float) -> str | None:
        """Return the rendezvous of the servers; None for a single server.

        If all servers are up for this spec, they have met there already. Otherwise all are ended,
        and the rendezvous is new.
        """
        if len(self.actors) == 1:
            return None
        met = await asyncio.gather(
            *(self._call("rendezvous", deadline_s, spec, node=node) for node in self._nodes)
        )
        if len(set(met)) == 1 and met[0] is not None:
            return met[0]
        await self.stop()
        # A new port: processes of the ended servers may still use the earlier one.
        return await self._call("new_rendezvous", CALL_TIMEOUT_S)

    async def _start_together(self, starts: list[Any]) -> str:
        """Await the starts of all servers; return the URL of the first server.

        If one start fails, the other servers would wait for it until their deadline. So their
        actors are killed. Raises: the error of the first start that failed.
        """
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks if task in done and task.exception()]
            waiting = [
                actor for actor, task in zip(self.actors, tasks, strict=True) if task not in done
            ]
            if waiting:
                await asyncio.to_thread(kill_actors, waiting)
            return (failed or tasks)[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, method: str, deadline_s: float, *arguments: Any, node: int = 0) -> Any:
        ref = getattr(self.actors[node], method).remote(*arguments)
        where = f"engine/{self.number}{f'-{node}' if node else ''}.{method}"
        return await call(ref, where=where, deadline_s=deadline_s)


class SupervisedRouter:
    """The router, or its replacement."""

    def __init__(self, make: Callable[[], ActorHandle]) -> None:
        """`make` finds or starts the actor."""
        self._make = make
        self.actor = make()
        self._hang_detector = HangDetector()

    async def check(self) -> list[str] | None:
        """Return the URLs of the admitted engines; None if the router does not run.

        Replace an actor that died; kill an actor that hangs. Raises: the error of the call.
        """
        try:
            urls = await call(
                self.actor.workers.remote(), where="router.workers", deadline_s=CALL_TIMEOUT_S
            )
        except ActorLost:
            self.actor = await asyncio.to_thread(self._make)
            return None
        except RlpipeError:
            await self._hang_detector.missed(self.actor)
            raise
        self._hang_detector.answered()
        return urls

    async def start(self, spec: EngineSpec, urls: list[str]) -> str:
        """Start the router, or remove other engines from it; return its URL.

        Raises: as `RouterActor.start`.
        """
        start = self.actor.start.remote(spec.engine, spec.resources, spec.logs, urls)
        return await call(start, where="router.start", deadline_s=spec.resources.start_timeout_s)

    async def admit(self, urls: list[str]) -> None:
        """Send requests to these engines."""
        await call(
            self.actor.admit.remote(urls), where="router.admit", deadline_s=2 * CALL_TIMEOUT_S
        )

    async def remove(self, urls: list[str]) -> None:
        """Send no more requests to these engines."""
        await call(self.actor.remove.remote(urls), where="router.remove", deadline_s=CALL_TIMEOUT_S)


async def start_engines(engines: Sequence[SupervisedEngine], spec: EngineSpec) -> None:
    """Start all engines. Of external engines, one that answers is enough.

    The supervisor connects the other external engines once they answer. Raises: as
    `EngineActor.start`.
    """
    starts = (engine.start(spec, spec.resources.start_timeout_s) for engine in engines)
    results = await asyncio.gather(*starts, return_exceptions=True)
    errors = [error for error in results if error is not None]
    tolerated = [
        error
        for error in errors
        if spec.resources.external_engines and isinstance(error, EngineUnavailable)
    ]
    fatal = [error for error in errors if error not in tolerated]
    if fatal or len(tolerated) == len(engines):
        raise [*fatal, *tolerated][0]


def _raise_if_error(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result
