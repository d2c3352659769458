"""A place to run in: which processes were started there (`tools.up`), what points others at them,
and who is at it now.

    {home}/.up/<name>.json     a process: its PID, what tells it from a later one whatever the clock says, its ports
    {home}/.up/lock            held by whoever brings the place up or down

Not here: starting and ending them.
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


@dataclass(frozen=True)
class Record:
    """A process that was started here."""

    pid: int
    pid_space: str
    """Where its PID is one: this boot of the machine, this PID namespace."""
    started: int
    """Clock ticks from boot to its start: a number is given to another process some day."""
    ports: tuple[int, ...]

    @property
    def process(self) -> psutil.Process | None:
        """It, if it still runs."""
        if self.pid_space != pid_space() or ended(self.pid, self.started):
            return None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid)
        return None


class Place:
    """The processes of one home. `without`: names that runs do not use, whether they run or not."""

    def __init__(self, folder: Path, without: Iterable[str] = ()) -> None:
        self.home, self.folder, self.without = folder, folder / ".up", frozenset(without)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                "no servers can be kept there",
                where=f"{HOME_VARIABLE} or --home",
                found=f"{error.filename or folder}: {error.strerror}",
                expected="a folder of yours, or the name of one that can be made",
            ) from error

    def record(self, name: str) -> Record | None:
        """What was started last under this name, running or not. Raises: ResourceError if the
        record cannot be read."""
        file = self.folder / f"{name}.json"
        if not file.is_file():
            return None
        text = file.read_text()
        try:
            values = json.loads(text)
            return Record(**{**values, "ports": tuple(values["ports"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ResourceError(
                "the record of a process cannot be read",
                where=str(file),
                found=text[:200],
                expected=", ".join(Record.__annotations__),
                do=f"end that process ({name}) if it runs, and delete the file",
            ) from error

    def keep(self, name: str, pid: int, ports: Iterable[int]) -> None:
        """Remember a process that was started."""
        _, started = state_and_start(pid)
        record = Record(pid, pid_space(), started, tuple(ports))
        (self.folder / f"{name}.json").write_text(json.dumps(asdict(record)))

    def running(self, name: str) -> psutil.Process | None:
        record = self.record(name)
        return record and record.process

    def used(self, name: str) -> bool:
        """Does it run, for runs to use?"""
        return name not in self.without and self.running(name) is not None

    def ports(self, name: str, made: Callable[[], list[int]]) -> list[int]:
        """The ports it had if nobody else has them now, else new ones."""
        record = self.record(name)
        return (
            list(record.ports)
            if record and all(free_port(port) == port for port in record.ports)
            else made()
        )

    def url(self, name: str) -> str:
        record = self.record(name)
        assert record is not None
        return (
            f"127.0.0.1:{record.ports[0]}"
            if name == "ray"
            else f"http://127.0.0.1:{record.ports[0]}"
        )

    @property
    def secret(self) -> str:
        """The key of the S3 store, made once."""
        file = self.folder / "s3.key"
        if not file.is_file():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(24))
        return file.read_text()

    @property
    def environment(self) -> dict[str, str]:
        """What points a process at the servers that run here."""
        store = s3_environment(self.url("s3"), self.secret) if self.used("s3") else {}
        where = {"PREFECT_API_URL": f"{self.url('prefect')}/api"} if self.used("prefect") else {}
        access = ray_settings(self.home) if self.used("ray") else {}
        return {**where, **store, **access, HOME_VARIABLE: str(self.home)}

    @property
    def overrides(self) -> list[str]:
        """Settings of every run from here."""
        store = [f"store.root=s3://{BUCKET}/runs"] if self.used("s3") else []
        return [*store, *([f"resources.ray_address={self.url('ray')}"] if self.used("ray") else [])]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@contextmanager
def alone(place: Place, command: str) -> Iterator[None]:
    """Nobody else brings this place up or down meanwhile. Raises: ResourceError if somebody is at
    it."""
    with (place.folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ResourceError(
                "somebody else brings this place up or down just now",
                where=lock.name,
                found=lock.read() or None,
                do="wait until that has ended, then the same command",
            ) from error
        lock.truncate(0)
        lock.write(f"{command}, PID {os.getpid()}")
        lock.flush()
        yield
