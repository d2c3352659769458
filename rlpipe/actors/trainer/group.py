"""`TrainerGroup`: all trainer ranks as one. Every call goes to every rank, because inside it is
collective.

A rank that fails leaves the others waiting in a collective, so after any failure the whole group is
killed, started again and restored. `ensure` does that: after it, all ranks hold the state that was
asked for.

A critic that has ranks of its own is part of the group, after the policy's ranks: two worlds with
one state, which is held, lost, saved and restored as a whole. Only what is about engines and their
GPUs is the policy's alone (`OF_POLICY`).

Not here: what a rank does with a call (`rank`, `trainer`, `critic_rank`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ray.actor import ActorHandle

from rlpipe.actors.ray.calls import call, end, gather
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, DeadlineExceeded, RlpipeError, TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.types import Stage

Each = TypeVar("Each")
Start = Callable[[int], ActorHandle]
STATUS = "status"
"""Concurrency group of the ranks' `status`: it answers while a call runs."""
STATUS_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.1
APART_S = 5.0
LESS_MEMORY = (
    "smaller: advantage.log_probs_max_tokens_per_gpu, and where engines share the GPU engine.sglang.mem_fraction_static; in a "
    "fork of the run (--fork RUN --run NEW) train.max_tokens_per_gpu, train.megatron.recompute_granularity=full, train.parallel"
)
"""What to do when a rank's GPU is full (torch.OutOfMemoryError)."""
OF_POLICY = frozenset({"push", "remembers", "write", "probe", "compare", "occupy"})
"""Methods that a critic's own ranks do not have."""


class TrainerGroup:
    """The ranks of one trainer, created by `start(rank)` when they are not there yet."""

    def __init__(
        self, start: Start, world_size: int, *, critic_ranks: int = 0, start_timeout_s: float
    ) -> None:
        """`world_size`: the policy's ranks; those of the critic are started with the numbers after
        them."""
        self._start = start
        self.world_size = world_size
        self.critic_ranks = critic_ranks
        self._start_timeout_s = start_timeout_s
        self.ranks = [start(rank) for rank in range(world_size + critic_ranks)]
        self._spec: TrainerSpec | None = None
        self._broken = False

    @classmethod
    def of(cls, start: Start, resources: ResourcesConfig) -> TrainerGroup:
        """As many ranks as a configuration asks for."""
        return cls(
            start,
            resources.trainer_ranks,
            critic_ranks=resources.critic_ranks,
            start_timeout_s=resources.start_timeout_s,
        )

    def is_from(self, start: Start) -> bool:
        """Are the ranks started by this?"""
        return self._start == start

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call all ranks; their answers in order of rank. After a failure the group is not usable
        until `ensure`."""
        return await self._answers(
            method, [(rank, arguments) for rank in self._of(method, self.ranks)], deadline_s
        )

    async def _answers(
        self, method: str, calls: Sequence[tuple[ActorHandle, Mapping[str, Any]]], deadline_s: float
    ) -> list[Any]:
        refs = [getattr(rank, method).remote(**arguments) for rank, arguments in calls]
        try:
            return await gather(refs, where=f"trainer.{method}", deadline_s=deadline_s)
        except RlpipeError as error:
            if isinstance(error, (ActorLost, DeadlineExceeded)):
                self._broken = True  # the other ranks wait in a collective, or all of them do
            if (
                type(error) is RlpipeError
            ):  # not one of ours: CUDA, NCCL, a bug; a process may be spoilt for every later call
                self._broken = True
                do = LESS_MEMORY if error.problem.startswith("OutOfMemoryError") else None
                raise TrainerError(
                    error.problem, where=error.where, found=error.found, do=do
                ) from error
            raise

    async def setup(self, spec: TrainerSpec) -> None:
        """Build the engine of a spec on all ranks; ranks of which some died are all started anew
        first.

        Raises: ConfigError, TrainerError, DeadlineExceeded.
        """
        self._spec = spec
        if self._broken or not await self._whole() or await self._switched(spec):
            await self.restart()
        await self._answers("setup", await self._meetings(spec), self._start_timeout_s)

    async def _meetings(self, spec: TrainerSpec) -> list[tuple[ActorHandle, dict[str, Any]]]:
        """What each rank is set up with: where its world meets, and where the two do."""
        of_all: dict[str, Any] = {"spec": spec, "master": await self._address(0)}
        policy = self.ranks[: self.world_size]
        critic = self.ranks[self.world_size :]
        if critic:
            of_all["meeting"] = await self._address(0)
        of_critic = {**of_all, "master": await self._address(self.world_size)} if critic else {}
        return [*((rank, of_all) for rank in policy), *((rank, of_critic) for rank in critic)]

    async def _address(self, rank: int) -> tuple[str, int]:
        address = self.ranks[rank].address.remote()
        return await call(address, where="trainer.address", deadline_s=self._start_timeout_s)

    async def is_up(self, spec: TrainerSpec) -> bool:
        """Would `setup` for this spec find nothing to do?"""
        statuses = None if self._broken or self._spec != spec else await self._settled()
        return (
            statuses is not None
            and all(status["ready"] for status in statuses)
            and not await self._switched(spec)
        )

    async def occupy(self, parts: Collection[str], *, deadline_s: float) -> list[dict[str, float]]:
        """Have all ranks keep these parts of the state in device memory, and no others
        (`DeviceMemory.occupy`).

        Ranks of which some are dead or hang are all started anew: blank ones have nothing there.
        """
        if self._broken or await self._settled() is None:
            await self.restart()
        return await self.call("occupy", parts=tuple(parts), deadline_s=deadline_s)

    async def initialise(
        self, key: str, start_from: str | None, *, deadline_s: float
    ) -> dict[str, str]:
        """Load the first weights into a trainer that has trained nothing (started anew if need be);
        what `Rank.initialise` answers."""
        assert self._spec is not None, "set up the group first"
        statuses = await self._statuses()
        if any(status["held"] or status["dirty"] for status in statuses):
            await self.restart()
            await self.setup(self._spec)
        return (
            await self.call("initialise", key=key, start_from=start_from, deadline_s=deadline_s)
        )[0]

    async def holds(self, state: str) -> bool:
        """Do all ranks hold this state? A group that does not answer holds nothing."""
        return await self.held() == state

    async def held(self) -> str | None:
        """The state that all ranks hold; None if they are blank, half-trained, of different states,
        hung or dead."""
        if self._broken:
            return None
        try:
            statuses = await self._statuses()
        except RlpipeError:
            return None
        states = {
            status["held"] if status["ready"] and not status["dirty"] else None
            for status in statuses
        }
        return states.pop() if len(states) == 1 else None

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> dict[str, Any] | None:
        """Make all ranks hold the end of a lineage. None if they did already, else what `restore`
        answered."""
        if await self.holds(lineage.target):
            return None
        assert self._spec is not None, "set up the group first"
        if self._broken or not await self._usable(fresh=lineage.base_stage is Stage.INIT):
            await self.restart()
            await self.setup(self._spec)
        return (await self.call("restore", lineage=lineage, deadline_s=deadline_s))[0]

    async def _whole(self) -> bool:
        """Do all ranks answer, and are either all set up or none?"""
        statuses = await self._settled()
        return statuses is not None and len({status["ready"] for status in statuses}) == 1

    async def _switched(self, spec: TrainerSpec) -> bool:
        """Were the ranks set up with the other kind of arithmetic? A process keeps the one that it
        began with."""
        found = {status["deterministic"] for status in await self._statuses()}
        return bool(found - {None, spec.deterministic})

    async def _usable(self, *, fresh: bool) -> bool:
        """Are all ranks alive, set up, and out of any half-finished call? `fresh`: and have they
        trained nothing?"""
        statuses = await self._settled()
        usable = statuses is not None and all(
            status["ready"] and not status["dirty"] for status in statuses
        )
        return usable and (not fresh or all(status["fresh"] for status in statuses or ()))

    async def _settled(self) -> list[dict[str, Any]] | None:
        """The ranks' statuses once none of them is busy: a caller before us may have died in the
        middle of its calls.

        None if one is dead, or if they are apart for longer than it takes to send a call: then some
        wait in a collective that the others will not join.
        """
        apart_s: float | None = None
        end_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < end_s:
            try:
                statuses = await self._statuses()
            except RlpipeError:
                return None
            if not any(status["busy"] for status in statuses):
                return statuses
            now_s = time.monotonic()
            apart_s = (apart_s or now_s) if self._apart(statuses) else None
            if apart_s is not None and now_s - apart_s > APART_S:
                return None
            await asyncio.sleep(LOOK_INTERVAL_S)
        return None

    def _apart(self, statuses: Sequence[Mapping[str, Any]]) -> bool:
        """Is a rank busy with a call that another one, whom it concerns, has not got, or has left
        with an error?

        One that has done its part is not apart: to speak with engines, or with a teacher, is left
        to the first.
        """
        for method in {status["busy"] for status in statuses} - {None}:
            got = {
                (status["calls"].get(method, 0), status["failed"] == method)
                for status in self._of(method, statuses)
            }
            if len(got) > 1:
                return True
        return False

    def _of(self, method: str, each: Sequence[Each]) -> Sequence[Each]:
        """Of what there is one for each rank, those for the ranks that a method is called on."""
        return each[: self.world_size] if method in OF_POLICY else each

    async def _statuses(self) -> list[dict[str, Any]]:
        refs = [rank.status.options(concurrency_group=STATUS).remote() for rank in self.ranks]
        return await gather(refs, where="trainer.status", deadline_s=STATUS_TIMEOUT_S)

    async def restart(self) -> None:
        """Replace all ranks by blank ones."""
        await asyncio.to_thread(self.kill)
        number = self.world_size + self.critic_ranks
        self.ranks = await asyncio.to_thread(lambda: [self._start(rank) for rank in range(number)])
        self._broken = False

    def kill(self) -> None:
        """End all ranks at once."""
        end(self.ranks)
