"""TCP ports and addresses of this machine: `free_port`, `is_free`, `is_loopback`."""

from __future__ import annotations

import random
import socket
from urllib.parse import urlsplit

from rlpipe.errors import ResourceError

RANGE = range(15000, 30000)
"""Below the range that Linux uses for outgoing connections (32768 and above). A server loads for
half a minute before it binds, and a trainer imports torch first. A port that the system chose is
often taken by then."""


def free_port(host: str = "127.0.0.1", *, following: int = 0) -> int:
    """Return a port of `RANGE` that is free together with the `following` ports after it.

    Raises: ResourceError if a hundred random ports are taken.
    """
    for port in random.SystemRandom().sample(RANGE, 100):
        if all(is_free(host, candidate) for candidate in range(port, port + following + 1)):
            return port
    raise ResourceError(
        "no port is free", where=host, expected=f"a port from {RANGE.start} to {RANGE.stop - 1}"
    )


def is_loopback(url: str) -> bool:
    """True if a URL names the loopback interface of this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def is_free(host: str, port: int) -> bool:
    """True if a server can listen at this port now."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
