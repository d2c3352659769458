"""A server in a process group of its own: start, wait until it answers, stop. What `Server` and
`Router` have in common.

The process gets our PID and ends its whole group when we are gone (`orphan`). Not here: restarting
it, or what it is told.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import rlpipe
from rlpipe.config.arguments import names
from rlpipe.errors import DeadlineExceeded, EngineUnavailable, ResourceError
from rlpipe.system import orphan
from rlpipe.system.ports import free_port

LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_TAIL_CHARACTERS = 3000


class ServerProcess:
    """One `python -m module` with an HTTP port."""

    ready_path = "/health"

    def __init__(
        self, name: str, module: str, host: str, port: int | None, log_path: str | Path
    ) -> None:
        """`port` None picks a free one. Nothing is started yet."""
        self.name = name
        self.module = module
        self.host = host
        self.port = free_port(host) if port is None else port
        self.log_path = Path(log_path)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of its process; None before it was started."""
        return None if self.process is None else self.process.pid

    @property
    def alive(self) -> bool:
        """Its process runs. It may still be loading, or hang."""
        return self.process is not None and self.process.poll() is None

    def arguments(self) -> list[str]:
        """The command line after the module's name."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Variables that are set for it, beside ours."""
        return {}

    def start(self) -> None:
        """Start it and return at once. Raises: ResourceError if its port is taken."""
        require_free_port(self.host, self.port, self.name)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            self.module,
            orphan.FLAG,
            str(os.getpid()),
            *self.arguments(),
        ]
        source = str(Path(rlpipe.__file__).parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self.environment()}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until it answers. Raises: EngineUnavailable with the end of its log if it died,
        DeadlineExceeded likewise."""
        end_s = time.monotonic() + deadline_s
        with httpx.Client(timeout=5.0) as client:
            while not self._answers(client):
                if not self.alive:
                    code = None if self.process is None else self.process.returncode
                    raise EngineUnavailable(
                        "it ended while starting",
                        where=self.name,
                        found=f"exit status {code}; {self.log_tail()}",
                        do=f"read {self.log_path}",
                    )
                if time.monotonic() > end_s:
                    raise DeadlineExceeded(
                        "it is not ready",
                        where=self.name,
                        found=f"no answer from {self.url}{self.ready_path}; {self.log_tail()}",
                        expected=f"an answer within {deadline_s:g} s",
                        do=f"read {self.log_path}, or raise resources.start_timeout_s",
                    )
                time.sleep(_POLL_S)

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}{self.ready_path}").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Kill its process group and wait for it; nothing in it is worth a slow shutdown. Calling
        it again is harmless."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self) -> str:
        """The end of its log."""
        if not self.log_path.exists():
            return "no log"
        text = self.log_path.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        return f"the log {self.log_path} ends:\n{text}"


def require_free_port(host: str, port: int, name: str) -> None:
    """Raises: ResourceError if `port` is taken (the router would share it silently: it binds with
    SO_REUSEPORT)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ResourceError(
                "its port cannot be used",
                where=name,
                found=f"{host}:{port}: {error.strerror}",
                do="choose another, or none for a free one",
            ) from error


def flags(table: str, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as command line flags: `mem_fraction_static: 0.8` is `--mem-fraction-static 0.8`.

    true is the bare flag; false is the flag that turns it off, where there is one, and null leaves
    it out. A list is several words and a dict is `name=value` words where the option takes several;
    elsewhere both are JSON.
    """
    known = names.entries(table)
    line = []
    for name, value in arguments.items():
        plain = name.replace("-", "_").lstrip("_")
        entry = known.get(plain, {})
        if value is False and "off" in entry:
            line.append(_option(entry["off"]))
        if value is None or value is False:
            continue
        words = _words(value, several=entry.get("words", False))
        if len(words) == 1 and words[0].startswith("-"):
            line.append(
                f"{_option(plain)}={words[0]}"
            )  # argparse takes a word with a dash for an option
        else:
            line += [_option(plain), *words]
    return line


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(value: Any, *, several: bool) -> list[str]:
    """The words after an option; `several`: it takes more than one."""
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()] if several else [json.dumps(value)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [str(item) for item in value] if several else [json.dumps(list(value))]
    return [str(value)]
