"""Send weights over HTTP from trainer rank 0 to each engine's `/update_weights_from_tensor`.

Engines on this machine get references to a bucket in shared memory; other engines get its bytes.
This works everywhere. It is slow if the tensors are on a GPU.
"""

from __future__ import annotations

import pickle

from rlpipe.engines.sglang.admin import Engine
from rlpipe.sync.session import Session
from rlpipe.sync.tensors import Bucket
from rlpipe.sync.transports.base import TransportSetup
from rlpipe.sync.transports.bucket_memory import SharedBuffer, references
from rlpipe.sync.transports.bucketed import BUCKET, BucketTransport
from rlpipe.system.ports import is_loopback


class TensorTransport(BucketTransport[Bucket]):
    """See `base.Transport`."""

    compact = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._shared = SharedBuffer()

    def pack(self, bucket: Bucket) -> Bucket:
        return bucket

    async def load(self, session: Session, packed: Bucket, *, last: bool) -> None:
        all_local = all(is_loopback(engine.url) for engine in session.active)
        shared = self._shared.place(packed) if all_local else None
        body = pickle.dumps(packed, protocol=pickle.HIGHEST_PROTOCOL) if shared is None else b""
        num_ranks = self.setup.engine_tensor_parallel_size

        async def load_one(engine: Engine) -> None:
            # A reference is for one reader, so each engine rank gets its own.
            parts = [body or references(shared or ()) for _ in range(num_ranks)]
            await engine.update_from_tensors(
                parts, weight_version=session.stamp if last else None, flush_cache=last
            )

        await session.each(f"bucket {session.buckets}", load_one, kind=BUCKET)
        session.count_bucket(len(packed), sum(tensor.nbytes for _, tensor in packed))
