"""Calls to Ray actors with deadlines and named failures.

`call` and `gather` wait for results. Each wait has a deadline, and each failure names the actor,
the method and the cause. `kill_actors` ends processes, `HangDetector` finds actors that stopped
answering.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rlpipe.actors.ray import watch as ray_watch
from rlpipe.errors import ActorLost, DeadlineExceeded, RlpipeError

END_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 60.0


async def gather(refs: Sequence[ray.ObjectRef], *, where: str, deadline_s: float) -> list[Any]:
    """Return the results of several calls, in order, within one deadline.

    The first failure ends the wait. Raises: the actor's error if it is an RlpipeError; ActorLost if
    the actor's process or Ray has died; DeadlineExceeded.
    """
    waits = [asyncio.ensure_future(_result(ref, where)) for ref in refs]
    try:
        async with asyncio.timeout(deadline_s):
            return await _gather_while_ray_lives(waits, where)
    except TimeoutError as error:
        # DeadlineExceeded is a TimeoutError: the actor raised it, this wait did not run out
        if isinstance(error, DeadlineExceeded):
            raise
        late = [
            str(number) for number, wait in enumerate(waits) if not wait.done() or wait.cancelled()
        ]
        raise DeadlineExceeded(
            "did not answer in time",
            where=where,
            found=f"no answer of call {', '.join(late)}",
            expected=f"within {deadline_s:g} s",
        ) from error
    finally:
        # Cancelling the wait does not cancel the actor's method.
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _gather_while_ray_lives(waits: Sequence[asyncio.Future[Any]], where: str) -> list[Any]:
    """Gather results, and raise ActorLost as soon as Ray dies.

    Ray itself leaves a call to an actor of a dead Ray waiting until its deadline, which may be
    hours.
    """
    watch = ray_watch.current()
    if watch is None:
        return list(await asyncio.gather(*waits))
    results = asyncio.gather(*waits)
    lost = watch.until_lost()
    # Retrieve the exception, or asyncio logs an error if the future is never awaited.
    results.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        await asyncio.wait({results, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not results.done() and (error := watch.lost) is not None:
            error.add_note(f"while waiting for {where}")
            raise error
        return list(results.result())
    finally:
        lost.cancel()
        results.cancel()


async def call(ref: ray.ObjectRef, *, where: str, deadline_s: float) -> Any:
    """Return the result of one call. Raises: as `gather`."""
    return (await gather([ref], where=where, deadline_s=deadline_s))[0]


def kill_actors(actors: Sequence[ActorHandle]) -> None:
    """Kill the processes of these actors at once. Their names are free when this returns."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
    for actor in actors:
        try:
            # `ray.kill` returns before the process ends; this call fails once it has ended
            ray.get(actor.__ray_ready__.remote(), timeout=END_TIMEOUT_S)
        except RayError:
            continue


class HangDetector:
    """Kill an actor that has missed several status checks in a row.

    The next check then finds the actor lost and starts another.
    """

    def __init__(self, max_missed: int = 3) -> None:
        self._max_missed = max_missed
        self._missed = 0

    def answered(self) -> None:
        """Count a check that the actor answered."""
        self._missed = 0

    async def missed(self, actor: ActorHandle) -> None:
        """Count a check without an answer."""
        self._missed += 1
        if self._missed >= self._max_missed:
            self._missed = 0
            await asyncio.to_thread(kill_actors, [actor])


async def call_or_kill(
    actor: ActorHandle, ref: ray.ObjectRef, *, where: str, deadline_s: float
) -> Any:
    """Return the result of one call; kill the actor if the call is late and the actor hangs.

    An actor that is late but still answers is left alone. Raises: as `gather`.
    """
    try:
        return await call(ref, where=where, deadline_s=deadline_s)
    except DeadlineExceeded:
        try:
            await call(actor.__ray_ready__.remote(), where=where, deadline_s=READY_TIMEOUT_S)
        except DeadlineExceeded:
            await asyncio.to_thread(kill_actors, [actor])
        raise


async def _result(ref: ray.ObjectRef, where: str) -> Any:
    """Return one result. Raises: the errors of `gather` in place of Ray's."""
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlpipeError):
            cause.add_note(f"raised in {where}")
            # without Ray's wrapper, which repeats the message and the remote trace
            raise cause from None
        # The class of a foreign error may not exist in this process; its text does.
        raise RlpipeError(
            f"{type(cause).__name__}: {cause}", where=where, found=_last_lines(str(error))
        ) from error
    except RayError as error:
        raise ActorLost(
            "the actor's process is gone", where=where, found=_last_lines(str(error))
        ) from error


def _last_lines(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
