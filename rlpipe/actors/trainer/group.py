"""`TrainerGroup`: all trainer ranks as one. `TrainerLock`: exclusive use of the group.

Calls go to every rank, because ranks compute in collectives. A rank that fails leaves the others
waiting in a collective. So after any failure the whole group is killed, started again and
restored; `ensure` does that, and afterwards all ranks hold the wanted state.

A critic with ranks of its own is part of the group, after the policy's ranks. The two worlds hold,
lose, save and restore one state. Only calls about engines and their GPUs (`POLICY_METHODS`) go to
the policy's ranks alone, and those of `RANK_0_METHODS` to one rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ray.actor import ActorHandle

from rlpipe.actors.ray.calls import call, gather, kill_actors
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, DeadlineExceeded, RlpipeError, TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.types import Stage

PerRank = TypeVar("PerRank")
Start = Callable[[int], ActorHandle]
STATUS = "status"
"""Concurrency group of the ranks' `status`, which answers while another call runs."""
STATUS_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.1
MAX_DIVERGED_S = 5.0
"""Longer than sending one call to all ranks takes."""
LESS_MEMORY = (
    "smaller: advantage.log_probs_max_tokens_per_gpu, and where engines share the GPU "
    "engine.sglang.mem_fraction_static; in a fork of the run (--fork RUN --run NEW) "
    "train.max_tokens_per_gpu, train.megatron.recompute_granularity=full, train.parallel"
)
"""Advice for a full GPU (torch.OutOfMemoryError)."""
POLICY_METHODS = frozenset({"push", "remembers", "write", "probe", "compare", "occupy"})
"""Methods that a critic's own ranks do not have."""
RANK_0_METHODS = frozenset({"compare", "uploading"})
"""Methods that are no collectives, and have one answer. Other ranks get no call."""


class TrainerGroup:
    """The ranks of one trainer. `start(rank)` finds or starts each of them."""

    def __init__(
        self, start: Start, world_size: int, *, critic_ranks: int = 0, start_timeout_s: float
    ) -> None:
        """`world_size`: ranks of the policy. Numbers of the critic's own ranks follow."""
        self._start = start
        self.world_size = world_size
        self.critic_ranks = critic_ranks
        self._start_timeout_s = start_timeout_s
        self.ranks = [start(rank) for rank in range(world_size + critic_ranks)]
        self._spec: TrainerSpec | None = None
        self._broken = False
        self._answered = False
        """True once all ranks have answered, which needs the imports of their processes."""

    @classmethod
    def of(cls, start: Start, resources: ResourcesConfig) -> TrainerGroup:
        """Return a group with the configured number of ranks."""
        return cls(
            start,
            resources.trainer_ranks,
            critic_ranks=resources.critic_ranks,
            start_timeout_s=resources.start_timeout_s,
        )

    def is_from(self, start: Start) -> bool:
        """True if this function starts the ranks."""
        return self._start == start

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call a method of all ranks that it concerns; return their answers in order of rank.

        After a failure the group is unusable until `ensure` or `setup`. Raises: as `gather`;
        TrainerError for an error that is not an RlpipeError.
        """
        calls = [(rank, arguments) for rank in self._concerned(method, self.ranks)]
        return await self._call_each(method, calls, deadline_s)

    async def _call_each(
        self, method: str, calls: Sequence[tuple[ActorHandle, Mapping[str, Any]]], deadline_s: float
    ) -> list[Any]:
        refs = [getattr(rank, method).remote(**arguments) for rank, arguments in calls]
        try:
            return await gather(refs, where=f"trainer.{method}", deadline_s=deadline_s)
        except RlpipeError as error:
            if isinstance(error, (ActorLost, DeadlineExceeded)):
                self._broken = True  # the other ranks wait in a collective, or all of them do
            # `gather` raises a plain RlpipeError for errors of CUDA, NCCL or a bug. Such an error
            # may break every later call of the process.
            if type(error) is RlpipeError:
                self._broken = True
                do = LESS_MEMORY if error.problem.startswith("OutOfMemoryError") else None
                raise TrainerError(
                    error.problem, where=error.where, found=error.found, do=do
                ) from error
            raise

    async def setup(self, spec: TrainerSpec) -> None:
        """Build the engine of a spec on all ranks. Restart all ranks first if some have died.

        Raises: ConfigError, TrainerError, DeadlineExceeded.
        """
        self._spec = spec  # first: `ensure` sets restarted ranks up with it
        if self._broken or not await self._is_whole() or await self._has_other_arithmetic(spec):
            await self.restart()
        await self._call_each("setup", await self._setup_calls(spec), self._start_timeout_s)

    async def _setup_calls(self, spec: TrainerSpec) -> list[tuple[ActorHandle, dict[str, Any]]]:
        """Return the arguments of `setup` for each rank, with the rendezvous of its world."""
        policy_arguments: dict[str, Any] = {"spec": spec, "master": await self._address(0)}
        policy = self.ranks[: self.world_size]
        critic = self.ranks[self.world_size :]
        critic_arguments: dict[str, Any] = {}
        if critic:
            # a second port on rank 0, where policy and critic exchange values
            policy_arguments["critic_exchange"] = await self._address(0)
            critic_master = await self._address(self.world_size)
            critic_arguments = {**policy_arguments, "master": critic_master}
        return [
            *((rank, policy_arguments) for rank in policy),
            *((rank, critic_arguments) for rank in critic),
        ]

    async def _address(self, rank: int) -> tuple[str, int]:
        address = self.ranks[rank].address.remote()
        return await call(address, where="trainer.address", deadline_s=self._start_timeout_s)

    async def is_up(self, spec: TrainerSpec) -> bool:
        """True if all ranks are set up for this spec."""
        statuses = None if self._broken or self._spec != spec else await self._idle_statuses()
        return (
            statuses is not None
            and all(status["ready"] for status in statuses)
            and not await self._has_other_arithmetic(spec)
        )

    async def occupy(self, parts: Collection[str], *, deadline_s: float) -> list[dict[str, float]]:
        """Keep only these parts of the state in GPU memory, on all ranks.

        As `DeviceMemory.occupy`. If some ranks are dead or hang, all are restarted: blank ranks use
        no GPU memory.
        """
        if self._broken or await self._idle_statuses() is None:
            await self.restart()
        return await self.call("occupy", parts=tuple(parts), deadline_s=deadline_s)

    async def initialise(
        self, key: str, start_from: str | None, adapter: str | None = None, *, deadline_s: float
    ) -> dict[str, str]:
        """Load the first weights; return the answer of `Rank.initialise`.

        Ranks that have trained are restarted first.
        """
        assert self._spec is not None, "set up the group first"
        statuses = await self._statuses()
        # Their optimizers have stepped, so loading weights would not give a first state.
        if any(status["held"] or status["dirty"] for status in statuses):
            await self.restart()
            await self.setup(self._spec)
        answers = await self.call(
            "initialise", key=key, start_from=start_from, adapter=adapter, deadline_s=deadline_s
        )
        return answers[0]

    async def held(self) -> str | None:
        """Return the state that all ranks hold.

        None if ranks are blank, half-trained, hung or dead, or hold different states.
        """
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
        """Make all ranks hold the end of a lineage.

        Return None if they held it already, else the answer of `Rank.restore`.
        """
        if await self.held() == lineage.target:
            return None
        assert self._spec is not None, "set up the group first"
        if self._broken or not await self._is_usable(fresh=lineage.base_stage is Stage.INIT):
            await self.restart()
            await self.setup(self._spec)
        # the answers of all ranks are equal
        return (await self.call("restore", lineage=lineage, deadline_s=deadline_s))[0]

    async def _is_whole(self) -> bool:
        """True if all ranks answer, and either all or none are set up."""
        statuses = await self._idle_statuses()
        return statuses is not None and len({status["ready"] for status in statuses}) == 1

    async def _has_other_arithmetic(self, spec: TrainerSpec) -> bool:
        """True if ranks were set up with another `deterministic`, which a process cannot change."""
        deterministic = {status["deterministic"] for status in await self._statuses()}
        return bool(deterministic - {None, spec.deterministic})

    async def _is_usable(self, *, fresh: bool) -> bool:
        """True if all ranks are set up and not half-trained; with `fresh`, also untrained."""
        statuses = await self._idle_statuses()
        if statuses is None:
            return False
        usable = all(status["ready"] and not status["dirty"] for status in statuses)
        return usable and (not fresh or all(status["fresh"] for status in statuses))

    async def _idle_statuses(self) -> list[dict[str, Any]] | None:
        """Wait until no rank is busy, and return the statuses.

        Ranks may be busy with calls of a process that died. None if a rank is dead, or if some
        ranks wait in a collective that the others will not join.
        """
        diverged_s: float | None = None
        end_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < end_s:
            try:
                statuses = await self._statuses()
            except RlpipeError:
                return None
            if not any(status["busy"] for status in statuses):
                return statuses
            now_s = time.monotonic()
            diverged_s = (diverged_s or now_s) if self._have_diverged(statuses) else None
            if diverged_s is not None and now_s - diverged_s > MAX_DIVERGED_S:
                return None
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    def _have_diverged(self, statuses: Sequence[Mapping[str, Any]]) -> bool:
        """True if a rank runs a call that another rank has not received, or has left with an error.

        A rank that has finished its part has not diverged: rank 0 alone talks to engines and to a
        teacher's server.
        """
        for method in {status["busy"] for status in statuses} - {None}:
            received = {
                # the count tells a rank that is done from one that has not received the call
                (status["calls"].get(method, 0), status["failed"] == method)
                for status in self._concerned(method, statuses)
            }
            if len(received) > 1:
                return True
        return False

    def _concerned(self, method: str, per_rank: Sequence[PerRank]) -> Sequence[PerRank]:
        """Return the items of the ranks that get calls of this method."""
        if method in RANK_0_METHODS:
            return per_rank[:1]
        return per_rank[: self.world_size] if method in POLICY_METHODS else per_rank

    async def _statuses(self) -> list[dict[str, Any]]:
        refs = [rank.status.options(concurrency_group=STATUS).remote() for rank in self.ranks]
        # New processes import torch and Megatron first: minutes on a busy machine or a slow disk.
        deadline_s = STATUS_TIMEOUT_S if self._answered else self._start_timeout_s
        statuses = await gather(refs, where="trainer.status", deadline_s=deadline_s)
        self._answered = True
        return statuses

    async def restart(self) -> None:
        """Replace all ranks by blank ones."""
        # all of them: survivors wait in a collective with the dead
        await asyncio.to_thread(self.kill)
        num_ranks = self.world_size + self.critic_ranks
        self.ranks = await asyncio.to_thread(
            lambda: [self._start(rank) for rank in range(num_ranks)]
        )
        self._broken = False
        self._answered = False

    def kill(self) -> None:
        """Kill all ranks at once."""
        kill_actors(self.ranks)


class TrainerLock:
    """A lock around the trainer group: calls are collective, so they run one after the other.

    For one event loop. `group` is None until the conductor has found the ranks.
    """

    def __init__(self) -> None:
        self.group: TrainerGroup | None = None
        self._lock = asyncio.Lock()
        self._user = ""

    @property
    def taken(self) -> bool:
        """True while a call runs."""
        return self._lock.locked()

    @asynccontextmanager
    async def exclusive(self, purpose: str, deadline_s: float) -> AsyncIterator[TrainerGroup]:
        """Yield the group for exclusive use. `purpose` is shown to those that wait.

        Raises: DeadlineExceeded with the purpose of the current user.
        """
        async with self.locked(purpose, deadline_s):
            assert self.group is not None, "open the cluster first"
            yield self.group

    @asynccontextmanager
    async def locked(self, purpose: str, deadline_s: float) -> AsyncIterator[None]:
        """Take the lock, whether a group exists or not, for example to replace the group.

        Raises: as `exclusive`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the trainer is busy",
                where=f"trainer.{purpose}",
                found=f"trainer.{self._user} is running",
                expected=f"free within {deadline_s:g} s",
            ) from error
        self._user = purpose
        try:
            yield
        finally:
            self._lock.release()
