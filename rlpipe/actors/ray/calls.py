"""Calling actors: every wait has a deadline, and every failure says which actor, where and why.

Not here: which actors there are (`cluster`), or what to do about a failure (the stage that called).
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
    """The results of several calls, in order, within one deadline; the first failure ends the wait.

    Raises: what the actor raised, if it is one of ours; ActorLost if its process is gone, or Ray
    is; DeadlineExceeded.
    """
    waits = [asyncio.ensure_future(_result(ref, where)) for ref in refs]
    try:
        async with asyncio.timeout(deadline_s):
            return await _unless_ray_dies(waits, where)
    except TimeoutError as error:
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
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _unless_ray_dies(waits: Sequence[asyncio.Future[Any]], where: str) -> list[Any]:
    """Without this a call to an actor of a Ray that has died would wait until its deadline, which
    may be hours."""
    watch = ray_watch.current()
    if watch is None:
        return list(await asyncio.gather(*waits))
    together = asyncio.gather(*waits)
    lost = watch.until_lost()
    together.add_done_callback(
        lambda future: future.cancelled() or future.exception()
    )  # it may end unheard
    try:
        await asyncio.wait({together, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not together.done() and (error := watch.lost) is not None:
            error.add_note(f"while waiting for {where}")
            raise error
        return list(together.result())
    finally:
        lost.cancel()
        together.cancel()


async def call(ref: ray.ObjectRef, *, where: str, deadline_s: float) -> Any:
    """The result of one call. Raises: as `gather`."""
    return (await gather([ref], where=where, deadline_s=deadline_s))[0]


def end(actors: Sequence[ActorHandle]) -> None:
    """Kill actors' processes, all at once; when this returns their names are free."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
    for actor in actors:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=END_TIMEOUT_S)
        except RayError:
            continue


class Patience:
    """With an actor that is looked at again and again: one that hangs is ended, so that the next
    look finds it lost."""

    def __init__(self, looks: int = 3) -> None:
        """`looks`: so many in a row without an answer are enough."""
        self._looks = looks
        self._missed = 0

    def answered(self) -> None:
        """It did."""
        self._missed = 0

    async def missed(self, actor: ActorHandle) -> None:
        """It did not."""
        self._missed += 1
        if self._missed >= self._looks:
            self._missed = 0
            await asyncio.to_thread(end, [actor])


async def call_or_end(
    actor: ActorHandle, ref: ray.ObjectRef, *, where: str, deadline_s: float
) -> Any:
    """As `call`. An actor that is late, and does not say either that it is there, is ended: who
    asks for it next gets another."""
    try:
        return await call(ref, where=where, deadline_s=deadline_s)
    except DeadlineExceeded:
        try:
            await call(actor.__ray_ready__.remote(), where=where, deadline_s=READY_TIMEOUT_S)
        except DeadlineExceeded:
            await asyncio.to_thread(end, [actor])
        raise


async def _result(ref: ray.ObjectRef, where: str) -> Any:
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RlpipeError):
            cause.add_note(f"raised in {where}")
            raise cause from None
        raise RlpipeError(
            f"{type(cause).__name__}: {cause}", where=where, found=_last_lines(str(error))
        ) from error
    except RayError as error:
        raise ActorLost(
            "the actor's process is gone", where=where, found=_last_lines(str(error))
        ) from error


def _last_lines(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
