"""Broadcast weights from every pipeline stage, so that nothing crosses the pipeline.

The first rank of each stage sends the tensors of its stage. `StagedTransport` holds this rank's
part: rank 0 is the `StageLeader`, the first ranks of other stages are a `StageSource`, and the
remaining ranks help to gather.

    leader (rank 0, also source of stage 0)        source of stage s
    pause, flush, begin                            gathers and packs its buckets ahead
    buckets of stage 0, as in `distributed`
    for each other stage: NEXT →                 ← names, dtypes, shapes of a bucket
                          tell engines, GO →       broadcasts it, in the group of this stage
    end, check the stamp, resume, OVER →           done

Stages send one after another: an engine loads one bucket at a time. A failure anywhere ends the
push for all engines, as in `distributed`, and the next push makes all groups again.

Leader and sources talk through a `Board`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlpipe.errors import DeadlineExceeded, SyncError
from rlpipe.sync.session import PushReport, Session
from rlpipe.sync.tensors import (
    NamedTensors,
    check_tensors,
    exhaust,
    expected_shapes,
    into_buckets,
    mark_last,
    require_none_missing,
)
from rlpipe.sync.threads import ReadAhead, in_thread
from rlpipe.sync.transports.base import Push, Transport, TransportSetup
from rlpipe.sync.transports.bucket_memory import FlatBucket, flatten
from rlpipe.sync.transports.bucketed import BUCKET, TENSORS
from rlpipe.sync.transports.distributed import (
    GROUP_NAME,
    BroadcastGroup,
    DistributedTransport,
    backend_of,
    broadcast,
    meeting_address,
)
from rlpipe.system.rendezvous import tcp_store

JOIN = "join"
NEXT = "next"
GO = "go"
OVER = "over"
CALL_S = 60.0
_POLL_S = 0.002


def stage_group_name(stage: int) -> str:
    """Return the name of a stage's group, in engines too."""
    return f"{GROUP_NAME}-{stage}" if stage else GROUP_NAME


class StagedTransport(Transport[PushReport]):
    """See `base.Transport`. `send` takes the tensors of this rank's stage."""

    per_stage = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        board = Board(setup.address) if setup.rank == 0 else None
        # Rank 0 chooses a free port, so the others learn the address from it.
        where: list[Any] = [(setup.address, board.port) if board else None]
        dist.broadcast_object_list(where, src=0)
        self.leader: StageLeader | None = None
        self.source: StageSource | None = None
        if board is not None:
            self.leader = StageLeader(setup, board)
        elif setup.sends_stage:
            self.source = StageSource(setup, Board(*where[0]))

    def send(self, tensors: NamedTensors, push: Push) -> PushReport:
        """See `Transport.send`. Raises: DeadlineExceeded in a source if the leader is silent."""
        if self.leader is not None:
            return self.leader.send(tensors, push)
        if self.source is not None:
            return PushReport(push.stamp, size_bytes=self.source.serve(tensors))
        exhaust(tensors)
        return PushReport(push.stamp)

    def close(self) -> None:
        """Leave the groups with engines."""
        for part in (self.leader, self.source):
            if part is not None:
                part.close()


class StageLeader(DistributedTransport):
    """Rank 0: sends stage 0 and directs the sources of the other stages."""

    def __init__(self, setup: TransportSetup, board: Board) -> None:
        super().__init__(setup)
        self.board = board
        self._push_number = 0
        self._missing: set[str] = set()

    def send(self, tensors: NamedTensors, push: Push) -> PushReport:
        assert not push.check, "a checked push needs all tensors in one rank"
        self._push_number += 1
        self._missing = set(self.expected)
        try:
            return super().send(tensors, push)
        except BaseException:
            self.close()
            raise
        finally:
            # Sources wait for an order, also after a failure here.
            order = {"do": OVER, "failed": self._group is None}
            for stage in range(1, self.setup.num_stages):
                self.board.put(self._key(stage, "order"), order)

    def packed(
        self, tensors: Iterator[tuple[str, Tensor]], push: Push
    ) -> Iterator[tuple[FlatBucket, bool]]:
        """Yield the buckets of stage 0. None of them is the last of the push."""
        checked = check_tensors(tensors, self.expected, self._missing)
        for bucket in into_buckets(checked, self.setup.sync.update_weight_buffer_size):
            yield self.pack(bucket), False

    async def connect(self, session: Session) -> None:
        """Make a group of the session's engines with each stage, unless they exist."""
        previous = self._group
        await super().connect(session)
        # All groups have the same engines, so a new group of stage 0 needs new ones of all stages.
        if self._group is not previous:
            for stage in range(1, self.setup.num_stages):
                await self._make_stage_group(session, stage)

    async def _load_all(
        self, session: Session, ready: ReadAhead[tuple[FlatBucket, bool]], push: Push
    ) -> None:
        await session.open(push.pause)
        await self.connect(session)
        session.start_step(TENSORS)
        async for packed, last in ready:
            await self.load(session, packed, last=last)
            session.start_step(TENSORS)
        for stage in range(1, self.setup.num_stages):
            await self._load_stage(session, stage)

    async def _make_stage_group(self, session: Session, stage: int) -> None:
        session.start_step(f"make a group of engines and stage {stage}", kind="group")
        num_ranks = self.setup.engine_tensor_parallel_size * len(session.active)
        order = {"do": JOIN, "ranks": num_ranks, "engines": list(session.urls)}
        opened = await self._order(stage, order)
        joining = self._join_calls(
            session, stage_group_name(stage), opened["address"], opened["port"]
        )
        await self._together([*joining, self._order(stage, {"do": GO})], session)

    async def _load_stage(self, session: Session, stage: int) -> None:
        """Have engines load all buckets of a stage.

        With the last bucket of the last stage they take the session's stamp.
        """
        stage_done = False
        while not stage_done:
            session.start_step(f"tensors of stage {stage}", kind=TENSORS)
            bucket = await self._order(stage, {"do": NEXT})
            session.start_step(f"bucket {session.buckets}, of stage {stage}", kind=BUCKET)
            stage_done = bucket["last"]
            self._missing -= {name for name, _, _ in bucket["tensors"]}
            last = stage_done and stage == self.setup.num_stages - 1
            if last:
                require_none_missing(self._missing, session.stamp)
            name = stage_group_name(stage)
            loading = self._load_calls(session, name, bucket["tensors"], last=last)
            await self._together([*loading, self._order(stage, {"do": GO})], session)
            session.count_bucket(len(bucket["tensors"]), bucket["bytes"])

    async def _order(self, stage: int, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order to a source and return its answer. Raises: SyncError without one."""
        self.board.put(self._key(stage, "order"), order)
        key = self._key(stage, "answer")
        try:
            answer = await self.board.take(key, timeout_s=self.setup.sync.timeout_s)
        except DeadlineExceeded as error:
            raise SyncError("a stage is silent", where=f"push: {key}", found=str(error)) from error
        if "error" in answer:
            raise SyncError(
                f"stage {stage} cannot send", where=f"push: {key}", found=answer["error"]
            )
        return answer

    def _key(self, stage: int, name: str) -> str:
        return f"{self._push_number}/{stage}/{name}"


class StageSource:
    """First rank of another stage. Its group stays open between pushes; `close` leaves it."""

    def __init__(self, setup: TransportSetup, board: Board) -> None:
        self.setup = setup
        self.board = board
        self.expected = expected_shapes(setup.model_dir)
        self._push_number = 0
        self._joining: BroadcastGroup | None = None
        self._group: BroadcastGroup | None = None
        self._bucket: FlatBucket | None = None
        self._sent_bytes = 0

    def serve(self, tensors: NamedTensors) -> int:
        """Send this stage's tensors as the leader orders, and return the bytes sent.

        `tensors` is read to its end in any case. Raises: DeadlineExceeded if the leader is silent.
        """
        self._push_number += 1
        self._bucket = None
        stream = iter(tensors)
        packed = self._packed(stream)
        try:
            return asyncio.run(self._serve(packed))
        finally:
            exhaust(packed)
            exhaust(stream)

    def close(self) -> None:
        """Leave the group."""
        for group in (self._joining, self._group):
            if group is not None:
                group.drop()
        self._joining = None
        self._group = None

    def _packed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[FlatBucket, bool]]:
        checked = check_tensors(tensors, self.expected, set())
        buckets = into_buckets(checked, self.setup.sync.update_weight_buffer_size)
        for bucket, last in mark_last(buckets):
            yield flatten(bucket, self.setup.device), last

    async def _serve(self, packed: Iterator[tuple[FlatBucket, bool]]) -> int:
        self._sent_bytes = 0
        async with ReadAhead(packed) as ready:
            order = await self._next_order()
            while order["do"] != OVER:
                answer = asyncio.ensure_future(self._answer(order, ready))
                next_order = asyncio.ensure_future(self._next_order())
                await asyncio.wait((answer, next_order), return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    self.board.put(self._key("answer"), answer.result())
                # OVER can arrive while a broadcast waits for an engine that never joins it.
                answer.cancel()
                order = await next_order
            if order["failed"]:
                self.close()
        return self._sent_bytes

    async def _answer(
        self, order: dict[str, Any], ready: ReadAhead[tuple[FlatBucket, bool]]
    ) -> dict[str, Any]:
        try:
            if order["do"] == JOIN:
                return self._open_group(order)
            if order["do"] == GO:
                await self._go()
                return {}
            self._bucket, last = await anext(ready)
        except Exception as error:  # noqa: BLE001 - the leader waits for an answer in any case
            return {"error": f"{type(error).__name__}: {error}"}
        parts = [(part.name, part.dtype_name, part.shape) for part in self._bucket.parts]
        return {"tensors": parts, "bytes": self._bucket.memory.nbytes, "last": last}

    async def _next_order(self) -> dict[str, Any]:
        try:
            return await self.board.take(self._key("order"), timeout_s=self.setup.sync.timeout_s)
        except DeadlineExceeded:
            self.close()
            raise

    def _open_group(self, order: dict[str, Any]) -> dict[str, Any]:
        """Open a store for a new group. The next order joins the group."""
        self.close()
        self._joining = BroadcastGroup(
            order["ranks"],
            address=meeting_address(order["engines"]),
            backend=backend_of(self.setup.device),
            timeout_s=self.setup.sync.timeout_s,
            name=stage_group_name(self.setup.stage),
        )
        return {"address": self._joining.address, "port": self._joining.port}

    async def _go(self) -> None:
        """Join the opened group, or broadcast the announced bucket."""
        if self._joining is not None:
            await in_thread(self._joining.join)
            self._group = self._joining
            self._joining = None
            return
        assert self._bucket is not None
        assert self._group is not None
        await broadcast(self._group, self._bucket)
        self._sent_bytes += self._bucket.memory.nbytes
        self._bucket = None

    def _key(self, name: str) -> str:
        return f"{self._push_number}/{self.setup.stage}/{name}"


class Board:
    """JSON messages between trainer ranks during a push, each taken once.

    Rank 0 constructs the first one and opens a TCP store; other ranks connect to its `port`. The
    store is separate from the trainer's: a rank that waits in that one blocks the others.
    """

    def __init__(self, address: str, port: int | None = None) -> None:
        """`address`: of rank 0's machine, as this rank reaches it."""
        timeout = timedelta(seconds=CALL_S)
        self._server = (
            tcp_store(address, 0, listens=True, timeout=timeout) if port is None else None
        )
        self.port = self._server.port if self._server is not None else port
        assert self.port is not None
        self._store = tcp_store(address, self.port, listens=False, timeout=timeout)

    def put(self, key: str, message: Any) -> None:
        """Write a message."""
        self._store.set(key, json.dumps(message))

    async def take(self, key: str, *, timeout_s: float) -> Any:
        """Wait for a message and remove it. Raises: DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                # A blocking `get` could not be cancelled.
                while not self._store.check([key]):  # noqa: ASYNC110 - the store has no callback
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "a trainer rank does not answer",
                where=f"push: {key}",
                expected=f"within {timeout_s:g} s",
            ) from error
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return message
