"""Use the configured Prefect server, or the one of the home's runs; start it if it does not run.

A configured server comes from PREFECT_API_URL or from Prefect's active profile (`prefect config set
PREFECT_API_URL=...`). Our server has its own session, so Ctrl-C reaches the flow only: the server
must still record the flow's end. It stays for some minutes after the last run (`kept_server`).
Caches go below the run's home.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path

import httpx
import psutil

from flows.environment import CLIENT_SETTINGS, keep_caches_in
from rlpipe.errors import ResourceError
from rlpipe.observe.terminal import waiting_for
from rlpipe.system.certificates import certificates
from tools.kept_server import KeptServer, idle_s

START_TIMEOUT_S = 180.0
SETTINGS = {
    **CLIENT_SETTINGS,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # The terminal shows the run's progress lines; the UI shows the logs.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    # A batch of logs is a request. Prefect's pages show a line after 5 s at most instead of 2 s.
    "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "5",
    # SQLite has one writer at a time. With many small writes the client waits 2 s a collision.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "5",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D",
}

OWN_SERVER = {
    # They act on deployments and work pools, which the server of a home's runs has none of.
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    # An iteration has about 25 events, with 70 rows of the resources that they name. Nothing reads
    # them here: this server has no automations. States come from events, and are recorded.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false",
    # Gates watch their own time limit. This service ends pauses of flow runs that have died.
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "30",
}
"""Further settings of the server that a run starts. `make up` starts its server without them."""


@contextmanager
def local_prefect(home: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Yield the API URL of the configured server, or of the server of this home's runs.

    `meanwhile` is called while a server starts, and not if one runs. Import prefect inside the
    block, not before. Raises: ResourceError if no server answers; ConfigError for a wrong
    RLPIPE_PREFECT_IDLE_S.
    """
    keep_caches_in(home)
    for name, value in SETTINGS.items():
        # The user's own settings win.
        os.environ.setdefault(name, value)
    if configured := os.environ.get("PREFECT_API_URL") or url_of_profile():
        check_reachable(configured)
        yield configured
        return
    folder = home / ".prefect"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PREFECT_HOME"] = str(folder)
    kept = KeptServer.of_home(home) if idle_s() else None
    own: subprocess.Popen[bytes] | None = None
    try:
        with waiting_for("Prefect server"), kept.starting() if kept else nullcontext():
            url = kept and _find_or_start(kept, folder, meanwhile)
            if url is None:
                own, url = start_server(folder, [str(os.getpid())], meanwhile)
        print(f"Prefect UI of this run: {url}", file=sys.stderr)
        yield f"{url}/api"
    finally:
        if kept is not None:
            kept.leave()
        if own is not None:
            _end(own)
        os.environ.pop("PREFECT_API_URL", None)


def url_of_profile() -> str | None:
    """Return the API URL of Prefect's active profile, read from the profile file.

    Importing Prefect for it would fix Prefect's folder.
    """
    folder = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or folder / "profiles.toml").expanduser()
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or str(value.get("active"))
    for key in ("profiles", active, "PREFECT_API_URL"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def check_reachable(url: str) -> None:
    """Check that a server listens. Raises: ResourceError.

    HTTP errors are left to Prefect's client: it has the keys and waits.
    """
    try:
        httpx.get(f"{url}/health", timeout=10, verify=certificates())
    except (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        # The server answers. Prefect's client has its own settings for certificates.
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return
        raise ResourceError(
            "the configured Prefect server does not answer",
            where="PREFECT_API_URL"
            if os.environ.get("PREFECT_API_URL")
            else "Prefect's active profile",
            found=f"{re.sub(r'//[^/@]*@', '//', url)}: {error}",
            do="start it (`rlpipe up`, or `prefect server start`), or `unset PREFECT_API_URL`: "
            "a run then starts its own server",
        ) from None
    except httpx.HTTPError:
        return


def _find_or_start(kept: KeptServer, folder: Path, meanwhile: Callable[[], None]) -> str | None:
    """Return the URL of the home's server; start it if it does not run, or has other settings.

    None: runs use it with other settings, so this run needs its own. Raises: ResourceError.
    """
    settings = _settings_digest()
    kept.use()
    url = kept.find(settings)
    if url is not None and answers(f"{url}/api/health"):
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        return url
    kept.leave()
    if not kept.end():
        return None
    kept.use()
    life = ["--unused", str(kept.path), str(idle_s())]
    server, url = start_server(folder, life, meanwhile)
    kept.keep(server.pid, url, settings)
    return url


def _settings_digest() -> str:
    """Return a digest of all settings of a server that this process would start."""
    environment = {**OWN_SERVER, **os.environ}
    client = ("PREFECT_API_URL", "PREFECT_UI_API_URL")
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith("PREFECT_") and name not in client
    }
    program = [sys.executable, metadata.version("prefect"), __file__]
    text = json.dumps([variables, program, idle_s()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def start_server(
    folder: Path, life: list[str], meanwhile: Callable[[], None]
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server and return it with its URL. Of runs that start at once, one gets port 4200.

    `life`: words of `tools.prefect_server` that say when the server ends. Raises: ResourceError.
    """
    for preferred in (4200, 0):
        port = free_port(preferred)
        url = f"http://127.0.0.1:{port}"
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        server = _start(folder, url, life)
        meanwhile()
        if _wait(server, url):
            return server, url
        _end(server)
        # Another server that took the port may not answer yet. If none took it, another port
        # would not help.
        if free_port(port) == port:
            break
    outcome = (
        f"ended with exit code {server.returncode}" if server.returncode >= 0 else "did not answer"
    )
    log = folder / "server.log"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    raise ResourceError(
        "the Prefect server did not start",
        where=url,
        found=f"it {outcome}; the end of {log}:\n{last}",
        do="read the log",
    )


def _start(folder: Path, url: str, life: list[str]) -> subprocess.Popen[bytes]:
    command = [
        "tools.prefect_server",
        *life,
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        url.rpartition(":")[2],
    ]
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            # -P: a package `tools` of the current folder must not hide ours.
            [sys.executable, "-P", "-m", *command],
            env={**OWN_SERVER, **os.environ, "PREFECT_UI_API_URL": f"{url}/api"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C must not reach the server before the flow has ended.
            start_new_session=True,
        )


def _wait(server: subprocess.Popen[bytes], url: str) -> bool:
    """True once the server answers; False if it ends or on a timeout.

    Another run's server may answer at the same port, so the listening process is checked.
    """
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
    """Send Prefect's pending logs and events. Call it before the server ends."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    await APILogHandler.aflush()
    draining = EventsWorker.drain_all()
    if inspect.isawaitable(draining):
        await draining


def free_port(preferred: int) -> int:
    """Return the preferred port if it is free, else any free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            # Without it a port in TIME_WAIT looks occupied.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ResourceError("no free port", where="127.0.0.1")


def answers(url: str) -> bool:
    """True if a GET of this URL succeeds now."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def listens(pid: int, port: int) -> bool:
    """True if this process, or one of its children, listens at this port."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for candidate in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                if any(
                    connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                    for connection in candidate.net_connections("tcp")
                ):
                    return True
    return False
