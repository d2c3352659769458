"""A PostgreSQL server for the tests, where the machine has one; its data lie in a folder of its
own.

It refuses to run as root, so under root it runs as another user of the machine.

The machine needs PostgreSQL (Debian: apt-get install postgresql).
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.local_prefect import free_port

START_TIMEOUT_S = 60.0
USERS = ("postgres", "nobody")


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`: that of the path, or Debian's newest; None if there
    is none."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """The URL, as Prefect takes it, of the database of a server that ends with this block. `folder`
    is the binaries'."""
    place = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    port = free_port(0)
    user = _other_user()
    if user:
        os.chown(place, pwd.getpwnam(user).pw_uid, -1)
    _run(
        [folder / "initdb", "-D", place / "data", "-A", "trust", "-U", "rlpipe", "--no-sync"],
        user=user,
    )
    command = [
        folder / "postgres",
        "-D",
        place / "data",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-k",
        place,
        "-F",
    ]
    with (place.with_suffix(".log")).open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd="/")
    try:
        _wait(server, port)
        yield f"postgresql+asyncpg://rlpipe@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(place)
        place.with_suffix(".log").unlink()


def _other_user() -> str | None:
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(user for user in USERS if user in known)


def _run(command: Sequence[Any], *, user: str | None) -> None:
    subprocess.run(
        command, user=user, cwd="/", check=True, stdout=subprocess.DEVNULL, timeout=START_TIMEOUT_S
    )


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        assert server.poll() is None and time.monotonic() < end_s, "PostgreSQL did not come up"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
