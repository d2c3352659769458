"""Run a verifier on the event loop, in a thread, or in a process, with a deadline for each call.

| worker | after a missed deadline | after a crash of the verifier |
|---|---|---|
| `LoopWorker` | cancels the coroutine and does not wait for it | the run's process ends |
| `ThreadWorker` | abandons the thread; the next call gets a new one | the run's process ends |
| `ProcessWorker` | kills the process; the next call gets a new one | a RewardError of the call |
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlpipe.config.data import RewardFunction
from rlpipe.errors import DeadlineExceeded, ResourceError, RewardError
from rlpipe.rewards.scorer import Score, Scorer
from rlpipe.system.child_processes import end_group, ended_how, exit_status
from rlpipe.types import Sample

FRAME = struct.Struct("<QQ")
"""Header of a message to or from a reward process: number of the call, bytes of the message."""
START_TIMEOUT_S = 120.0
EXIT_GRACE_S = 0.5
"""Longest time between the end of a process and its last bytes, in either order."""
MAX_AT_ONCE = 256
AT_ONCE_S = 0.1
"""Longest time between two reports of a worker whose calls are short."""

Outcome = list[Score] | RewardError | DeadlineExceeded
"""The scores of one call, or its error."""


class Worker(Protocol):
    """Runs calls of a verifier. `reward_rows.open_workers` makes and stops it.

    One task at a time uses it.
    """

    @property
    def at_once(self) -> int:
        """Number of calls to give to the worker together."""
        ...

    async def call(self, calls: Sequence[Sequence[Sample]], timeout_s: float) -> Sequence[Outcome]:
        """Call the verifier once for each of `calls`: one sample or one group. Return the outcomes.

        Raises: ConfigError if it cannot be loaded, ResourceError if a process does not start.
        """
        ...

    async def stop(self) -> None: ...


class Pace:
    """Number of short calls that together take about `AT_ONCE_S`. Entered for all of them."""

    def __init__(self) -> None:
        self.at_once = 1
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._start_s
        if seconds < AT_ONCE_S / 2:
            self.at_once = min(2 * self.at_once, MAX_AT_ONCE)
        elif seconds > AT_ONCE_S:
            self.at_once = max(1, self.at_once // 2)


class SingleCalls(ABC):
    """A worker that takes one call at a time."""

    at_once = 1

    async def call(self, calls: Sequence[Sequence[Sample]], timeout_s: float) -> Sequence[Outcome]:
        """See `Worker`."""
        outcomes: list[Outcome] = []
        for samples in calls:
            try:
                outcomes.append(await self._score(samples, timeout_s))
            except (RewardError, DeadlineExceeded) as error:
                outcomes.append(error)
        return outcomes

    @abstractmethod
    async def _score(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        """Call the verifier for one sample or one group. Raises: RewardError, DeadlineExceeded."""


class LoopWorker(SingleCalls):
    """Awaits an async function on the stage's event loop."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    async def _score(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        call = asyncio.ensure_future(self._scorer.score_async(samples))
        try:
            await asyncio.wait({call}, timeout=timeout_s)
            if not call.done():
                raise _late_error(samples, timeout_s)
            return call.result()
        finally:
            # Not awaited: a function that catches its cancellation may never end.
            call.cancel()

    async def stop(self) -> None:
        """Do nothing: the worker holds no resource."""


class ThreadWorker:
    """Runs a plain function in one thread of the stage's process.

    The thread gets several short calls at once: to wait for each one takes half a millisecond.
    """

    def __init__(self, scorer: Scorer):
        self._scorer = scorer
        self._batches: queue.SimpleQueue[_Batch | None] | None = None
        self._pace = Pace()

    @property
    def at_once(self) -> int:
        return self._pace.at_once

    async def call(self, calls: Sequence[Sequence[Sample]], timeout_s: float) -> Sequence[Outcome]:
        """See `Worker`."""
        outcomes: list[Outcome] = []
        with self._pace:
            while len(outcomes) < len(calls):
                outcomes += await self._until_late(calls[len(outcomes) :], timeout_s)
        return outcomes

    async def _until_late(
        self, calls: Sequence[Sequence[Sample]], timeout_s: float
    ) -> list[Outcome]:
        """Return the outcomes of all calls, or up to the first one that misses its deadline."""
        batch = self._begin(calls)
        finished = asyncio.wrap_future(batch.finished)
        try:
            while not finished.done():
                number, began_s = batch.current
                left_s = began_s + timeout_s - time.monotonic()
                await asyncio.wait({finished}, timeout=max(0.0, left_s))
                if left_s <= 0 and len(batch.outcomes) == number:
                    return [*batch.outcomes[:number], _late_error(calls[number], timeout_s)]
            return batch.outcomes
        finally:
            if not finished.done():
                batch.abandoned = True
                await self.stop()

    def _begin(self, calls: Sequence[Sequence[Sample]]) -> _Batch:
        if self._batches is None:
            self._batches = queue.SimpleQueue()
            threading.Thread(
                target=_serve_thread,
                args=(self._scorer, self._batches),
                daemon=True,
                name="reward",
            ).start()
        batch = _Batch(calls, (0, time.monotonic()))
        self._batches.put(batch)
        return batch

    async def stop(self) -> None:
        if self._batches is not None:
            self._batches.put(None)
            self._batches = None


@dataclass(slots=True)
class _Batch:
    """Calls for a thread, which writes `current` and `outcomes`."""

    calls: Sequence[Sequence[Sample]]
    current: tuple[int, float]
    """Number of the call that runs, and when it began (time.monotonic)."""
    outcomes: list[Outcome] = field(default_factory=list)
    finished: Future[None] = field(default_factory=Future)
    abandoned: bool = False
    """The thread begins no further call."""


def _serve_thread(scorer: Scorer, batches: queue.SimpleQueue[_Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        for number, samples in enumerate(batch.calls):
            if batch.abandoned:
                return
            batch.current = (number, time.monotonic())
            try:
                batch.outcomes.append(scorer.score(samples))
            except RewardError as error:
                batch.outcomes.append(error)
        # False after a missed deadline, which cancelled the future.
        if batch.finished.set_running_or_notify_cancel():
            batch.finished.set_result(None)


class ProcessWorker(SingleCalls):
    """Runs the function in a separate process (`rlpipe.rewards.worker_process`).

    A process that misses a deadline is killed; the next call starts another one. Each call has a
    number, and its answer must have the same number. Any other answer ends the process, so no call
    gets the answer of another one.
    """

    def __init__(self, function: RewardFunction, args: Namespace | None = None):
        self._function = function
        self._args = args
        self._process: Process | None = None
        self._calls = 0

    async def _score(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        await self._start()
        try:
            answer = await asyncio.wait_for(self._request(list(samples)), timeout_s)
        except TimeoutError as error:
            await self.stop()
            raise _late_error(samples, timeout_s) from error
        except _DiedError as error:
            raise RewardError(
                "the reward process died", found=await self._cause_of_death()
            ) from error
        except RewardError:
            await self.stop()
            raise
        if isinstance(answer, RewardError):
            raise answer
        return answer

    async def stop(self) -> None:
        """Kill the process and its process group."""
        process = self._process
        self._process = None
        if process is not None:
            await end_group(process)

    async def _cause_of_death(self) -> str:
        """Stop the worker and return how its process ended, as text."""
        process = self._process
        assert process is not None
        # The pipes can close a moment before the process has ended.
        with suppress(TimeoutError):
            await asyncio.wait_for(exit_status(process), EXIT_GRACE_S)
        status = process.returncode
        cause = "its pipe was closed" if status is None else ended_how(status)
        await self.stop()
        return cause

    async def _start(self) -> None:
        """Start the process and load the function in it, unless it is running."""
        if self._process is not None:
            return
        # The process must import rlpipe from any working directory.
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._calls = 0
        # start_new_session: the process leads a group, so that its children are killed with it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlpipe.rewards.worker_process",
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        setup = (sys.path, self._function, self._args)
        try:
            load_error = await asyncio.wait_for(self._request(setup), START_TIMEOUT_S)
        except TimeoutError as error:
            await self.stop()
            raise _start_error(f"no answer within {START_TIMEOUT_S} s") from error
        except _DiedError as error:
            raise _start_error(await self._cause_of_death()) from error
        except RewardError:
            await self.stop()
            raise
        if load_error is not None:
            await self.stop()
            raise load_error

    async def _request(self, message: object) -> Any:
        """Send the next message and return its answer.

        Raises: _DiedError if the process ends; RewardError for an unexpected answer.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        number = self._calls
        self._calls += 1
        content = pickle.dumps(message)
        try:
            process.stdin.write(FRAME.pack(number, len(content)) + content)
            await process.stdin.drain()
        except ConnectionError as error:
            raise _DiedError from error
        answer_number, size = FRAME.unpack(await _read(process, FRAME.size))
        if answer_number != number:
            raise RewardError(
                "the reward process answered another call",
                found=f"an answer to call {answer_number}",
                expected=f"the answer to call {number}",
                do="check the file descriptors that the reward function writes to: "
                "user code wrote to the pipe of the process",
            )
        answer = await _read(process, size)
        try:
            return pickle.loads(answer)
        except Exception as error:  # unpickling arbitrary bytes can raise anything
            raise RewardError(
                "the answer of the reward process cannot be unpickled", found=f"{size} bytes"
            ) from error


class _DiedError(Exception):
    """The process ended before it answered."""


def _start_error(found: str) -> ResourceError:
    return ResourceError("a reward process did not start", where="reward.workers", found=found)


async def _read(process: Process, size: int) -> bytes:
    """Read `size` bytes from the process. Raises: _DiedError if it ends first."""
    assert process.stdout is not None
    # A program that the function started can keep the pipe open, so the end of the process is
    # awaited too.
    reading = asyncio.ensure_future(process.stdout.readexactly(size))
    ending = asyncio.ensure_future(exit_status(process))
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # the last bytes of the process can still be in the pipe
            await asyncio.wait({reading}, timeout=EXIT_GRACE_S)
        if not reading.done():
            raise _DiedError
        return reading.result()
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise _DiedError from error
    finally:
        reading.cancel()
        ending.cancel()


def _late_error(samples: Sequence[Sample], timeout_s: float) -> DeadlineExceeded:
    where = f"reward/{samples[0].group_id}" + (f"/{samples[0].index}" if len(samples) == 1 else "")
    return DeadlineExceeded(
        "the verifier did not answer",
        where=where,
        expected=f"within {timeout_s} s (reward.sample_timeout_s)",
    )
