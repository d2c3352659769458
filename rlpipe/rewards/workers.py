"""Who runs a verifier: the event loop, a thread, or a process that can be killed. All keep a
deadline for each call.

Only a process ends a verifier that hangs: a thread that misses its deadline is left to itself (it
is a daemon, and its late answer goes nowhere) and the next call gets a new one. An async function
is cancelled, and left to itself if it goes on.

Only a process survives a verifier that crashes: with `reward.workers: 0` a segmentation fault in it
ends the run's own process.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rlpipe.config.data import RewardFunction
from rlpipe.errors import DeadlineExceeded, ResourceError, RewardError
from rlpipe.rewards.python import Score, Scorer
from rlpipe.system.child_processes import end_group, ended_how, exit_status
from rlpipe.types import Sample

FRAME = struct.Struct("<QQ")
"""What comes before a message to and from a reward's process: the number of the call, and the bytes
of the message."""
START_TIMEOUT_S = 120.0
LAST_WORDS_S = 0.5
"""How long the last bytes may take after a process has ended, and its end after the last bytes."""


class Worker(Protocol):
    """Made by `base.score` for one stage, used by one task at a time, stopped by it whatever
    happens."""

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        """One call of the verifier.

        Raises: RewardError, DeadlineExceeded; ConfigError if it cannot be loaded, ResourceError if
        a process does not start.
        """
        ...

    async def stop(self) -> None: ...


class LoopWorker:
    """Awaits an async function on the stage's own event loop."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        call = asyncio.ensure_future(self._scorer.score_async(samples))
        try:
            await asyncio.wait({call}, timeout=timeout_s)
            if not call.done():
                raise _late(samples, timeout_s)
            return call.result()
        finally:
            # and not waited for: a function that catches its cancellation could take for ever
            call.cancel()

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
            threading.Thread(
                target=_serve_thread, args=(self._scorer, self._calls), daemon=True, name="reward"
            ).start()
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
    """Runs the function in a process of its own (`rlpipe.rewards.worker`), killed when it is late
    and started again.

    Each call has a number, and its answer has to have the same one. Anything else ends the process:
    an answer is never taken for that of another call.
    """

    def __init__(self, function: RewardFunction, args: Namespace | None = None):
        self._function = function
        self._args = args
        self._process: Process | None = None
        self._calls = 0

    async def call(self, samples: Sequence[Sample], timeout_s: float) -> list[Score]:
        await self._start()
        try:
            answer = await asyncio.wait_for(self._ask(list(samples)), timeout_s)
        except TimeoutError as error:
            await self.stop()
            raise _late(samples, timeout_s) from error
        except _DiedError as error:
            raise RewardError(
                "the reward's process died", found=await self._how_it_died()
            ) from error
        except RewardError:
            await self.stop()
            raise
        if isinstance(answer, RewardError):
            raise answer
        return answer

    async def stop(self) -> None:
        """End the process, and what it started."""
        process = self._process
        self._process = None
        if process is not None:
            await end_group(process)

    async def _how_it_died(self) -> str:
        """How the process ended, in words; its pipes may be closed a moment before it has. What it
        started is ended."""
        process = self._process
        assert process is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(exit_status(process), LAST_WORDS_S)
        how = "its pipe was closed" if process.returncode is None else ended_how(process.returncode)
        await self.stop()
        return how

    async def _start(self) -> None:
        if self._process is not None:
            return
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._calls = 0
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlpipe.rewards.worker",
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            ready = await asyncio.wait_for(
                self._ask((sys.path, self._function, self._args)), START_TIMEOUT_S
            )
        except TimeoutError as error:
            await self.stop()
            late = f"no answer within {START_TIMEOUT_S} s"
            raise ResourceError(
                "a reward process did not start", where="reward.workers", found=late
            ) from error
        except _DiedError as error:
            found = await self._how_it_died()
            raise ResourceError(
                "a reward process did not start", where="reward.workers", found=found
            ) from error
        except RewardError:
            await self.stop()
            raise
        if ready is not None:
            await self.stop()
            raise ready

    async def _ask(self, message: object) -> Any:
        """The answer to the next message. Raises: _DiedError; RewardError for anything that is not
        its answer."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        number = self._calls
        self._calls = self._calls + 1
        content = pickle.dumps(message)
        try:
            process.stdin.write(FRAME.pack(number, len(content)) + content)
            await process.stdin.drain()
        except ConnectionError as error:
            raise _DiedError from error
        answered, size = FRAME.unpack(await _read(process, FRAME.size))
        if answered != number:
            raise RewardError(
                "the reward's process gave an answer to another call",
                found=f"an answer to call {answered}",
                expected=f"the answer to call {number}",
                do="something else than this project writes to its pipe; see what the reward function does with descriptors",
            )
        answer = await _read(process, size)
        try:
            return pickle.loads(answer)
        except Exception as error:  # whatever the bytes are
            raise RewardError(
                "the answer of the reward's process cannot be read", found=f"{size} bytes"
            ) from error


class _DiedError(Exception):
    """The process ended before it answered."""


async def _read(process: Process, size: int) -> bytes:
    """Raises: _DiedError if the process ends first, whoever else holds its pipe."""
    assert process.stdout is not None
    reading = asyncio.ensure_future(process.stdout.readexactly(size))
    ending = asyncio.ensure_future(exit_status(process))
    try:
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # what it wrote before it ended may still be in the pipe
            await asyncio.wait({reading}, timeout=LAST_WORDS_S)
        if not reading.done():
            raise _DiedError
        return reading.result()
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise _DiedError from error
    finally:
        reading.cancel()
        ending.cancel()


def _late(samples: Sequence[Sample], timeout_s: float) -> DeadlineExceeded:
    where = f"reward/{samples[0].group_id}" + (f"/{samples[0].index}" if len(samples) == 1 else "")
    return DeadlineExceeded(
        "the verifier did not answer",
        where=where,
        expected=f"within {timeout_s} s (reward.sample_timeout_s)",
    )
