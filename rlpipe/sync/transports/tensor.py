"""Weights over HTTP, from trainer rank 0 to each engine's `/update_weights_from_tensor`, in
buckets.

To engines on this machine goes where in shared memory a bucket lies (`shared`), to others the
bytes.

Not here: CUDA IPC handles (`ipc`), NCCL groups (`distributed`), or files. Where trainer and engine
share no GPU this is right but not fast.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from torch import Tensor

from rlpipe.sync.session import Session
from rlpipe.sync.tensors import Bucket, checked
from rlpipe.sync.transports.bucketed import BUCKET, BucketTransport
from rlpipe.sync.transports.shared import SharedBuffer, references


class TensorTransport(BucketTransport[Bucket]):
    """See `base.Transport`."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        buffer_size_bytes: int,
        timeout_s: float,
        tensor_parallel_size: int = 1,
    ) -> None:
        super().__init__(
            model_dir,
            buffer_size_bytes=buffer_size_bytes,
            timeout_s=timeout_s,
            tensor_parallel_size=tensor_parallel_size,
        )
        self._shared = SharedBuffer()

    def _checked(
        self, tensors: Iterator[tuple[str, Tensor]], missing: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        return checked(tensors, self.expected, missing)

    def pack(self, bucket: Bucket, engines: Sequence[str]) -> Bucket:
        return bucket

    async def load(self, session: Session, packed: Bucket, *, last: bool) -> None:
        here = all(is_here(engine.url) for engine in session.active)
        placed = self._shared.place(packed) if here else None
        body = pickle.dumps(packed, protocol=pickle.HIGHEST_PROTOCOL) if placed is None else b""
        stamp = session.stamp if last else None
        await session.each(
            f"bucket {session.buckets}",
            lambda engine: engine.update_from_tensors(
                [body or references(placed or ()) for _ in range(self.tensor_parallel_size)],
                weight_version=stamp,
                flush_cache=last,
            ),
            kind=BUCKET,
        )
        session.count(len(packed), sum(tensor.nbytes for _, tensor in packed))


def is_here(url: str) -> bool:
    """Is this address on the loopback interface of our machine?"""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
