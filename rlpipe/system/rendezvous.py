"""Stores and groups of torch.distributed that listen on one address only.

torch's own store listens on every address, and gloo on the address of the machine's host name.
NCCL's sockets are configured by NCCL_SOCKET_IFNAME for the whole process.
Importing this module does not import torch: processes that only need `gloo_settings` start faster.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

GLOO = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE = "lo"


def tcp_store(
    host: str,
    port: int,
    *,
    listens: bool,
    timeout: timedelta,
    world_size: int | None = None,
    wait: bool = False,
) -> TCPStore:
    """Open a store at an address (`listens`; port 0 is any free port), or connect to one.

    `wait`: return when all `world_size` processes are connected.
    Raises: DistNetworkError, DistStoreError (both RuntimeError) if the address is taken, or not
    reached in time.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    options = {"world_size": world_size, "timeout": timeout, "wait_for_workers": wait}
    if not listens:
        return TCPStore(host, port, is_master=False, **options)
    try:
        family, address = _resolve(host, port)
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise DistNetworkError(f"cannot listen at {host}:{port}: {error}") from error
    with listener:
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            master_listen_fd=listener.detach(),
            **options,
        )


def gloo_settings(host: str) -> dict[str, str]:
    """Return environment variables that bind gloo to the loopback interface, if `host` is there.

    An existing variable is kept.
    """
    is_loopback = ipaddress.ip_address(_resolve(host, 0)[1][0]).is_loopback
    return {GLOO: LOOPBACK_INTERFACE} if is_loopback and GLOO not in os.environ else {}


@contextmanager
def gloo_at(host: str) -> Iterator[None]:
    """Set `gloo_settings` for the gloo groups that are made in this block."""
    values = gloo_settings(host)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address[:2]
