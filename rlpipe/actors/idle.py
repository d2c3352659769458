"""`Idle`: actors that nobody drives any more are ended, some time later, so that their GPUs are
free for others.

A run that fails on a Ray that it joined leaves its actors: a Retry finds everything warm. If none
comes, this is their end.

Not here: how they end (`conductor`); what ends with its driver anyway, which is all that is on a
local Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import ray

from rlpipe.actors.specs import ClusterSpec
from rlpipe.store.epochs import SKEW_S, Epochs
from rlpipe.store.objects.files import Files

LOOK_INTERVAL_S = 20.0


class Idle:
    """Counts while nobody calls and the driver that these actors were opened for has no lease. Made
    and used on the conductor's event loop."""

    def __init__(self, end: Callable[[], Awaitable[None]], opening: asyncio.Lock) -> None:
        """When it has been enough, `end` is awaited under the lock that is held while the cluster
        is `opening`; then the actor that this is in ends too, unless somebody has waited to open
        the cluster."""
        self._end = end
        self._opening = opening
        self._called_s = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    def called(self) -> None:
        """By a driver, now."""
        self._called_s = time.monotonic()

    def watch(self, spec: ClusterSpec, epoch: int) -> None:
        """From now on it is about this driver of this run, and no other: a later one may be at work
        elsewhere."""
        self.called()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if (keep_s := spec.config.resources.keep_idle_s) is not None:
            self._watching = asyncio.create_task(self._watch(spec, epoch, keep_s))

    def left_s(self, keep_s: float) -> float:
        """Until nobody has called for so long."""
        return self._called_s + keep_s - time.monotonic()

    async def _watch(self, spec: ClusterSpec, epoch: int, keep_s: float) -> None:
        interval_s = min(keep_s, LOOK_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            try:
                if self.left_s(interval_s) > 0:
                    continue
                if await asyncio.to_thread(
                    is_driven, spec.store_root, spec.config.run, epoch=epoch
                ):
                    self.called()
                elif self.left_s(keep_s) <= 0:
                    _say(
                        spec,
                        f"nobody has driven {spec.config.run} for {keep_s:g} s (resources.keep_idle_s): its actors end",
                    )
                    await self._end_all()
                    return
            except Exception as error:  # noqa: BLE001 - nobody waits for this, and it is tried again
                if self.left_s(keep_s) <= 0:
                    _say(
                        spec,
                        f"actors that nobody drives could not be ended: {type(error).__name__}: {error}",
                    )

    async def _end_all(self) -> None:
        async with self._opening:
            await self._end()
        await asyncio.sleep(0)  # who waits for the lock has it now
        if not self._opening.locked() and ray.get_runtime_context().get_actor_id() is not None:
            ray.kill(ray.get_runtime_context().current_actor)


def is_driven(store_root: str, run: str, *, epoch: int | None = None) -> bool:
    """Does the lease of the newest driver of a run, of this `epoch` if one is given, still run?
    Raises: StoreError."""
    held = Epochs(Files(store_root)).newest(run)
    return held is not None and epoch in (None, held.epoch) and not held.expired(SKEW_S)


def _say(spec: ClusterSpec, what: str) -> None:
    """To who looks where the run's processes write, and in Ray's log of this one."""
    line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {what}"
    print(line, flush=True)
    logs = Path(spec.home) / str(spec.config.cluster) / "logs"
    with suppress(OSError):  # a full disk is no reason to keep GPUs
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "conductor.log").open("a") as log:
            log.write(line + "\n")
