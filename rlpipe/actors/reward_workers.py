"""Run the processes of a reward function on nodes of the Ray cluster (`reward.worker_labels`).

    score(samples, config, args=args, process=process_workers(config))

A host is an actor with one CPU on a node with these labels. It runs one process of the reward
function at a time, as `rlpipe.rewards.workers.ProcessWorker` does in the stage's own machine: each
stage starts new ones, which have the function as it is then. Hosts stay for the next stage, and end
with the process that started them. If a host's node vanishes, its calls are repeated on another
one: that is no attempt of `reward.attempts`, because the function did not fail.

Entry point: `process_workers`.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray.calls import call
from rlpipe.config.data import RewardConfig, RewardFunction
from rlpipe.errors import ActorLost, DeadlineExceeded, ResourceError, RlpipeError
from rlpipe.rewards.reward_rows import StartWorker
from rlpipe.rewards.workers import START_TIMEOUT_S, Outcome, Pace, ProcessWorker
from rlpipe.types import Sample

ROOM_TIMEOUT_S = 120.0
"""Longest wait for a CPU on a node with the labels."""
GRACE_S = 30.0
"""Time for the answer of a host, beyond the deadlines of its calls and of a process's start."""
MAX_LOST = 5
"""Hosts that one worker may lose in one call."""


def process_workers(config: RewardConfig) -> StartWorker:
    """Return what makes the processes of a reward: on this machine, or on nodes of the cluster."""
    if config.worker_labels is None:
        return ProcessWorker
    return partial(ClusterWorker, tuple(sorted(config.worker_labels.items())))


class RewardHost:
    """The actor: one reward process at a time."""

    def __init__(self, folder: str) -> None:
        """`folder`: the working directory of the run."""
        os.chdir(folder)
        self._worker: ProcessWorker | None = None
        self._calls: asyncio.Task[Sequence[Outcome]] | None = None

    async def ready(self) -> None:
        """Answer once the actor has a place."""

    async def use(self, function: RewardFunction, args: Namespace | None) -> None:
        """Run this function from now on. Its process starts with the first call."""
        await self.stop()
        self._worker = ProcessWorker(function, args)

    async def call(self, calls: Sequence[Sequence[Sample]], timeout_s: float) -> Sequence[Outcome]:
        """See `rlpipe.rewards.workers.Worker`."""
        assert self._worker is not None
        self._calls = asyncio.ensure_future(self._worker.call(calls, timeout_s))
        return await self._calls

    async def stop(self) -> None:
        """End the process, also during a call."""
        if self._calls is not None:
            self._calls.cancel()
            with suppress(asyncio.CancelledError, RlpipeError):
                await self._calls
            self._calls = None
        if self._worker is not None:
            await self._worker.stop()
            self._worker = None


Labels = tuple[tuple[str, str], ...]
_idle: dict[tuple[Labels, object], list[ActorHandle]] = defaultdict(list)
"""Hosts without a function, by their labels and the Ray that they belong to."""


class ClusterWorker:
    """Runs the function in a process of a host. See `Worker`."""

    def __init__(self, labels: Labels, function: RewardFunction, args: Namespace | None = None):
        self._labels = labels
        self._function = function
        self._args = args
        self._host: ActorHandle | None = None
        self._pace = Pace()

    @property
    def at_once(self) -> int:
        return self._pace.at_once

    async def call(self, calls: Sequence[Sequence[Sample]], timeout_s: float) -> Sequence[Outcome]:
        """See `Worker`. Raises: ResourceError if no node with the labels has room."""
        deadline_s = len(calls) * timeout_s + START_TIMEOUT_S + GRACE_S
        lost: list[ActorLost] = []
        while len(lost) < MAX_LOST:
            try:
                host = self._host = self._host or await self._take_host()
                with self._pace:
                    return await call(
                        host.call.remote(calls, timeout_s), where="reward", deadline_s=deadline_s
                    )
            except ActorLost as error:
                self._host = None
                lost.append(error)
                if (watch := ray_watch.current()) is not None and watch.lost is not None:
                    raise
        raise ResourceError(
            "the nodes of the reward processes vanish",
            where="reward.worker_labels",
            found=f"{MAX_LOST} lost during one call; the last: {lost[-1]}",
            expected=f"nodes {self._named()}that stay, and have the folder {Path.cwd()}",
        ) from lost[-1]

    async def stop(self) -> None:
        """End the process. The host stays for the next worker."""
        host, self._host = self._host, None
        if host is not None:
            with suppress(ActorLost, DeadlineExceeded):
                await call(host.stop.remote(), where="reward", deadline_s=GRACE_S)
                _idle[self._key()].append(host)

    async def _take_host(self) -> ActorHandle:
        """Return a host for the function: one that is idle, or a new one."""
        idle = _idle[self._key()]
        while idle:
            host = idle.pop()
            # All idle hosts of a node vanish with it.
            with suppress(ActorLost):
                return await self._given_function(host)
        return await self._given_function(await self._start_host())

    async def _given_function(self, host: ActorHandle) -> ActorHandle:
        use = host.use.remote(self._function, self._args)
        await call(use, where="reward", deadline_s=GRACE_S)
        return host

    async def _start_host(self) -> ActorHandle:
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self._labels:
            options["label_selector"] = dict(self._labels)
        make: Any = ray.remote(RewardHost)
        host = make.options(**options).remote(str(Path.cwd()))
        try:
            await call(host.ready.remote(), where="reward", deadline_s=ROOM_TIMEOUT_S)
        except DeadlineExceeded:
            ray.kill(host)
            raise ResourceError(
                "no room for a reward process in the Ray cluster",
                where="reward.worker_labels",
                found=f"no free CPU in {ROOM_TIMEOUT_S:g} s",
                expected=f"one CPU for each process, on nodes {self._named()}".rstrip(),
                do="add such nodes, or set reward.workers to a smaller number",
            ) from None
        return host

    def _named(self) -> str:
        return f"with the labels {dict(self._labels)} " if self._labels else ""

    def _key(self) -> tuple[Labels, object]:
        return self._labels, ray_watch.current()
