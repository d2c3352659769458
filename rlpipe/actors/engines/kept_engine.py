"""`KeptEngine`: one engine as its keeper sees it, with the server on each node that it spans.

Servers of several nodes compute every token together, so they are one thing that lives or dies:
they start together, and when one of them is gone the others are ended. The first speaks for all.

Not here: when an engine is started, tested or given weights (`fleet`), the servers (`engine`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Literal

from ray.actor import ActorHandle

from rlpipe.actors.engines.engine import FILES, EngineSpec
from rlpipe.actors.ray.calls import Patience, call, end, gather
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, DeadlineExceeded, RlpipeError

CALL_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 120.0
MEMORY_TIMEOUT_S = 200.0
NOTHING: dict[str, Any] = {"url": None, "alive": False, "stamp": None, "pid": None, "facts": {}}
"""Status of a server that is not there."""


class KeptEngine:
    """One engine. `actors`: of its servers, in the order of nodes."""

    def __init__(
        self, number: int, make: Callable[[int, int], ActorHandle], nodes: int = 1
    ) -> None:
        """`make`: the actor of (engine, node), found or started."""
        self.number = number
        self._make = make
        self.actors = [make(number, node) for node in range(nodes)]
        self.url: str | None = None
        self.stamp: str | None = None
        self.pid: int | None = None
        self.facts: dict[str, Any] = {}
        self.admitted = False
        self.failures = 0
        self.trouble: Exception | None = None
        self.tested_s = time.monotonic()
        self.starting = False
        self._ended = 0
        self._patience = [Patience() for _ in self.actors]

    @classmethod
    def all_of(
        cls, resources: ResourcesConfig, make: Callable[[int, int], ActorHandle]
    ) -> list[KeptEngine]:
        """Those of a layout. Takes as long as Ray takes to answer for each."""
        return [
            cls(number, make, resources.engine_nodes) for number in range(resources.num_engines)
        ]

    @property
    def actor(self) -> ActorHandle:
        """The one that is asked about weights, memory and tokens."""
        return self.actors[0]

    async def look(self) -> bool:
        """Ask it how it is; whether it is alive, all of it: what is left of it is ended.

        A server whose actor died is made anew; one whose actor hangs is ended. Raises:
        DeadlineExceeded if one does not answer.
        """
        ended = None
        while ended != self._ended:  # what it was while it was being ended says nothing of it now
            ended = self._ended
            found = await asyncio.gather(*map(self._look_at, self._nodes), return_exceptions=True)
            states = [_or_raise(state) for state in found]
        alive = [state["alive"] for state in states]
        if any(alive) and not all(alive) and not self.starting:
            with suppress(RlpipeError):  # then the next look finds it again
                await self.stop()
        status = states[0] if all(alive) else NOTHING
        self.stamp = status["stamp"]
        self.pid = status["pid"]
        self.facts = status["facts"]
        self.admitted = self.admitted and status["alive"] and status["url"] == self.url
        self.url = status["url"]
        return status["alive"]

    async def start(self, spec: EngineSpec, deadline_s: float) -> None:
        """Bring its servers up; it holds no weights of ours yet. Raises: as `EngineActor.start`."""
        self.starting = True
        try:
            meeting = await self._meeting(spec, deadline_s)
            url = await self._together(
                [self._call("start", deadline_s, spec, meeting, node=node) for node in self._nodes]
            )
        finally:
            self.starting = False
        self.admitted = self.admitted and url == self.url
        self.url, self.tested_s = url, time.monotonic()

    async def mark(self, *, unknown: bool) -> None:
        await call(
            self.actor.mark.remote(unknown=unknown),
            where=f"engine/{self.number}.mark",
            deadline_s=CALL_TIMEOUT_S,
        )

    async def bring(self, root: str, stamp: str, folder: str, deadline_s: float) -> str:
        """Have a version of the weights on each of its machines. As `EngineActor.bring`."""
        refs = [
            actor.bring.options(concurrency_group=FILES).remote(root, stamp, folder, deadline_s)
            for actor in self.actors
        ]
        return (await gather(refs, where=f"engine/{self.number}.bring", deadline_s=deadline_s))[0]

    async def stop(self) -> None:
        """End its servers; its keeper starts others."""
        self.url = None
        self.stamp = None
        self.admitted = False
        self._ended += 1
        stops = (self._call("stop", CALL_TIMEOUT_S, node=node) for node in self._nodes)
        found = await asyncio.gather(*stops, return_exceptions=True)
        self._ended += 1
        for stopped in found:
            _or_raise(stopped)

    async def move(self, method: Literal["keep", "take"], tags: Collection[str]) -> None:
        """Give up GPU memory, or take it back (`EngineActor.keep` and `take`). One that cannot is
        ended."""
        if self.url is None:
            return
        try:
            await self._call(method, MEMORY_TIMEOUT_S, tuple(tags))
        except RlpipeError:
            with suppress(RlpipeError):
                await self.stop()
        if method == "keep" and "weights" not in tags:
            self.stamp = None

    async def generates(self, timeout_s: float) -> bool:
        """Did it generate a token within that time?"""
        self.tested_s = time.monotonic()
        return await self._call("generates", timeout_s + CALL_TIMEOUT_S, timeout_s)

    @property
    def _nodes(self) -> range:
        return range(len(self.actors))

    async def _look_at(self, node: int) -> dict[str, Any]:
        try:
            status = await self._call("status", STATUS_TIMEOUT_S, node=node)
        except ActorLost:
            self.actors[node] = await asyncio.to_thread(self._make, self.number, node)
            return NOTHING
        except DeadlineExceeded:
            await self._patience[node].missed(self.actors[node])
            raise
        self._patience[node].answered()
        return status if status["alive"] else NOTHING

    async def _meeting(self, spec: EngineSpec, deadline_s: float) -> str | None:
        """Where its servers meet, None if it has but one: where they have, if all are up for this
        spec; else all are ended."""
        if len(self.actors) == 1:
            return None
        met = await asyncio.gather(
            *(self._call("meeting", deadline_s, spec, node=node) for node in self._nodes)
        )
        if len(set(met)) == 1 and met[0] is not None:
            return met[0]
        await self.stop()
        return await self._call("meeting_point", CALL_TIMEOUT_S)

    async def _together(self, starts: list[Any]) -> str:
        """URL of the first of servers that start. Where one fails the others would wait for it as
        long as they may: their actors are ended, and their servers with them. Raises: what the
        first that failed raises."""
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in tasks if task in done and task.exception()]
            if waiting := [
                actor for actor, task in zip(self.actors, tasks, strict=True) if task not in done
            ]:
                await asyncio.to_thread(end, waiting)
            return (failed or tasks)[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, method: str, deadline_s: float, *arguments: Any, node: int = 0) -> Any:
        ref = getattr(self.actors[node], method).remote(*arguments)
        where = f"engine/{self.number}{f'-{node}' if node else ''}.{method}"
        return await call(ref, where=where, deadline_s=deadline_s)


def _or_raise(found: Any) -> Any:
    if isinstance(found, BaseException):
        raise found
    return found
