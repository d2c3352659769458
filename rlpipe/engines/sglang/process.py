"""`ServerProcess`: start, await and stop a server in its own process group.

Base of `Server` and `Router`. The process gets this process's PID and kills its group when this
process ends (`rlpipe.system.orphan`). `flags` makes command lines.
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
from typing import IO, Any

import httpx

import rlpipe
from rlpipe.config.arguments import names
from rlpipe.errors import DeadlineExceeded, EngineUnavailable, ResourceError
from rlpipe.system import orphan
from rlpipe.system.forked import ForkedProcess, fork
from rlpipe.system.ports import free_port

LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_TAIL_CHARACTERS = 3000


class ServerProcess:
    """One `python -m module` process with an HTTP port."""

    ready_path = "/health"

    def __init__(
        self, name: str, module: str, host: str, port: int | None, log_path: str | Path
    ) -> None:
        """`port`: None picks a free one. Starts nothing."""
        self.name = name
        self.module = module
        self.host = host
        self.port = free_port(host) if port is None else port
        self.log_path = Path(log_path)
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id; None before `start`."""
        return None if self.process is None else self.process.pid

    @property
    def alive(self) -> bool:
        """True if the process runs. It can still be loading, or hang."""
        return self.process is not None and self.process.poll() is None

    def arguments(self) -> list[str]:
        """Return the command line after the module's name."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return variables to add to this process's environment."""
        return {}

    @property
    def template(self) -> str | None:
        """Name of the template process that may fork the server; None for a process of its own."""
        return None

    def advice(self, log: str) -> str:
        """Return what to do about a process that ended while starting, from the end of its log."""
        return f"read {self.log_path}"

    def start(self) -> None:
        """Start the process and return at once. Raises: ResourceError if the port is taken."""
        require_free_port(self.host, self.port, self.name)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # The server imports rlpipe too, from wherever this process imported it.
        source = str(Path(rlpipe.__file__).parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self.environment()}
        with self.log_path.open("ab") as log:
            self.process = self._forked(environment, log) or self._started(environment, log)

    def _started(self, environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.module, orphan.FLAG, str(os.getpid())]
        # The new session makes the process the leader of its group, which `stop` and the watch of
        # `orphan` kill as a whole.
        return subprocess.Popen(
            [*command, *self.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )

    def _forked(self, environment: dict[str, str], log: IO[bytes]) -> ForkedProcess | None:
        """Return a process of the template, which differs in the time that it needs to start."""
        if self.template is None:
            return None
        with Path(os.devnull).open("rb") as nothing:
            return fork(
                self.template,
                self.module,
                self.arguments(),
                environment=environment,
                streams=(nothing.fileno(), log.fileno(), log.fileno()),
                leads_session=True,
            )

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server answers.

        Raises: EngineUnavailable if the process died, DeadlineExceeded; both with the end of the
        log.
        """
        end_s = time.monotonic() + deadline_s
        with httpx.Client(timeout=5.0) as client:
            while not self._answers(client):
                if not self.alive:
                    code = None if self.process is None else self.process.returncode
                    tail = self.log_tail()
                    raise EngineUnavailable(
                        "the process ended while starting",
                        where=self.name,
                        found=f"exit status {code}; {tail}",
                        do=self.advice(tail),
                    )
                if time.monotonic() > end_s:
                    raise DeadlineExceeded(
                        "the server is not ready",
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
        """Kill the process group and wait for the process. Calling it twice is allowed.

        A slow shutdown would save nothing: the process holds no state that counts.
        """
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self) -> str:
        """Return the end of the log."""
        if not self.log_path.exists():
            return "no log"
        text = self.log_path.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        return f"the log {self.log_path} ends:\n{text}"


def require_free_port(host: str, port: int, name: str) -> None:
    """Raises: ResourceError if the port is taken."""
    # The router binds with SO_REUSEPORT and would silently share the port.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ResourceError(
                "the port cannot be used",
                where=name,
                found=f"{host}:{port}: {error.strerror}",
                do="end the program that listens there, or repeat the command: it takes free ports",
            ) from error


def flags(table: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as command line flags.

    `mem_fraction_static: 0.8` becomes `--mem-fraction-static 0.8`.
    true gives the bare flag. false gives the flag that turns the option off, if one exists. null
    gives nothing. If the option takes several words, a list gives its items and a dict gives
    `name=value` words; otherwise both are JSON. `table` names the table of known arguments.
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
            # argparse reads a separate word with a dash as an option.
            line.append(f"{_option(plain)}={words[0]}")
        else:
            line += [_option(plain), *words]
    return line


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(value: Any, *, several: bool) -> list[str]:
    """Return the words after an option. `several`: the option takes more than one."""
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()] if several else [json.dumps(value)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [str(item) for item in value] if several else [json.dumps(list(value))]
    return [str(value)]
