"""Who runs a verifier: the event loop, a thread, or a process that can be killed. All keep a deadline for each call.

Only a process ends a verifier that hangs: a thread that misses its deadline is left to itself (it is a daemon, and its
late answer goes nowhere) and the next call gets a new one.

Not here: which samples make a call, retries, what an error means (`base`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import struct
import sys
import threading
from argparse import Namespace
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from rlpipe.config.data import RewardFunction
from rlpipe.errors import DeadlineExceeded, ResourceError, RewardError
from rlpipe.rewards.python import Score, Scorer
from rlpipe.types import Sample

HEADER = struct.Struct("<Q")
START_TIMEOUT_S = 120.0


class Worker(Protocol):
    """Made by `base.score` for one stage, used by one task at a time, stopped by it whatever happens."""

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        """One call of the verifier.

        Raises: RewardError, DeadlineExceeded; ConfigError if it cannot be loaded, ResourceError if a process does not start.
        """
        ...

    async def stop(self) -> None: ...


class LoopWorker:
    """Awaits an async function on the stage's own event loop."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        try:
            return await asyncio.wait_for(self._scorer.score_async(samples), timeout_s)
        except TimeoutError as error:
            raise _late(samples, timeout_s) from error

    async def stop(self) -> None:
        """Nothing is held."""


class ThreadWorker:
    """Runs a plain function in one thread of the stage's own process."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer
        self._calls: queue.SimpleQueue | None = None

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve_thread, args=(self._scorer, self._calls), daemon=True, name="reward").start()
        answer: Future[list[Score]] = Future()
        self._calls.put((samples, answer))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)
        except TimeoutError as error:
            await self.stop()
            raise _late(samples, timeout_s) from error

    async def stop(self) -> None:
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve_thread(scorer: Scorer, calls: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        samples, answer = call
        try:
            result = scorer.score(samples)
        except RewardError as error:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        else:
            if answer.set_running_or_notify_cancel():
                answer.set_result(result)


class ProcessWorker:
    """Runs the function in a process of its own (`rlpipe.rewards.worker`), killed when it is late and started again."""

    def __init__(self, function: RewardFunction, args: Namespace | None = None):
        self._function, self._args = function, args
        self._process: Process | None = None

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        process = await self._started()
        try:
            answer = await asyncio.wait_for(_exchange(process, list(samples)), timeout_s)
        except TimeoutError as error:
            await self.stop()
            raise _late(samples, timeout_s) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise RewardError("the reward's process died", found=f"exit status {await self._ended(process)}") from error
        if isinstance(answer, RewardError):
            raise answer
        return answer

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _started(self) -> Process:
        if self._process is not None:
            return self._process
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rlpipe.rewards.worker", stdin=PIPE, stdout=PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        try:
            ready = await asyncio.wait_for(_exchange(process, (sys.path, self._function, self._args)), START_TIMEOUT_S)
        except TimeoutError as error:
            await self.stop()
            late = f"no answer within {START_TIMEOUT_S} s"
            raise ResourceError("a reward process did not start", where="reward.workers", found=late) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status = await self._ended(process)
            raise ResourceError(
                "a reward process did not start", where="reward.workers", found=f"exit status {status}"
            ) from error
        if ready is not None:
            await self.stop()
            raise ready
        return process

    async def _ended(self, process: Process) -> int:
        self._process = None
        return await process.wait()


async def _exchange(process: Process, message: object):
    assert process.stdin is not None
    assert process.stdout is not None
    content = pickle.dumps(message)
    process.stdin.write(HEADER.pack(len(content)) + content)
    await process.stdin.drain()
    (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return pickle.loads(await process.stdout.readexactly(size))


def _late(samples: Sequence[Sample], timeout_s: float) -> DeadlineExceeded:
    where = f"reward/{samples[0].group_id}" + (f"/{samples[0].index}" if len(samples) == 1 else "")
    return DeadlineExceeded(
        "the verifier did not answer", where=where, expected=f"within {timeout_s} s (reward.sample_timeout_s)"
    )
