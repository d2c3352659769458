"""Records of the servers that `tools.up` started in a home, and the settings that point to them.

{home}/.up/<name>.json     process: PID, boot and namespace, start in clock ticks, ports
{home}/.up/lock            held by a running `make up` or `make down`
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rlpipe.actors.ray.access import settings as ray_settings
from rlpipe.config.load import HOME_VARIABLE
from rlpipe.errors import ConfigError, ResourceError
from rlpipe.store.holders import ended, pid_space, state_and_start
from tools.local_prefect import free_port
from tools.s3_server import s3_environment

BUCKET = "rlpipe"
NAMES = ("s3", "prefect", "ray", "worker")
"""In starting order; `down` uses the opposite order."""


@dataclass(frozen=True)
class Record:
    """A process that `tools.up` started."""

    pid: int
    pid_space: str
    """Boot of the machine and PID namespace in which the PID is valid."""
    started: int
    """Clock ticks from boot to the start of the process. A PID alone is reused some day."""
    ports: tuple[int, ...]

    @property
    def process(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        if self.pid_space != pid_space() or ended(self.pid, self.started):
            return None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid)
        return None


class LocalServers:
    """The servers of one home. `without`: names that runs do not use, even if they run."""

    def __init__(self, folder: Path, without: Iterable[str] = ()) -> None:
        self.home = folder
        self.folder = folder / ".up"
        self.without = frozenset(without)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                "the folder of server records cannot be created",
                where=f"{HOME_VARIABLE} or --home",
                found=f"{error.filename or folder}: {error.strerror}",
                expected="a folder that you own or can create",
            ) from error

    def record(self, name: str) -> Record | None:
        """Return the last record of a name, running or not. Raises: ResourceError if unreadable."""
        file = self.folder / f"{name}.json"
        if not file.is_file():
            return None
        text = file.read_text()
        try:
            values = json.loads(text)
            return Record(**{**values, "ports": tuple(values["ports"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ResourceError(
                "the record of a process is damaged",
                where=str(file),
                found=text[:200],
                expected=", ".join(Record.__annotations__),
                do=f"end that process ({name}) if it runs, and delete the file",
            ) from error

    def keep(self, name: str, pid: int, ports: Iterable[int]) -> None:
        """Record a started process."""
        _, started = state_and_start(pid)
        record = Record(pid, pid_space(), started, tuple(ports))
        (self.folder / f"{name}.json").write_text(json.dumps(asdict(record)))

    def running(self, name: str) -> psutil.Process | None:
        """Return the process of a name, or None if it does not run."""
        record = self.record(name)
        return record and record.process

    def used(self, name: str) -> bool:
        """True if the server runs and runs may use it."""
        return name not in self.without and self.running(name) is not None

    def ports(self, name: str, choose: Callable[[], list[int]]) -> list[int]:
        """Return the recorded ports if they are free, else the result of `choose`."""
        record = self.record(name)
        return (
            list(record.ports)
            if record and all(free_port(port) == port for port in record.ports)
            else choose()
        )

    def url(self, name: str) -> str:
        """Return the address of a server."""
        record = self.record(name)
        assert record is not None
        return (
            f"127.0.0.1:{record.ports[0]}"
            if name == "ray"
            else f"http://127.0.0.1:{record.ports[0]}"
        )

    @property
    def secret(self) -> str:
        """Key of the S3 store, created once."""
        file = self.folder / "s3.key"
        if not file.is_file():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(24))
        return file.read_text()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that point a process to these servers."""
        store = s3_environment(self.url("s3"), self.secret) if self.used("s3") else {}
        prefect = {"PREFECT_API_URL": f"{self.url('prefect')}/api"} if self.used("prefect") else {}
        access = ray_settings(self.home) if self.used("ray") else {}
        return {**prefect, **store, **access, HOME_VARIABLE: str(self.home)}

    @property
    def overrides(self) -> list[str]:
        """Overrides of every run that uses these servers."""
        store = [f"store.root=s3://{BUCKET}/runs"] if self.used("s3") else []
        return [*store, *([f"resources.ray_address={self.url('ray')}"] if self.used("ray") else [])]

    def log(self, name: str) -> Path:
        """Return the log file of a server."""
        return self.folder / f"{name}.log"


@contextmanager
def exclusive(servers: LocalServers, command: str) -> Iterator[None]:
    """Hold the lock of a home. Raises: ResourceError if another `make up` or `make down` runs."""
    with (servers.folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ResourceError(
                "another `make up` or `make down` is running",
                where=lock.name,
                found=lock.read() or None,
                do="wait for its end, then repeat the command",
            ) from error
        lock.truncate(0)
        lock.write(f"{command}, PID {os.getpid()}")
        lock.flush()
        yield
