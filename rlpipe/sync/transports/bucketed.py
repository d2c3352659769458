"""A push in buckets: what the transports have in common that load weights into an engine piece by
piece.

The trainer's tensors are read in a thread of their own, one bucket ahead, so that the next one is
gathered, and packed for its way, while engines load the last; the first already while they are
paused. Memory that was taken for it is given back once they go on. Each tensor is checked against
the model directory before it is sent: SGLang ignores a wrong name, and dies of a wrong shape.

With a check, all of it is sent twice: after `end` the engine remembers what it holds and fills it
with random numbers; then begin → buckets → end again, and it compares. What was not sent, or was
not taken, differs.

Not here: how a bucket gets there (`tensor`, `distributed`, `ipc`), what else is said to the engines
(`session`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from rlpipe.engines.sglang.admin import PauseMode
from rlpipe.errors import SyncError
from rlpipe.sync.session import Session, push_session
from rlpipe.sync.tensors import Bucket, buckets, checked, expected_shapes, with_last
from rlpipe.sync.threads import Ahead
from rlpipe.sync.transports.base import PushReport

Packed = TypeVar("Packed")
TENSORS, BUCKET, GIVE_BACK = "tensors", "bucket", "give memory back"
"""Steps of a push (`PushReport.steps`)."""


class BucketTransport(ABC, Generic[Packed]):
    """See `base.Transport`. `Packed` is a bucket made ready for its way."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        buffer_size_bytes: int,
        timeout_s: float,
        tensor_parallel_size: int = 1,
    ) -> None:
        """`model_dir` says which names and shapes the engines hold. `timeout_s` is for a whole
        push; one call gets a quarter."""
        self.expected = expected_shapes(model_dir)
        self.buffer_size_bytes = buffer_size_bytes
        self.timeout_s = timeout_s
        self.tensor_parallel_size = tensor_parallel_size

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
        """See `base.Transport.push`. Must not be called on a running event loop.

        `pause`: see `Session.hold`. `goes_on`: see `Session.resume`. `check`: see the module; an
        engine that differs makes the whole push fail.
        """
        tensors = iter(named_tensors)
        packed = self.packed(tensors, engines, stamp, check)

        async def send(session: Session) -> None:
            async with Ahead(packed) as ready:
                try:
                    await self._send(session, ready, pause, check)
                    await session.resume(goes_on=goes_on)
                    session.turn_to(GIVE_BACK)
                    async for _ in ready:
                        raise AssertionError("a bucket after the last")
                finally:
                    self.finish()

        try:
            return asyncio.run(push_session(engines, stamp, send, timeout_s=self.timeout_s))
        finally:
            self.finish()
            _exhaust(packed)
            _exhaust(tensors)

    def packed(
        self, tensors: Iterator[tuple[str, Tensor]], engines: Sequence[str], stamp: str, check: bool
    ) -> Iterator[tuple[Packed, bool]]:
        """What is sent, bucket by bucket, and whether it is the last; with a check, all of it
        twice.

        Raises: SyncError for a tensor that the engines do not hold, or if some that they hold are
        missing.
        """
        missing = set(self.expected)
        kept = []
        for bucket, last in with_last(
            buckets(self._checked(tensors, missing), self.buffer_size_bytes)
        ):
            if last and missing:
                raise SyncError(
                    "tensors are missing",
                    where=f"push of {stamp}",
                    found=f"no {', '.join(sorted(missing)[:5])}",
                )
            if check:
                kept.append(([(name, tensor.cpu()) for name, tensor in bucket], last))
            yield self.pack(bucket, engines), last
        for bucket, last in kept:
            yield self.pack(bucket, engines), last

    def _checked(
        self, tensors: Iterator[tuple[str, Tensor]], missing: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        return checked(tensors, self.expected, missing, own=False)

    @abstractmethod
    def pack(self, bucket: Bucket, engines: Sequence[str]) -> Packed:
        """Make a bucket ready, in the reading thread."""

    async def connect(self, session: Session) -> None:
        """Before the first bucket, to engines that are paused."""

    @abstractmethod
    async def load(self, session: Session, packed: Packed, *, last: bool) -> None:
        """Have all engines load a bucket; with the last one they take the session's stamp. Count
        it."""

    def finish(self) -> None:
        """Nothing more is loaded in this push. Twice is once."""

    async def _send(
        self, session: Session, ready: Ahead[tuple[Packed, bool]], pause: PauseMode, check: bool
    ) -> None:
        await session.hold(pause)
        await self.connect(session)
        await session.begin()
        again = False
        session.turn_to(TENSORS)
        async for packed, last in ready:
            await self.load(session, packed, last=last)
            session.turn_to(TENSORS)
            if not last:
                continue
            await session.end()
            if again:
                await session.compare()
            if again or not check:
                return
            again = True
            await session.overwrite()
            await session.begin()


def _exhaust(items: Iterator[object]) -> None:
    for _ in items:
        pass
