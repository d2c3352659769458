"""Servers for the tests: a real S3 server with signatures, a proxy that loses replies, and Prefect.

`LossyProxy` forwards everything and drops the reply it is told to lose: the writer cannot know
whether it wrote.

The conftest of each room makes fixtures of these.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.local_prefect import free_port
from tools.s3_server import S3Server


def seaweed(directory: Path, bucket: str = "tests") -> S3Server:
    """A SeaweedFS S3 server with one bucket under `directory`, to be entered: stopped on the way
    out."""
    return S3Server(directory, bucket)


@contextmanager
def prefect_api(directory: Path) -> Iterator[str]:
    """Run a Prefect server with its database under `directory`; return the URL of its API.

    Prefect's own `prefect_test_harness` changes the settings of the process until it ends, so tests
    of a session could not share its server.
    """
    # Not at the top: the tests of the store need no Prefect.
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings

    database = f"sqlite+aiosqlite:///{directory}/prefect.db"
    server = SubprocessASGIServer(port=free_port(0))
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: database}):
        server.start(timeout=120)
    # As in the harness: code of Prefect that has no URL uses this server and starts no other.
    SubprocessASGIServer._instances[None] = server
    try:
        yield server.api_url
    finally:
        # Threads of this process send logs and events to the server until they are drained.
        APILogWorker.instance().drain()
        EventsWorker.drain_all()
        del SubprocessASGIServer._instances[None]
        server.stop()


class LossyProxy:
    """Forwards TCP connections to an HTTP server; `lose(b"PUT ")` drops the reply to the next
    request with these bytes."""

    def __init__(self, server_url: str) -> None:
        host, _, port = server_url.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pattern: bytes | None = None
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, pattern: bytes) -> None:
        self._pattern = pattern

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                doomed = threading.Event()
                threading.Thread(
                    target=self._forward_requests, args=(client, server, doomed), daemon=True
                ).start()
                threading.Thread(
                    target=self._forward_replies, args=(server, client, doomed), daemon=True
                ).start()

    def _forward_requests(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with suppress(OSError), client, server:
            while data := client.recv(65536):
                if self._pattern and self._pattern in data:
                    self._pattern = None
                    doomed.set()
                server.sendall(data)

    def _forward_replies(
        self, server: socket.socket, client: socket.socket, doomed: threading.Event
    ) -> None:
        with suppress(OSError), server, client:
            while data := server.recv(65536):
                if doomed.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    self.lost += 1
                    server.shutdown(socket.SHUT_RDWR)
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
