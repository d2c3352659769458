"""The servers of a soak, S3 and Prefect, restarted with their address and data if killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from rlpipe.errors import ResourceError
from tools.local_prefect import SETTINGS, START_TIMEOUT_S, free_port
from tools.s3_server import S3Server

DOWN_S = (1.0, 10.0)
"""Range of the seconds after which a killed server is started again."""


class Restartable(Protocol):
    """A server process that can be started again with its address and data."""

    process: subprocess.Popen[bytes]

    def restart(self) -> None: ...
    def stop(self) -> None: ...


class PrefectServer:
    """A Prefect server with its database in `directory`; ends with this process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._port = free_port(4200)
        self.url = f"http://127.0.0.1:{self._port}/api"
        self.process = self._begin()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that uses the server."""
        return {**SETTINGS, "PREFECT_API_URL": self.url, "PREFECT_HOME": str(self._directory)}

    def restart(self) -> None:
        """Start the server again without waiting for it."""
        self.stop()
        self.process = self._begin()

    def stop(self) -> None:
        """Kill the server and its children."""
        self.process.kill()
        self.process.wait(timeout=30)

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises: ResourceError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with (
                suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5),
            ):
                return
            time.sleep(0.2)
        raise ResourceError(
            "the Prefect server did not come up",
            where=self.url,
            do=f"see {self._directory}/server.log",
        )

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "tools.prefect_server",
            str(os.getpid()),
            "server",
            "start",
        ]
        with (self._directory / "server.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self._port)],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Servers:
    """S3 and Prefect of a soak. `tick` restarts a dead server after a while."""

    def __init__(self, home: Path, chance: random.Random) -> None:
        self._chance = chance
        self._due_s: dict[str, float] = {}
        self.s3 = S3Server(home / "s3", bucket="chaos")
        self.prefect = PrefectServer(home / ".prefect")
        self._all: dict[str, Restartable] = {"s3": self.s3, "prefect": self.prefect}
        try:
            self.s3.wait_ready()
            self.prefect.wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a run that uses them."""
        return {**self.s3.environment, **self.prefect.environment}

    def victim(self, name: str) -> list[psutil.Process]:
        """Return the process of a server, if it runs."""
        process = self._all[name].process
        return [psutil.Process(process.pid)] if process.poll() is None else []

    @property
    def pids(self) -> list[int]:
        return [server.process.pid for server in self._all.values()]

    def tick(self) -> None:
        """Restart servers that are due. Call it often."""
        for name, server in self._all.items():
            if server.process.poll() is None:
                continue
            due_s = self._due_s.setdefault(name, time.monotonic() + self._chance.uniform(*DOWN_S))
            if time.monotonic() >= due_s:
                del self._due_s[name]
                server.restart()

    def wait_ready(self) -> None:
        """Start both now if needed, and wait for them."""
        for server in self._all.values():
            if server.process.poll() is not None:
                server.restart()
        self._due_s.clear()
        self.s3.wait_ready()
        self.prefect.wait_ready()

    def stop(self) -> None:
        for server in self._all.values():
            server.stop()
