"""A Prefect server of this process's own, with its UI, for as long as a run takes; and caches kept
under the run's home.

It is started in a session of its own, so that Ctrl-C reaches the flow and not the server that has
to hear of it. Not used where a server is configured already: by PREFECT_API_URL, or by Prefect's
active profile (`prefect config set PREFECT_API_URL=…`).
"""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from flows.environment import CLIENT_SETTINGS, keep_caches_in
from rlpipe.errors import ResourceError
from rlpipe.system.certificates import certificates

START_TIMEOUT_S = 180.0
SETTINGS = {
    **CLIENT_SETTINGS,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # the run's own lines are on the terminal, logs in the UI
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # SQLite takes one writer at a time; many small ones make the client wait two seconds for each
    # collision
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "5",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D",
}


@contextmanager
def local_prefect(home: Path) -> Iterator[str]:
    """The API URL of the configured server, or of one that ends with this block. Import prefect
    inside it, not before.

    Raises: ResourceError if it does not come up, or the configured one is not there.
    """
    keep_caches_in(home)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if configured := os.environ.get("PREFECT_API_URL") or url_of_profile():
        _reach(configured)
        yield configured
        return
    folder = home / ".prefect"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PREFECT_HOME"] = str(folder)
    server, url = _started(folder)
    try:
        print(f"Prefect's pages of this run: {url}", file=sys.stderr)
        yield f"{url}/api"
    finally:
        _end(server)
        del os.environ["PREFECT_API_URL"]


def url_of_profile() -> str | None:
    """The API URL that Prefect's active profile names. Read from its file: once Prefect is
    imported, its folder is settled."""
    folder = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or folder / "profiles.toml").expanduser()
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or str(said.get("active"))
    for key in ("profiles", active, "PREFECT_API_URL"):
        said = said.get(key) if isinstance(said, dict) else None
    return said if isinstance(said, str) else None


def _reach(url: str) -> None:
    """Raises: ResourceError if nobody is there. What it answers, and when, is the client's matter:
    it knows keys and waits."""
    try:
        httpx.get(f"{url}/health", timeout=10, verify=certificates())
    except (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return
        raise ResourceError(
            "the Prefect server that is configured does not answer",
            where="PREFECT_API_URL"
            if os.environ.get("PREFECT_API_URL")
            else "Prefect's active profile",
            found=f"{re.sub(r'//[^/@]*@', '//', url)}: {error}",
            do="start it (`prefect server start`), or do without that setting: a run then brings a server of its own",
        ) from None
    except httpx.HTTPError:
        return


def _started(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server of ours that answers, and its URL. Of runs that start at once one gets the port, the
    others take another.

    Raises: ResourceError.
    """
    for preferred in (4200, 0):
        url = f"http://127.0.0.1:{free_port(preferred)}"
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        server = _start(folder, url)
        if _wait(server, url):
            return server, url
        _end(server)
        if not answers(f"{url}/api/health"):
            break
    ended = (
        f"ended with exit code {server.returncode}" if server.returncode >= 0 else "did not answer"
    )
    log = folder / "server.log"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    raise ResourceError(
        "the Prefect server did not come up",
        where=url,
        found=f"it {ended}; the end of {log}:\n{last}",
        do="see the log",
    )


def _start(folder: Path, url: str) -> subprocess.Popen[bytes]:
    command = [
        "tools.prefect_server",
        str(os.getpid()),
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        url.rpartition(":")[2],
    ]
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, "PREFECT_UI_API_URL": f"{url}/api"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(server: subprocess.Popen[bytes], url: str) -> bool:
    """Does it answer before it ends, and in time? What answers at its port may be another run's."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if answers(f"{url}/api/health") and listens(server.pid, int(url.rpartition(":")[2])):
            return True
        time.sleep(0.2)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


async def drain() -> None:
    """Send what Prefect has not sent yet; call it before the server ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    await APILogHandler.aflush()
    draining = EventsWorker.drain_all()
    if inspect.isawaitable(draining):
        await draining


def free_port(preferred: int) -> int:
    """The preferred port if it is free, else any that is."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ResourceError("no port is free", where="127.0.0.1")


def answers(url: str) -> bool:
    """Does a GET of this URL succeed now?"""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def listens(pid: int, port: int) -> bool:
    """Does this process, or one that it has started, listen at this port?"""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                if any(
                    known.status == psutil.CONN_LISTEN and known.laddr.port == port
                    for known in one.net_connections("tcp")
                ):
                    return True
    return False
