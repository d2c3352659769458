"""Parts of a fleet of fake engines: spec, weights, and a trainer that records its pushes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from rlpipe.actors.engines.fleet import Fleet, Receivers, Weights
from rlpipe.errors import RlpipeError
from rlpipe.lineage.states import Lineage
from rlpipe.types import Stage
from tests.actors.engines.fake_engines import FakeEngine, find_or_start

ENGINES = 2
RESOURCES = SimpleNamespace(start_timeout_s=20.0, external_engines=())
CONFIG = SimpleNamespace(rollout_health_check_interval=1000.0, rollout_health_check_timeout=1.0)
SPEC: Any = SimpleNamespace(engine=CONFIG, resources=RESOURCES, logs="logs")


class Trainer:
    """A trainer that sends weights. `sent`: (stamp, URLs, idle) of each push."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str], bool]] = []
        self.free = True
        self.ahead = False
        self.fails_before: RlpipeError | None = None
        self.fails_after: Exception | None = None
        self.lost: set[str] = set()
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def send(self, weights: Weights, to: Receivers, *, force: bool) -> dict[str, Any] | None:
        if self.fails_before is not None:
            raise self.fails_before
        if self.ahead and not force:
            return None
        urls = await to.begin_push(to.urls())
        if self.fails_after is not None:
            raise self.fails_after
        self.sent.append((weights.stamp, list(urls), to.idle))
        for url in set(urls) - self.lost:
            number = int(url.split("engine-")[1].split("/")[0])
            await find_or_start(FakeEngine, f"fleet-engine-{number}", number).become.remote(
                stamp=weights.stamp
            )
        if self.meanwhile is not None:
            await self.meanwhile()
        unknown = {url: "lost during the push" for url in urls if url in self.lost}
        await to.end_push(unknown)
        return {"bytes": 7, "seconds": 0.1, "unknown": unknown}

    async def can_send(self, weights: Weights) -> bool:
        return self.free


def weights(version: int, name: str = "") -> Weights:
    digest = f"{name}state {version}"
    return Weights(
        digest, version, f"run@{version}@{digest}", Lineage(Stage.INIT, "init", digest, "init")
    )


async def until(reached: Any, timeout_s: float = 20.0) -> None:
    """Poll until `reached()` (awaited) is true."""
    async with asyncio.timeout(timeout_s):
        while not await reached():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.02)


def actor(handle: Any) -> Any:
    """Return the actor as Any: its methods are looked up when they are called."""
    return handle


async def routed(fleet: Fleet) -> list[str]:
    return await actor(fleet.router.actor).workers.remote() or []


def stamps(fleet: Fleet) -> list[str | None]:
    return [status["stamp"] for status in fleet.status()]
