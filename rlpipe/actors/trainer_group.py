"""`TrainerGroup`: all trainer ranks as one. Every call goes to every rank, because inside it is collective.

A rank that fails leaves the others waiting in a collective, so after any failure the whole group is killed, started again
and restored. `ensure` does that: after it, all ranks hold the state that was asked for.

Not here: what a rank does with a call (`trainer`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.actor import ActorHandle

from rlpipe.actors.calls import call, end, gather
from rlpipe.actors.trainer import TrainerSpec
from rlpipe.errors import RlpipeError, TrainerError
from rlpipe.lineage import Lineage

Start = Callable[[int], ActorHandle]


class TrainerGroup:
    """The ranks of one trainer, created by `start(rank)` when they are not there yet."""

    def __init__(self, start: Start, world_size: int, *, start_timeout_s: float) -> None:
        self._start, self.world_size, self._start_timeout_s = start, world_size, start_timeout_s
        self.ranks = [start(rank) for rank in range(world_size)]
        self._spec: TrainerSpec | None = None

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call all ranks; their answers in order of rank. After a failure the group is not usable until `ensure`."""
        refs = [getattr(rank, method).remote(**arguments) for rank in self.ranks]
        try:
            return await gather(refs, where=f"trainer.{method}", deadline_s=deadline_s)
        except RlpipeError as error:
            if type(error) is RlpipeError:  # not one of ours: CUDA, NCCL, a bug; the group has to be started anew
                raise TrainerError(error.problem, where=error.where, found=error.found) from error
            raise

    async def setup(self, spec: TrainerSpec) -> None:
        """Build the engine of a spec on all ranks; ranks of which some died are all started anew first.

        Raises: ConfigError, TrainerError, DeadlineExceeded.
        """
        self._spec = spec
        if not await self._whole():
            self.restart()
        address = self.ranks[0].address.remote(spec.num_nodes)
        master = await call(address, where="trainer.address", deadline_s=self._start_timeout_s)
        await self.call("setup", spec=spec, master=master, deadline_s=self._start_timeout_s)

    async def initialise(self, key: str, start_from: str | None, *, deadline_s: float) -> str:
        """Load the first weights into a trainer that has trained nothing (started anew if need be); the state's digest."""
        assert self._spec is not None, "set up the group first"
        statuses = await self.call("status", deadline_s=deadline_s)
        if any(status["held"] or status["dirty"] for status in statuses):
            self.restart()
            await self.setup(self._spec)
        answers = await self.call("initialise", key=key, start_from=start_from, deadline_s=deadline_s)
        return answers[0]["state_digest"]

    async def holds(self, state: str) -> bool:
        """Do all ranks hold this state? A group that does not answer holds nothing."""
        try:
            statuses = await self.call("status", deadline_s=60.0)
        except RlpipeError:
            return False
        return all(status["ready"] and status["held"] == state and not status["dirty"] for status in statuses)

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> dict[str, Any] | None:
        """Make all ranks hold the end of a lineage. None if they did already, else what `restore` answered."""
        if await self.holds(lineage.target):
            return None
        assert self._spec is not None, "set up the group first"
        if not await self._usable():
            self.restart()
            await self.setup(self._spec)
        return (await self.call("restore", lineage=lineage, deadline_s=deadline_s))[0]

    async def _whole(self) -> bool:
        """Do all ranks answer, and are either all set up or none?"""
        try:
            statuses = await self.call("status", deadline_s=self._start_timeout_s)
        except RlpipeError:
            return False
        return len({status["ready"] for status in statuses}) == 1

    async def _usable(self) -> bool:
        """Are all ranks alive, set up, and out of any half-finished call?"""
        try:
            statuses = await self.call("status", deadline_s=60.0)
        except RlpipeError:
            return False
        return all(status["ready"] and not status["dirty"] for status in statuses)

    def restart(self) -> None:
        """Replace all ranks by blank ones."""
        self.kill()
        self.ranks = [self._start(rank) for rank in range(self.world_size)]

    def kill(self) -> None:
        """End all ranks at once."""
        end(self.ranks)
