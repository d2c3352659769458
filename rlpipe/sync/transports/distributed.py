"""Broadcast weights from one trainer rank to all ranks of all engines: NCCL on GPUs, gloo without.

`DistributedTransport` tells each engine about a bucket (`/update_weights_from_distributed`) and
broadcasts the bucket as one tensor of bytes. The engine answers when it has loaded the bucket.
`BroadcastGroup` is the process group. The trainer rank is rank 0; engines join it through
`/init_weights_update_group`.

An engine that knows of a bucket and does not take part leaves all members waiting in the broadcast.
So the first failure ends the push for all engines: their weights are unknown. The trainer leaves
the group, and the next push makes another.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import EngineError, RlpipeError, SyncError
from rlpipe.sync.session import CALLS_PER_PUSH, Session
from rlpipe.sync.tensors import Bucket
from rlpipe.sync.threads import in_thread, start_thread
from rlpipe.sync.transports.base import TransportSetup
from rlpipe.sync.transports.bucket_memory import FlatBucket, flatten
from rlpipe.sync.transports.bucketed import BUCKET, BucketTransport
from rlpipe.system.ports import is_loopback
from rlpipe.system.rendezvous import gloo_at, tcp_store

GROUP_NAME = "rlpipe"
"""Name of the group in engines too. All runs use the same name: a trainer that replaces a dead one
can end the group that the dead one left."""
JOIN_TIMEOUT_S = 60.0
EXPLANATION_S = 2.0
"""Time for an engine's own error to arrive after a broadcast failed."""
NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Set by SGLang in its processes. Both ends of a connection must reach each other's memory in the
same way."""
_POLL_S = 0.001


def use_sglang_nccl_settings() -> None:
    """Set `NCCL_SETTINGS` before this process's first NCCL communicator.

    Existing environment variables stay: engines inherit them too.
    """
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


class DistributedTransport(BucketTransport[FlatBucket]):
    """See `base.Transport`. The group stays open between pushes; `close` leaves it."""

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self.members: tuple[str, ...] = ()
        """URLs of the engines in the group, in order of rank."""
        self._group: BroadcastGroup | None = None
        self._stamp = ""
        """Stamp of the last push through the group."""

    def pack(self, bucket: Bucket) -> FlatBucket:
        return flatten(bucket, self.setup.device)

    def close(self) -> None:
        """Leave the group. Engines notice when they join the next one."""
        if self._group is not None:
            self._group.drop()
        self._group = None
        self.members = ()

    async def connect(self, session: Session) -> None:
        """Make a group of exactly the session's engines, unless it exists."""
        if not await self._is_reusable(session):
            await self._make_group(session)
        self._stamp = session.stamp

    async def _is_reusable(self, session: Session) -> bool:
        """True if the group has these engines and each reports the stamp of the last push."""
        if self._group is None or session.urls != self.members:
            return False
        stamps = set[str]()

        async def ask(engine: Engine) -> None:
            stamps.add(await engine.weight_version())

        # A server that was restarted at the same address is in no group, and reports other weights.
        await session.each("ask what they hold", ask)
        return stamps == {self._stamp} and session.urls == self.members

    async def _make_group(self, session: Session) -> None:
        self.close()
        members = session.urls
        group = BroadcastGroup(
            self.setup.engine_tensor_parallel_size * len(members),
            address=meeting_address(members),
            backend=backend_of(self.setup.device),
            timeout_s=self.setup.sync.timeout_s,
        )
        session.start_step("make a group of trainer and engines", kind="group")
        joining = self._join_calls(session, GROUP_NAME, group.address, group.port)
        try:
            await self._together([*joining, in_thread(group.join)], session)
        except BaseException:
            group.drop()
            raise
        self._group = group
        self.members = members

    def _join_calls(
        self, session: Session, name: str, address: str, port: int
    ) -> list[Awaitable[None]]:
        """Calls that have every engine join a group. The sender is rank 0."""
        num_ranks = self.setup.engine_tensor_parallel_size
        return [
            engine.join_group(
                name,
                address=address,
                port=port,
                first_rank=1 + num_ranks * number,
                world_size=1 + num_ranks * len(session.active),
                backend=backend_of(self.setup.device),
            )
            for number, engine in enumerate(session.active)
        ]

    async def load(self, session: Session, packed: FlatBucket, *, last: bool) -> None:
        group = self._group
        if group is None or session.urls != self.members:
            raise SyncError(
                "an engine left the group", where=f"push of {session.stamp}", found=session.unknown
            )
        session.start_step(f"bucket {session.buckets}", kind=BUCKET)
        tensors = [(part.name, part.dtype_name, part.shape) for part in packed.parts]
        loading = self._load_calls(session, GROUP_NAME, tensors, last=last)
        try:
            await self._together([*loading, broadcast(group, packed)], session)
        except BaseException:
            # The broadcast may still wait for an engine. This group cannot be used again.
            self.close()
            raise
        session.count_bucket(len(packed.parts), packed.memory.nbytes)

    def _load_calls(
        self, session: Session, group_name: str, tensors: list[Any], *, last: bool
    ) -> list[Awaitable[None]]:
        """Calls that have every engine load a bucket. `tensors`: name, dtype, shape of each."""
        stamp = session.stamp if last else None
        return [
            engine.update_from_group(group_name, tensors, weight_version=stamp, flush_cache=last)
            for engine in session.active
        ]

    async def _together(self, calls: Iterable[Awaitable[Any]], session: Session) -> None:
        """Await calls that wait for each other.

        Raises: SyncError at the first failure, with the error of the engine that caused it.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            async with asyncio.timeout(self.setup.sync.timeout_s / CALLS_PER_PUSH):
                await asyncio.gather(*tasks)
        except (RlpipeError, RuntimeError, TimeoutError) as error:
            raise _broken(await _cause(error, tasks), session) from error
        finally:
            for task in tasks:
                task.cancel()


async def broadcast(group: BroadcastGroup, packed: FlatBucket) -> None:
    """Broadcast a bucket to all engines of a group. Can be cancelled. Raises: RuntimeError."""
    work = await in_thread(lambda: group.broadcast(packed.memory))
    while not work.is_completed():  # noqa: ASYNC110 - torch has no callback
        await asyncio.sleep(_POLL_S)
    work.wait()


async def _cause(error: Exception, tasks: Sequence[asyncio.Future]) -> Exception:
    """Return an engine's own error if one arrives soon, else `error`."""
    # The broadcast often fails first, with "connection closed" from gloo.
    if not isinstance(error, EngineError):
        await asyncio.wait(tasks, timeout=EXPLANATION_S)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        return next((cause for cause in failed if isinstance(cause, EngineError)), error)
    return error


def _broken(error: Exception, session: Session) -> SyncError:
    found = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return SyncError(
        "the broadcast broke, and the push failed for every engine of the group",
        where=f"push of {session.stamp}: {session.step}",
        found=found,
        do="engines with unknown weights are replaced; the next push makes a new group",
    )


class BroadcastGroup:
    """Process group of one sending rank and all ranks of the engines.

    Construct it, have every engine join at `address` and `port`, and call `join` meanwhile. A
    broadcast that an engine does not take part in never ends; `drop` leaves the group all the same.
    """

    def __init__(
        self,
        engine_ranks: int,
        *,
        address: str,
        backend: str,
        timeout_s: float,
        name: str = GROUP_NAME,
    ) -> None:
        """Open a store on a free port of `address`.

        `timeout_s`: deadline of one broadcast on gloo.
        """
        self.world_size = 1 + engine_ranks
        self.address = address
        self._name = name
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._join_timeout = timedelta(seconds=min(JOIN_TIMEOUT_S, timeout_s))
        self._server = tcp_store(address, 0, listens=True, timeout=self._join_timeout)
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        """Port of the store at which engines join."""
        return self._server.port

    def join(self) -> None:
        """Wait for all engines and open the group. Blocks. Raises: RuntimeError after a timeout."""
        store = tcp_store(
            self.address,
            self.port,
            listens=False,
            timeout=self._join_timeout,
            world_size=self.world_size,
            wait=True,
        )
        store.set_timeout(self._timeout)
        # SGLang calls the same private function of torch. Both sides must agree on the names under
        # which they find each other. `init_process_group` would replace Megatron's default group.
        with gloo_at(self.address):
            self._group, _ = c10d._new_process_group_helper(
                self.world_size,
                0,
                [],
                dist.Backend(self._backend),
                PrefixStore(self._name, store),
                group_name=cast("Any", self._name),
                timeout=self._timeout,
            )
        _unregister(self._group)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin a broadcast. NCCL blocks in the first one until every engine takes part."""
        assert self._group is not None, "join first"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        return self._group.broadcast([tensor], options)

    def drop(self) -> None:
        """Leave the group at once, also during a broadcast. Calling it twice is allowed."""
        group = self._group
        self._group = None
        if group is not None:
            start_thread(_Abort(group))


class _Abort:
    """Abort a group in a thread. It holds the last reference to the group.

    On gloo the destructor waits for running operations, so it must run in the thread.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def __call__(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


def _unregister(group: dist.ProcessGroup) -> None:
    """Remove a group from torch's tables."""
    # Destroying Megatron's groups would wait for the engines of a registered group.
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    if (tag := world.pg_to_tag.pop(group, None)) is not None:
        world.tags_to_pg[tag].remove(group)
    _unregister_process_group(group.group_name)


def meeting_address(urls: Sequence[str]) -> str:
    """Return the address of this machine for engines at these URLs."""
    remote = [url for url in urls if not is_loopback(url)]
    return own_address_towards(remote[0]) if remote else "127.0.0.1"


def own_address_towards(url: str) -> str:
    """Return the address of this machine's interface that routes to a URL."""
    # A machine can have several addresses, and its host name need not resolve to the right one.
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))  # UDP: sends nothing
        return probe.getsockname()[0]


def backend_of(device: torch.device) -> str:
    """Return the torch.distributed backend for tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"
