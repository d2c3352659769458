"""The process group in which one trainer rank (rank 0) broadcasts weights to the ranks of engines.

An engine joins through `/init_weights_update_group`, where SGLang meets the others at a TCP store
and then calls the same function of torch as here; so both sides agree on the names under which they
find each other. It is a group beside the trainer's own: it is not in the way of Megatron's, which
do not know of it.

A broadcast that an engine does not take part in stays open, and a group in that state cannot be
left in good order: the engines that wait in it are replaced, and `drop` leaves it to a thread.

Not here: what is said to the engines (`distributed`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from rlpipe.sync.threads import start
from rlpipe.sync.transports.tensor import is_here
from rlpipe.system.rendezvous import gloo_at, store

NAME = "rlpipe"
"""Of rank 0's group, in the engines too. One name for all: who comes after a trainer that died can
end what that one left."""
MEET_S = 60.0
NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang starts its processes with: both ends of a connection have to reach each other's
memory in the same way."""


def use_nccl_as_engines_do() -> None:
    """Before this process's first NCCL communicator. What the environment says otherwise stays:
    engines inherit it too."""
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)


class BroadcastGroup:
    """One group. Make it, have every engine join at `address` and `port` meanwhile, and `join`."""

    def __init__(
        self, engine_ranks: int, *, address: str, backend: str, timeout_s: float, name: str = NAME
    ) -> None:
        """Opens the store on a free port of `address`. `timeout_s`: after it, a broadcast gives
        itself up on gloo."""
        self.world_size, self._backend, self._timeout = (
            1 + engine_ranks,
            backend,
            timedelta(seconds=timeout_s),
        )
        self._name = name
        self._meet = timedelta(seconds=min(MEET_S, timeout_s))
        self.address = address
        self._server = store(address, 0, listens=True, timeout=self._meet)
        self._group: dist.ProcessGroup | None = None

    @property
    def port(self) -> int:
        """Where the engines meet us."""
        return self._server.port

    def join(self) -> None:
        """Wait for all engines and open the group. Blocks. Raises: RuntimeError if not all of them
        come."""
        meeting = store(
            self.address,
            self.port,
            listens=False,
            timeout=self._meet,
            world_size=self.world_size,
            wait=True,
        )
        meeting.set_timeout(self._timeout)
        with gloo_at(self.address):
            self._group, _ = c10d._new_process_group_helper(
                self.world_size,
                0,
                [],
                dist.Backend(self._backend),
                PrefixStore(self._name, meeting),
                group_name=cast("Any", self._name),
                timeout=self._timeout,
            )
        _forget(self._group)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send a tensor to all engines. The first time, NCCL blocks until every engine is
        there too."""
        assert self._group is not None, "join first"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        return self._group.broadcast([tensor], options)

    def drop(self) -> None:
        """Leave the group at once, whatever is still under way in it. Twice is once."""
        group = self._group
        self._group = None
        if group is not None:
            start(_Leave(group))


class _Leave:
    """Holds the last reference to a group: on gloo, to let it go is to wait for what is under
    way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def __call__(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


def _forget(group: dist.ProcessGroup) -> None:
    """Take a group out of torch's list: the end of the trainer's own groups must not wait for
    engines."""
    world = c10d._world
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        known.pop(group, None)
    if (tag := world.pg_to_tag.pop(group, None)) is not None:
        world.tags_to_pg[tag].remove(group)
    _unregister_process_group(group.group_name)


def meeting_address(urls: Sequence[str]) -> str:
    """Where engines at these URLs reach this machine."""
    elsewhere = [url for url in urls if not is_here(url)]
    return own_address_towards(elsewhere[0]) if elsewhere else "127.0.0.1"


def own_address_towards(url: str) -> str:
    """The address under which this machine is reached from where `url` is: that of the interface
    that leads there."""
    there = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((there.hostname, there.port))  # nothing is sent
        return probe.getsockname()[0]


def backend_of(device: torch.device) -> str:
    """What moves tensors of this device."""
    return "nccl" if device.type == "cuda" else "gloo"
