"""Weights over HTTP, from trainer rank 0 to each engine's `/update_weights_from_tensor`, in buckets.

To engines on this machine goes where in shared memory a bucket lies (`shared`), to others the bytes.

With a check, all of it is sent twice: after `end` the engine remembers what it holds and fills it with random numbers; then
begin → buckets → end again, and it compares. What was not sent, or was not taken, differs.

A tensor is checked against the model directory before it is sent: SGLang ignores a wrong name and dies of a wrong shape.
Not here: what else is said to the engines (`session`), CUDA IPC handles, NCCL groups, or files. Where trainer and engine share
no GPU this is right but not fast.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from torch import Tensor

from rlpipe.engines.sglang.admin import PauseMode
from rlpipe.errors import SyncError
from rlpipe.sync.base import PushReport
from rlpipe.sync.session import Session, push_session
from rlpipe.sync.shared import SharedBuffer, references
from rlpipe.sync.tensors import Bucket, buckets, checked, expected_shapes, with_last


class TensorTransport:
    """See `base.Transport`."""

    def __init__(self, model_dir: str | Path, *, buffer_size_bytes: int, timeout_s: float, tensor_parallel_size: int = 1) -> None:
        """`model_dir` says which names and shapes the engines hold. `timeout_s` is for a whole push; one call gets a quarter."""
        self.expected = expected_shapes(model_dir)
        self._shared = SharedBuffer()
        self.buffer_size_bytes, self.timeout_s, self.tensor_parallel_size = buffer_size_bytes, timeout_s, tensor_parallel_size

    def push(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        engines: Sequence[str],
        stamp: str,
        *,
        pause: PauseMode = "abort",
        check: bool = False,
    ) -> PushReport:
        """See `base.Transport.push`. Must not be called on a running event loop.

        `pause`: see `Session.hold`. `check`: see the module; an engine that differs makes the whole push fail.
        """
        tensors = iter(named_tensors)
        shared = self._shared if all(map(is_here, engines)) else None

        async def send(session: Session) -> None:
            await self._send(session, tensors, pause, check, shared)

        try:
            return asyncio.run(push_session(engines, stamp, send, timeout_s=self.timeout_s))
        finally:
            for _ in tensors:
                pass

    async def _send(
        self, session: Session, tensors: Iterator[tuple[str, Tensor]], pause: PauseMode, check: bool, shared: SharedBuffer | None
    ) -> None:
        await session.hold(pause)
        await session.begin()
        missing, sent = set(self.expected), []
        for bucket, last in with_last(buckets(checked(tensors, self.expected, missing), self.buffer_size_bytes)):
            if last and missing:
                raise SyncError(
                    "tensors are missing", where=f"push of {session.stamp}", found=f"no {', '.join(sorted(missing)[:5])}"
                )
            await self._load(session, bucket, last, shared)
            sent += [(bucket, last)] if check else []
        await session.end()
        if check:
            await self._again(session, sent, shared)
        await session.resume()

    async def _again(self, session: Session, sent: Sequence[tuple[Bucket, bool]], shared: SharedBuffer | None) -> None:
        """Send it all over random numbers. Raises: SyncError if an engine then holds anything else than before."""
        await session.overwrite()
        await session.begin()
        for bucket, last in sent:
            await self._load(session, bucket, last, shared)
        await session.end()
        await session.compare()

    async def _load(self, session: Session, bucket: Bucket, last: bool, shared: SharedBuffer | None) -> None:
        placed = shared.place(bucket) if shared is not None else None
        body = pickle.dumps(bucket, protocol=pickle.HIGHEST_PROTOCOL) if placed is None else b""
        stamp = session.stamp if last else None
        await session.each(
            f"bucket {session.buckets}",
            lambda engine: engine.update_from_tensors(
                [body or references(placed or ()) for _ in range(self.tensor_parallel_size)],
                weight_version=stamp,
                flush_cache=last,
            ),
        )
        session.count(len(bucket), sum(tensor.nbytes for _, tensor in bucket))


def is_here(url: str) -> bool:
    """Is this address on the loopback interface of our machine?"""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
