"""Weights by broadcast from every pipeline stage: each stage's first rank sends what its stage
holds, and nothing crosses the pipeline on the way.

    leader (rank 0, also source of stage 0)        source of stage s
    pause, flush, begin                            gathers and packs its buckets ahead, meanwhile
    stage 0's buckets, as `distributed`
    for each other stage: "next" →                 names, dtypes, shapes of a bucket
                          tells engines, "go" →    broadcasts it, in the group of this stage and the engines
    end, echo, continue, "over" →                  done

Stages take turns: engines load one bucket at a time, and groups that are made one after another do
not wait for each other. Whatever fails, anywhere, ends the push for all engines, as one broadcast
does; all groups are made anew then.

Not here: which tensors a stage holds (`rlpipe.engines.megatron.bridges.stages`), the group
(`group`), messages between ranks (`board`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlpipe.engines.sglang.admin import Engine, PauseMode
from rlpipe.errors import DeadlineExceeded, SyncError
from rlpipe.sync.board import Board
from rlpipe.sync.session import Session
from rlpipe.sync.tensors import buckets, checked, expected_shapes, with_last
from rlpipe.sync.threads import Ahead, aside
from rlpipe.sync.transports.base import PushReport
from rlpipe.sync.transports.bucketed import BUCKET, TENSORS
from rlpipe.sync.transports.distributed import DistributedTransport, broadcast
from rlpipe.sync.transports.flat import Flat, flatten
from rlpipe.sync.transports.group import NAME, BroadcastGroup, backend_of, meeting_address

JOIN = "join"
NEXT = "next"
GO = "go"
OVER = "over"


def group_of(stage: int) -> str:
    """Its name, in engines too."""
    return f"{NAME}-{stage}" if stage else NAME


class StagedTransport(DistributedTransport):
    """The leader's. See `base.Transport`; the sources of the other stages must `serve` the same
    push."""

    def __init__(self, model_dir: str | Path, board: Board, stages: int, **keywords: Any) -> None:
        """`keywords`: as `DistributedTransport`."""
        super().__init__(model_dir, **keywords)
        self.board = board
        self.stages = stages
        self._number = 0
        self._missing: set[str] = set()

    def push(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        engines: Sequence[str],
        stamp: str,
        *,
        pause: PauseMode = "abort",
        check: bool = False,
        goes_on: bool = True,
    ) -> PushReport:
        """As `BucketTransport.push`; `named_tensors` are those of stage 0."""
        assert not check, "checked pushes come from one source"
        self._number, self._missing = self._number + 1, set(self.expected)
        try:
            return super().push(named_tensors, engines, stamp, pause=pause, goes_on=goes_on)
        except BaseException:
            self.close()
            raise
        finally:
            for stage in range(1, self.stages):
                self.board.put(
                    self._key(stage, "order"), {"do": OVER, "failed": self._group is None}
                )

    def packed(
        self, tensors: Iterator[tuple[str, Tensor]], engines: Sequence[str], stamp: str, check: bool
    ) -> Iterator[tuple[Flat, bool]]:
        """The buckets of stage 0; none of them is the last of the push."""
        for bucket in buckets(
            checked(tensors, self.expected, self._missing, own=False), self.buffer_size_bytes
        ):
            yield self.pack(bucket, engines), False

    async def connect(self, session: Session) -> None:
        """Have a group of these engines with each stage."""
        known = self._group
        await super().connect(session)
        if self._group is not known:
            for stage in range(1, self.stages):
                await self._invite(session, stage)

    async def _send(self, session: Session, ready: Any, pause: PauseMode, check: bool) -> None:
        await session.hold(pause)
        await self.connect(session)
        await session.begin()
        session.turn_to(TENSORS)
        async for packed, last in ready:
            await self.load(session, packed, last=last)
            session.turn_to(TENSORS)
        for stage in range(1, self.stages):
            await self._load_of(session, stage)
        await session.end()

    async def _invite(self, session: Session, stage: int) -> None:
        session.turn_to(f"make a group of engines and stage {stage}", kind="group")
        ranks = self.tensor_parallel_size
        order = {
            "do": JOIN,
            "ranks": ranks * len(session.active),
            "engines": [engine.url for engine in session.active],
        }
        found = await self._ask(stage, order)
        backend = backend_of(self.device)
        joining = [
            engine.join_group(
                group_of(stage),
                address=found["address"],
                port=found["port"],
                first_rank=1 + ranks * number,
                world_size=1 + ranks * len(session.active),
                backend=backend,
            )
            for number, engine in enumerate(session.active)
        ]
        await self._together([*joining, self._ask(stage, {"do": GO})], session)

    async def _load_of(self, session: Session, stage: int) -> None:
        """All buckets of another stage; with the last one of the last stage, engines take the
        session's stamp."""
        whole = False
        while not whole:
            session.turn_to(f"tensors of stage {stage}", kind=TENSORS)
            found = await self._ask(stage, {"do": NEXT})
            session.turn_to(f"bucket {session.buckets}, of stage {stage}", kind=BUCKET)
            whole = found["last"]
            self._missing -= {name for name, _, _ in found["tensors"]}
            last = whole and stage == self.stages - 1
            if last and self._missing:
                what = f"no {', '.join(sorted(self._missing)[:5])}"
                raise SyncError("tensors are missing", where=f"push of {session.stamp}", found=what)
            await self._together(
                [
                    *self._told(session, stage, found["tensors"], last=last),
                    self._ask(stage, {"do": GO}),
                ],
                session,
            )
            session.count(len(found["tensors"]), found["bytes"])

    def _told(self, session: Session, stage: int, tensors: list[Any], *, last: bool) -> list[Any]:
        stamp = session.stamp if last else None

        def told(engine: Engine) -> Any:
            return engine.update_from_group(
                group_of(stage), tensors, weight_version=stamp, flush_cache=last
            )

        return list(map(told, session.active))

    async def _ask(self, stage: int, order: dict[str, Any]) -> dict[str, Any]:
        """Raises: SyncError with what went wrong there, or that it does not answer."""
        self.board.put(self._key(stage, "order"), order)
        key = self._key(stage, "answer")
        try:
            answer = await self.board.take(key, timeout_s=self.timeout_s)
        except DeadlineExceeded as error:
            raise SyncError("a stage is silent", where=f"push: {key}", found=str(error)) from error
        if "error" in answer:
            raise SyncError(
                f"stage {stage} cannot send", where=f"push: {key}", found=answer["error"]
            )
        return answer

    def _key(self, stage: int, what: str) -> str:
        return f"{self._number}/{stage}/{what}"


class StageSource:
    """The part of another stage's first rank. It keeps its group from one push to the next; `close`
    ends it."""

    def __init__(
        self,
        model_dir: str | Path,
        board: Board,
        stage: int,
        *,
        buffer_size_bytes: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """As `DistributedTransport`."""
        self.expected = expected_shapes(model_dir)
        self.board = board
        self.stage = stage
        self.buffer_size_bytes = buffer_size_bytes
        self.timeout_s = timeout_s
        self.device = device
        self._number = 0
        self._joining: BroadcastGroup | None = None
        self._group: BroadcastGroup | None = None
        self._bucket: Flat | None = None
        self._sent_bytes = 0

    def serve(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Send this stage's tensors in one push, as the leader orders; bytes sent. They are read to
        their end in any case.

        Raises: DeadlineExceeded if the leader is silent.
        """
        self._number = self._number + 1
        self._bucket = None
        tensors = iter(named_tensors)
        packed = self._packed(tensors)
        try:
            return asyncio.run(self._serve(packed))
        finally:
            for rest in (packed, tensors):
                for _ in rest:
                    pass

    def close(self) -> None:
        """Leave the group."""
        for group in (self._joining, self._group):
            if group is not None:
                group.drop()
        self._joining = self._group = None

    def _packed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Flat, bool]]:
        for bucket, last in with_last(
            buckets(checked(tensors, self.expected, set(), own=False), self.buffer_size_bytes)
        ):
            yield flatten(bucket, self.device), last

    async def _serve(self, packed: Iterator[tuple[Flat, bool]]) -> int:
        self._sent_bytes = 0
        async with Ahead(packed) as ready:
            order = await self._order()
            while order["do"] != OVER:
                answering, following = (
                    asyncio.ensure_future(one)
                    for one in (self._answer(order, ready), self._order())
                )
                await asyncio.wait((answering, following), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    self.board.put(self._key("answer"), answering.result())
                answering.cancel()  # over, while a broadcast waits for an engine that will not come
                order = await following
            if order["failed"]:
                self.close()
        return self._sent_bytes

    async def _answer(
        self, order: dict[str, Any], ready: Ahead[tuple[Flat, bool]]
    ) -> dict[str, Any]:
        try:
            if order["do"] == JOIN:
                return self._open(order)
            if order["do"] == GO:
                await self._go()
                return {}
            self._bucket, last = await anext(ready)
        except Exception as error:  # noqa: BLE001 - rank 0 waits for an answer, whatever it is
            return {"error": f"{type(error).__name__}: {error}"}
        parts = [(part.name, part.dtype_name, part.shape) for part in self._bucket.parts]
        return {"tensors": parts, "bytes": self._bucket.memory.nbytes, "last": last}

    async def _order(self) -> dict[str, Any]:
        try:
            return await self.board.take(self._key("order"), timeout_s=self.timeout_s)
        except DeadlineExceeded:
            self.close()
            raise

    def _open(self, order: dict[str, Any]) -> dict[str, Any]:
        """A store where engines meet us; they come, and so do we, with the next order."""
        self.close()
        self._joining = BroadcastGroup(
            order["ranks"],
            address=meeting_address(order["engines"]),
            backend=backend_of(self.device),
            timeout_s=self.timeout_s,
            name=group_of(self.stage),
        )
        return {"address": self._joining.address, "port": self._joining.port}

    async def _go(self) -> None:
        """Join the group that was opened; or broadcast the bucket that was named last."""
        if self._joining is not None:
            await aside(self._joining.join)
            self._group = self._joining
            self._joining = None
            return
        assert self._bucket is not None
        assert self._group is not None
        await broadcast(self._group, self._bucket)
        self._sent_bytes = self._sent_bytes + self._bucket.memory.nbytes
        self._bucket = None

    def _key(self, what: str) -> str:
        return f"{self._number}/{self.stage}/{what}"
