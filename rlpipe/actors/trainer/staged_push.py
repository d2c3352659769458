"""`StagedPush`: a trainer rank's part in a push that every pipeline stage sends its own weights in.

The first rank of each stage sends; the others of a stage help to gather its tensors.

Not here: how it goes (`rlpipe.sync.transports.staged`), pushes from one rank (`pushing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.bridges.stages import place, stage_weights
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.sync.board import Board
from rlpipe.sync.transports.staged import StagedTransport, StageSource

Send = Callable[[StagedTransport, Iterator[tuple[str, Tensor]]], dict[str, Any]]


class StagedPush:
    """One rank's. Collective to make and to use; kept from one push to the next."""

    def __init__(
        self,
        engine: MegatronEngine,
        model_dir: str,
        *,
        rank: int,
        address: str,
        tensor_parallel_size: int,
        **common: Any,
    ) -> None:
        """`model_dir`: says what engines hold, each on `tensor_parallel_size` ranks. `address`: of
        this machine, for the others.

        `common`: `buffer_size_bytes`, `timeout_s`.
        """
        self._engine, self._place = engine, place()
        opened = Board(address) if rank == 0 else None
        where: list[Any] = [(address, opened.port) if opened else None]
        dist.broadcast_object_list(where, src=0)
        self._leader: StagedTransport | None = None
        self._source: StageSource | None = None
        settings = {"device": platform.device(), **common}
        if opened is not None:
            stages = self._place.stages
            ranks = tensor_parallel_size
            self._leader = StagedTransport(
                model_dir, opened, stages, tensor_parallel_size=ranks, **settings
            )
        elif self._place.speaks:
            self._source = StageSource(model_dir, Board(*where[0]), self._place.stage, **settings)

    def push(
        self,
        send: Send,
        served: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]],
    ) -> dict[str, Any]:
        """What `send` answers at rank 0, which is given the leader and the tensors of its stage; at
        other ranks the bytes sent.

        `served`: the tensors as engines hold them. Raises: what `send` raises; DeadlineExceeded if
        the leader is silent.
        """
        trained = self._engine.trained
        tensors = served(stage_weights(trained.bridge, trained.ddp))
        if self._leader is not None:
            return send(self._leader, tensors)
        if self._source is not None:
            return {"bytes": self._source.serve(tensors)}
        for _ in tensors:
            pass
        return {"bytes": 0}

    def close(self) -> None:
        """Leave the groups with engines."""
        for one in (self._leader, self._source):
            if one is not None:
                one.close()
