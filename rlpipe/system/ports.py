"""A TCP port to listen on. Not here: who listens."""

from __future__ import annotations

import random
import socket

from rlpipe.errors import ResourceError

RANGE = range(15000, 30000)
"""Below what Linux gives to outgoing connections (32768 up). A server loads for half a minute
before it binds, a trainer imports torch before it does; a port of the system's own choice is often
gone by then."""


def free_port(host: str = "127.0.0.1", *, following: int = 0) -> int:
    """A port of `RANGE` that nobody listens on now, nor on so many that follow it.

    Raises: ResourceError if none of a hundred is free.
    """
    for port in random.SystemRandom().sample(RANGE, 100):
        if all(_is_free(host, one) for one in range(port, port + following + 1)):
            return port
    raise ResourceError(
        "no port is free", where=host, expected=f"one of {RANGE.start} to {RANGE.stop - 1}"
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
