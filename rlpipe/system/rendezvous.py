"""Where processes of torch.distributed meet: stores and groups that listen where they are asked to,
not on every address.

torch's own store takes whoever reaches the machine, and gloo listens at what the machine's name
stands for. Not here: who listens (`engines.megatron.groups`, `sync.transports.group`, ...); NCCL's
sockets, which NCCL_SOCKET_IFNAME places for the whole process.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

GLOO = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE = "lo"


def store(
    host: str,
    port: int,
    *,
    listens: bool,
    timeout: timedelta,
    world_size: int | None = None,
    wait: bool = False,
) -> TCPStore:
    """The store at this address: of who `listens`, there alone (port 0: a free one), else a
    connection to it. `wait`: until all of `world_size` are there.

    Raises: DistNetworkError, DistStoreError (of RuntimeError) if nobody can listen there, or it is
    not reached in time.
    """
    keep = {"world_size": world_size, "timeout": timeout, "wait_for_workers": wait}
    if not listens:
        return TCPStore(host, port, is_master=False, **keep)
    try:
        family, address = _resolved(host, port)
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise DistNetworkError(f"nobody can listen at {host}:{port}: {error}") from error
    with listener:
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            master_listen_fd=listener.detach(),
            **keep,
        )


def gloo_settings(host: str) -> dict[str, str]:
    """Environment variables that have gloo listen on the loopback interface, if `host` is there,
    unless the environment says."""
    there = ipaddress.ip_address(_resolved(host, 0)[1][0]).is_loopback
    return {GLOO: LOOPBACK_INTERFACE} if there and GLOO not in os.environ else {}


@contextmanager
def gloo_at(host: str) -> Iterator[None]:
    """Groups of gloo that are made meanwhile go by `gloo_settings`."""
    values = gloo_settings(host)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _resolved(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address[:2]
