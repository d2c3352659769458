"""Let engines join and leave while a run continues.

`FleetSize` follows the newest request in the store (`rlpipe.store.engine_targets`).

    more engines     Each gets a placement group, and waits for room in the Ray cluster without
                     holding up the run. It starts, gets the published weights, and only then
                     requests.
    fewer engines    Those with the highest numbers get no more requests and end theirs with the
                     tokens so far; the generator continues these on other engines. Then server,
                     actor and placement group end.

Not with shared GPUs, whose memory trainer and engines divide, nor with external engines.

Entry points: `FleetSize`, `requested_engines`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rlpipe.actors.engines.fleet import Fleet
from rlpipe.actors.engines.supervised import NOT_RUNNING, SupervisedEngine
from rlpipe.actors.ray.named import NamedActors
from rlpipe.config.run import RunConfig
from rlpipe.errors import RlpipeError
from rlpipe.store.engine_targets import EngineTarget, EngineTargets
from rlpipe.store.objects.files import Files

INTERVAL_S = 5.0
"""Seconds between two looks at the store and at engines that wait for room."""


def requested_engines(config: RunConfig, store_root: str) -> int:
    """Return the number of engines of a run: the requested one, else as configured.

    Raises: ObjectCorrupt, StoreError.
    """
    if not config.needs_engines:
        return 0
    configured = config.resources.num_engines
    if not config.resources.resizable:
        return configured
    target = EngineTargets(Files(store_root)).newest(config.run)
    return target.of(configured) if target else configured


class FleetSize:
    """Keeps the number of engines of a fleet at the requested one."""

    def __init__(
        self,
        fleet: Fleet,
        actors: NamedActors,
        config: RunConfig,
        store_root: str,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_change` is awaited after engines have joined or left."""
        self._fleet = fleet
        self._actors = actors
        self._config = config
        self._targets = EngineTargets(Files(store_root))
        self._on_change = on_change
        self._target: EngineTarget | None = None
        self._waiting: list[int] = []
        """Engines without room in the Ray cluster."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Follow requests until `close`."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """End following. Engines stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def status(self) -> list[dict[str, Any]]:
        """Return the status of all engines, as `Fleet.status`. Those without room in the Ray
        cluster have `waiting`."""
        members = self._fleet.status()
        numbers = {status["number"] for status in members}
        joining = [{"number": n, **NOT_RUNNING} for n in self._waiting if n not in numbers]
        waiting = set(self._waiting)
        return [
            {**status, "waiting": not status["alive"] and status["number"] in waiting}
            for status in [*members, *joining]
        ]

    async def _follow(self) -> None:
        while True:
            # It survives any error of the store or of Ray; the next look tries again.
            with suppress(Exception):
                await self.adjust()
            await asyncio.sleep(INTERVAL_S)

    async def adjust(self) -> None:
        """Read the newest request; let engines leave, and join if they have room."""
        following = self._targets.following
        self._target = await asyncio.to_thread(following, self._config.run, self._target)
        configured = self._config.resources.num_engines
        wanted = self._target.of(configured) if self._target else configured
        has_left = await self._remove_from(wanted)
        has_joined = await self._add_up_to(wanted)
        self._waiting += await self._without_node()
        if has_left or has_joined:
            await self._on_change()

    async def _remove_from(self, wanted: int) -> bool:
        """End the engines with numbers from `wanted` on. True if there were any."""
        placement = self._actors.placement
        leaving = [engine for engine in self._fleet.engines if engine.number >= wanted]
        if leaving:
            await self._fleet.leave(leaving)
        gone = [*(engine.number for engine in leaving), *(n for n in self._waiting if n >= wanted)]
        for number in gone:
            await asyncio.to_thread(placement.release_engine, number)
        return bool(leaving)

    async def _add_up_to(self, wanted: int) -> bool:
        """Add the missing engines that have room. True if there were any."""
        present = {engine.number for engine in self._fleet.engines}
        missing = [number for number in range(wanted) if number not in present]
        self._waiting = []
        for number in missing:
            try:
                engine = await asyncio.to_thread(self._placed_engine, number)
            except RlpipeError:
                engine = None
            if engine is None:
                self._waiting.append(number)
            else:
                self._fleet.join(engine)
        return len(self._waiting) < len(missing)

    async def _without_node(self) -> list[int]:
        """Return the engines whose node vanished. Ray places them again once it has room."""
        down = [each.number for each in self._fleet.engines if each.url is None]
        placed = await asyncio.to_thread(
            lambda: [self._actors.placement.reserve_engine(number) for number in down]
        )
        return [number for number, is_placed in zip(down, placed, strict=True) if not is_placed]

    def _placed_engine(self, number: int) -> SupervisedEngine | None:
        """Return an engine with its actors, or None while Ray has no room for them."""
        if not self._actors.placement.reserve_engine(number):
            return None
        nodes = self._config.resources.engine_nodes
        return SupervisedEngine(number, self._actors.engine, nodes)
