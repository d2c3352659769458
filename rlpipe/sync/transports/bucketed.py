"""Base of the transports that load weights into engines bucket by bucket.

`BucketTransport` gathers and packs the next bucket in a thread while the engines load the previous
one. The first bucket is packed while the engines are being paused.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

from rlpipe.sync.session import PushReport, Session, run_session
from rlpipe.sync.tensors import (
    Bucket,
    NamedTensors,
    check_tensors,
    exhaust,
    into_buckets,
    mark_last,
    require_none_missing,
)
from rlpipe.sync.threads import ReadAhead
from rlpipe.sync.transports.base import Push, Transport

Packed = TypeVar("Packed")
TENSORS = "tensors"
BUCKET = "bucket"
GIVE_BACK = "give memory back"
"""Steps of a push (`PushReport.steps`)."""


class BucketTransport(Transport[PushReport], Generic[Packed]):
    """Rank 0 sends; the other ranks take part in gathering.

    `Packed` is a bucket in the form that `load` sends.
    """

    compact = False
    """See `check_tensors`."""

    def send(self, tensors: NamedTensors, push: Push) -> PushReport:
        """See `Transport.send`. Must not be called on a running event loop.

        With `push.check` all tensors are sent twice. After the first pass each engine remembers its
        weights and overwrites them with random numbers; after the second it compares. A tensor that
        was not sent or not loaded differs, and fails the push for all engines.
        """
        stream = iter(tensors)
        if self.setup.rank > 0:
            return self.assist(stream, push)
        packed = self.packed(stream, push)

        async def work(session: Session) -> None:
            async with ReadAhead(packed) as ready:
                try:
                    await self._load_all(session, ready, push)
                    await session.resume(sampling=push.resume)
                    # Engines sample while the iterator releases the memory of its buckets.
                    session.start_step(GIVE_BACK)
                    async for _ in ready:
                        raise AssertionError("a bucket after the last")
                finally:
                    self.finish()

        try:
            timeout_s = self.setup.sync.timeout_s
            return asyncio.run(run_session(push.engines, push.stamp, work, timeout_s=timeout_s))
        finally:
            # `pack` can wait for engines; `finish` ends that wait. Then the other ranks can gather
            # to the end.
            self.finish()
            exhaust(packed)
            exhaust(stream)

    def assist(self, tensors: Iterator[tuple[str, Tensor]], push: Push) -> PushReport:
        """Take part in a push as another rank than 0."""
        return PushReport(push.stamp, size_bytes=sum(tensor.nbytes for _, tensor in tensors))

    def packed(
        self, tensors: Iterator[tuple[str, Tensor]], push: Push
    ) -> Iterator[tuple[Packed, bool]]:
        """Yield each packed bucket and whether it is the last of its pass; two passes with a check.

        Raises: SyncError for a tensor that the engines do not hold, or if tensors are missing.
        """
        missing = set(self.expected)
        checked = check_tensors(tensors, self.expected, missing, compact=self.compact)
        first_pass = []
        buckets = into_buckets(checked, self.setup.sync.update_weight_buffer_size)
        for bucket, last in mark_last(buckets):
            if last:
                require_none_missing(missing, push.stamp)
            if push.check:
                # The second pass cannot gather again: the stream is read once.
                first_pass.append(([(name, tensor.cpu()) for name, tensor in bucket], last))
            yield self.pack(bucket), last
        for bucket, last in first_pass:
            yield self.pack(bucket), last

    @abstractmethod
    def pack(self, bucket: Bucket) -> Packed:
        """Prepare a bucket. Runs in the reading thread."""

    async def connect(self, session: Session) -> None:
        """Prepare the paused engines for the first bucket."""

    @abstractmethod
    async def load(self, session: Session, packed: Packed, *, last: bool) -> None:
        """Load a bucket into all engines and count it (`Session.count_bucket`).

        With the last bucket the engines take the session's stamp.
        """

    def finish(self) -> None:
        """End the loading of this push. Calling it twice is allowed."""

    async def _load_all(
        self, session: Session, ready: ReadAhead[tuple[Packed, bool]], push: Push
    ) -> None:
        await session.open(push.pause)
        await self.connect(session)
        second_pass = False
        session.start_step(TENSORS)
        async for packed, last in ready:
            await self.load(session, packed, last=last)
            session.start_step(TENSORS)
            if not last:
                continue
            if not push.check:
                return
            await session.end()
            if second_pass:
                await session.compare()
                return
            second_pass = True
            await session.overwrite()
            await session.begin_again()
