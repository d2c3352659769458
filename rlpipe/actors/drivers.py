"""The driver of a cluster's actors.

`Driver` names a calling process; actors refuse calls of any driver but the current one. `is_driven`
tells from the store whether a driver is at work. `IdleWatch` ends actors that have no driver any
more, so that their GPUs are free.

A run that fails on a joined Ray leaves its actors, so that a retry finds everything warm. Without a
retry, they end after `resources.keep_idle_s`. On a local Ray all actors end with the driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import ray

from rlpipe.actors.specs import ClusterSpec
from rlpipe.errors import Fenced
from rlpipe.store.epochs import SKEW_S, Epochs
from rlpipe.store.objects.files import Files

CHECK_INTERVAL_S = 20.0


@dataclass(frozen=True)
class Driver:
    """The calling process: the run that it drives, and its epoch."""

    run: str
    epoch: int

    def require(self, current: Driver | None, *, where: str) -> None:
        """Check that this driver is the actor's current driver. Raises: Fenced."""
        if self != current:
            raise Fenced(
                "another process uses the actors of this cluster",
                where=where,
                found=f"run {current.run} in epoch {current.epoch}" if current else "no run",
                expected=f"run {self.run} in epoch {self.epoch}, that of this process",
                do="let the other process run, or end it and start this run again",
            )


class IdleWatch:
    """Measures the time without calls and without a driver's lease.

    Made and used on the conductor's event loop.
    """

    def __init__(self, end_actors: Callable[[], Awaitable[None]], open_lock: asyncio.Lock) -> None:
        """`end_actors` is awaited when the time is over, under the lock of `Conductor.open`.

        Then the conductor itself ends, unless a driver waits for the lock.
        """
        self._end_actors = end_actors
        self._open_lock = open_lock
        self._called_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def called(self) -> None:
        """Record a call of the driver."""
        self._called_s = time.monotonic()

    def watch(self, spec: ClusterSpec, epoch: int) -> None:
        """Watch this driver of this run only: a later one may be at work on another cluster."""
        self.called()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if (keep_s := spec.config.resources.keep_idle_s) is not None:
            self._task = asyncio.create_task(self._watch(spec, epoch, keep_s))

    def _remaining_s(self, idle_s: float) -> float:
        """Return the seconds until no call has come for `idle_s`."""
        return self._called_s + idle_s - time.monotonic()

    async def _watch(self, spec: ClusterSpec, epoch: int, keep_s: float) -> None:
        run = spec.config.run
        # short in tests, where keep_idle_s is below a second
        interval_s = min(keep_s, CHECK_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            try:
                if self._remaining_s(interval_s) > 0:
                    continue
                # A long train step makes no calls; the lease in the store shows that it is driven.
                if await asyncio.to_thread(is_driven, spec.store_root, run, epoch=epoch):
                    self.called()
                elif self._remaining_s(keep_s) <= 0:
                    _log(
                        spec,
                        f"no driver of run {run} for {keep_s:g} s (resources.keep_idle_s): "
                        "its actors end",
                    )
                    await self._end_all()
                    return
            # No caller receives an error of this task; the next check tries again.
            except Exception as error:  # noqa: BLE001
                if self._remaining_s(keep_s) <= 0:
                    _log(
                        spec,
                        f"the actors of run {run}, which has no driver, could not be ended: "
                        f"{type(error).__name__}: {error}",
                    )

    async def _end_all(self) -> None:
        async with self._open_lock:
            await self._end_actors()
        await asyncio.sleep(0)  # lets a waiting `open` take the lock
        if not self._open_lock.locked() and ray.get_runtime_context().get_actor_id() is not None:
            # no actor id: a test runs the conductor in its own process
            ray.kill(ray.get_runtime_context().current_actor)


def is_driven(store_root: str, run: str, *, epoch: int | None = None) -> bool:
    """True if the run's newest driver has a valid lease; with `epoch`, only if it has this epoch.

    Raises: StoreError.
    """
    newest = Epochs(Files(store_root)).newest(run)
    return newest is not None and epoch in (None, newest.epoch) and not newest.expired(SKEW_S)


def _log(spec: ClusterSpec, message: str) -> None:
    """Write a line to the run's `conductor.log`, and to Ray's log of this process."""
    line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {message}"
    print(line, flush=True)
    logs = Path(spec.home) / str(spec.config.cluster) / "logs"
    with suppress(OSError):  # a full disk is no reason to keep GPUs
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "conductor.log").open("a") as log:
            log.write(line + "\n")
