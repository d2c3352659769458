"""Weights by broadcast, from one trainer rank to all ranks of all engines at once: NCCL between
GPUs, gloo without.

The group is made for the engines of a push, and made anew when they are others than last time: one
was killed and came back, or only one of them is behind; or when one names other weights than were
sent last: a server that was started again at its address is in no group. For every bucket each
engine is told what comes (`/update_weights_from_distributed`) and answers when it has loaded it;
meanwhile the bucket is broadcast as one tensor of bytes, and the next one is gathered and packed.

An engine that is told and does not take part leaves all others, and us, waiting inside the
broadcast. So the first failure ends the push for all of its engines: none of them knows what it
holds. We leave the group, and the next push makes another.

Not here: several ranks that send (`staged`), the group itself (`group`), what else is said to the
engines (`session`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import EngineError, RlpipeError, SyncError
from rlpipe.sync.session import CALLS_PER_PUSH, Session
from rlpipe.sync.tensors import Bucket
from rlpipe.sync.threads import aside
from rlpipe.sync.transports.bucketed import BUCKET, BucketTransport
from rlpipe.sync.transports.flat import Flat, flatten
from rlpipe.sync.transports.group import NAME, BroadcastGroup, backend_of, meeting_address

EXPLAIN_S = 2.0
_POLL_S = 0.001


class DistributedTransport(BucketTransport[Flat]):
    """See `base.Transport`. It keeps its group from one push to the next; `close` ends it."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        buffer_size_bytes: int,
        timeout_s: float,
        tensor_parallel_size: int = 1,
        device: torch.device,
    ) -> None:
        """`device`: where tensors are sent from."""
        super().__init__(
            model_dir,
            buffer_size_bytes=buffer_size_bytes,
            timeout_s=timeout_s,
            tensor_parallel_size=tensor_parallel_size,
        )
        self.device = device
        self.members: tuple[str, ...] = ()
        """Engines of the group, by URL, in order of rank."""
        self._group: BroadcastGroup | None = None
        self._stamp = ""
        """Of the push that had the group last."""

    def pack(self, bucket: Bucket, engines: Sequence[str]) -> Flat:
        return flatten(bucket, self.device)

    def close(self) -> None:
        """Leave the group. Engines notice when they are asked to join the next."""
        if self._group is not None:
            self._group.drop()
        self._group = None
        self.members = ()

    async def connect(self, session: Session) -> None:
        """Have a group of exactly the engines of this session."""
        if not await self._is_as_left(session):
            await self._make_group(session)
        self._stamp = session.stamp

    async def _is_as_left(self, session: Session) -> bool:
        """Is there a group of these engines, which all name what was sent through it last?"""
        if self._group is None or _urls(session) != self.members:
            return False
        named = set[str]()

        async def ask(engine: Engine) -> None:
            named.add(await engine.weight_version())

        await session.each("ask what they hold", ask)
        return named == {self._stamp} and _urls(session) == self.members

    async def _make_group(self, session: Session) -> None:
        self.close()
        members = _urls(session)
        ranks = self.tensor_parallel_size
        address = meeting_address(members)
        backend = backend_of(self.device)
        group = BroadcastGroup(
            ranks * len(members), address=address, backend=backend, timeout_s=self.timeout_s
        )
        first = {url: 1 + ranks * number for number, url in enumerate(members)}
        session.turn_to("make a group of trainer and engines", kind="group")
        joining = [
            engine.join_group(
                NAME,
                address=address,
                port=group.port,
                first_rank=first[engine.url],
                world_size=group.world_size,
                backend=backend,
            )
            for engine in session.active
        ]
        try:
            await self._together([*joining, aside(group.join)], session)
        except BaseException:
            group.drop()
            raise
        self._group = group
        self.members = members

    async def load(self, session: Session, packed: Flat, *, last: bool) -> None:
        group = self._group
        if group is None or _urls(session) != self.members:
            raise SyncError(
                "an engine left the group", where=f"push of {session.stamp}", found=session.unknown
            )
        session.turn_to(f"bucket {session.buckets}", kind=BUCKET)
        tensors = [(part.name, part.dtype_name, part.shape) for part in packed.parts]
        stamp = session.stamp if last else None

        def told(engine: Engine):
            return engine.update_from_group(NAME, tensors, weight_version=stamp, flush_cache=last)

        try:
            await self._together([*map(told, session.active), broadcast(group, packed)], session)
        except BaseException:
            self.close()
            raise
        session.count(len(packed.parts), packed.memory.nbytes)

    async def _together(self, steps: Iterable, session: Session) -> None:
        """Take steps that wait for each other. Raises: SyncError at the first that fails, naming
        the engine that did."""
        tasks = [asyncio.ensure_future(step) for step in steps]
        try:
            async with asyncio.timeout(self.timeout_s / CALLS_PER_PUSH):
                await asyncio.gather(*tasks)
        except (RlpipeError, RuntimeError, TimeoutError) as error:
            raise _broken(await _cause(error, tasks), session) from error
        finally:
            for task in tasks:
                task.cancel()


def _urls(session: Session) -> tuple[str, ...]:
    return tuple(engine.url for engine in session.active)


async def broadcast(group: BroadcastGroup, packed: Flat) -> None:
    """Send a bucket to all engines of a group. Whoever awaits it can give up. Raises:
    RuntimeError."""
    work = await aside(lambda: group.broadcast(packed.memory))
    while not work.is_completed():  # noqa: ASYNC110 - torch calls nobody
        await asyncio.sleep(_POLL_S)
    work.wait()


async def _cause(error: Exception, tasks: Sequence[asyncio.Future]) -> Exception:
    """What an engine says of it in a moment, if all that is known is that the broadcast failed."""
    if not isinstance(error, EngineError):
        await asyncio.wait(tasks, timeout=EXPLAIN_S)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        return next((found for found in failed if isinstance(found, EngineError)), error)
    return error


def _broken(error: Exception, session: Session) -> SyncError:
    found = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return SyncError(
        "the broadcast broke, and with it the push for every engine of the group",
        where=f"push of {session.stamp}: {session.doing}",
        found=found,
        do="engines whose weights are unknown are replaced, and the next push makes another group",
    )
