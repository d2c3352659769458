"""Whose turn the trainer's ranks are: calls to them are collective, so they come one after the
other.

Not here: the ranks (`trainer_group`), or who may call them (`conductor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.errors import DeadlineExceeded


class TrainerTurn:
    """`group`, once there is one, and a lock around it that knows who holds it. Used by one event
    loop."""

    def __init__(self) -> None:
        self.group: TrainerGroup | None = None
        self._lock = asyncio.Lock()
        self._user = ""

    @property
    def taken(self) -> bool:
        """Does anybody call it now?"""
        return self._lock.locked()

    @asynccontextmanager
    async def exclusive(self, what: str, deadline_s: float) -> AsyncIterator[TrainerGroup]:
        """The group, while nobody else calls it. `what` it is wanted for tells others what they
        wait for.

        Raises: DeadlineExceeded naming who has it.
        """
        async with self.alone(what, deadline_s):
            assert self.group is not None, "open the cluster first"
            yield self.group

    @asynccontextmanager
    async def alone(self, what: str, deadline_s: float) -> AsyncIterator[None]:
        """As `exclusive`, whether there is a group or not: to put another one in its place."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the trainer is busy",
                where=f"trainer.{what}",
                found=f"trainer.{self._user} is running",
                expected=f"free within {deadline_s:g} s",
            ) from error
        self._user = what
        try:
            yield
        finally:
            self._lock.release()
