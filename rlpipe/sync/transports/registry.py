"""`TRANSPORTS`: name → class of every weight transport.

`sync.transport` chooses `tensor`, `distributed`, `disk`, `delta` or `adapter`. `Pusher`
(`rlpipe.actors.trainer.pushing`) chooses `ipc` for engines on the trainer's GPUs and `staged` for a
broadcast from several pipeline stages.
"""

from __future__ import annotations

from typing import Any

from rlpipe.sync.transports.adapter import AdapterTransport
from rlpipe.sync.transports.base import Transport
from rlpipe.sync.transports.delta import DeltaTransport
from rlpipe.sync.transports.disk import DiskTransport
from rlpipe.sync.transports.distributed import DistributedTransport
from rlpipe.sync.transports.ipc import IpcTransport
from rlpipe.sync.transports.staged import StagedTransport
from rlpipe.sync.transports.tensor import TensorTransport

TRANSPORTS: dict[str, type[Transport[Any]]] = {
    "adapter": AdapterTransport,
    "tensor": TensorTransport,
    "ipc": IpcTransport,
    "distributed": DistributedTransport,
    "staged": StagedTransport,
    "disk": DiskTransport,
    "delta": DeltaTransport,
}
