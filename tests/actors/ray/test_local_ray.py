"""A process that uses Ray keeps its signal handlers, and only its user can access the Ray
(rlpipe.actors.ray.local_ray, access)."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from rlpipe.actors.ray import access as ray_access
from rlpipe.actors.ray import local_ray
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray.local_ray import (
    address,
    begin_connecting,
    begun_start,
    connect,
    disconnect,
)
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from rlpipe.actors.ray.local_ray import begin_connecting, connect, disconnect
from rlpipe.config.model import ResourcesConfig

received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
if len(sys.argv) > 2:
    begin_connecting(ResourcesConfig(), Path(sys.argv[1]), namespace="signals")
connect(ResourcesConfig(), Path(sys.argv[1]), namespace="signals")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
disconnect()
sys.exit(7 if received else 1)
"""

JOINS = """
import sys
from pathlib import Path
import ray
from rlpipe.actors.ray.local_ray import connect
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

try:
    connect(ResourcesConfig(ray_address=sys.argv[1]), Path(sys.argv[2]), namespace="joined")
except ResourceError as error:
    sys.exit(f"refused: {error}")
print("took", ray.get(ray.remote(lambda: "work").remote()))
"""

LISTENS = """
import sys
from pathlib import Path
import psutil, ray
from rlpipe.actors.ray.local_ray import connect
from rlpipe.config.model import ResourcesConfig

connect(ResourcesConfig(), Path(sys.argv[1]), namespace="listens")
ray.get(ray.remote(lambda: None).remote())
for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
    for connection in process.net_connections():
        if connection.status == psutil.CONN_LISTEN:
            print(connection.laddr.ip)
print(*(" ".join(process.cmdline()) for process in psutil.Process().children()), file=sys.stderr)
"""


def joined(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process that joins this one's Ray and executes a task. It tries to connect once."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"RAY_NUM_REDIS_GET_RETRIES": "1", **environment}
    command = [sys.executable, "-c", JOINS, address(), str(home)]
    return subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.integration
def test_a_local_ray_accepts_only_clients_with_its_token(local_ray: str, tmp_path: Path):
    token = Path(os.environ[ray_access.TOKEN_PATH])
    assert (
        stat.S_IMODE(token.stat().st_mode) == 0o600
        and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    )
    home = token.parents[1]
    assert joined(home).stdout == "took work\n"
    for other in (
        joined(tmp_path),
        joined(home, RAY_AUTH_MODE="disabled"),
        joined(home, RAY_AUTH_TOKEN="x" * 64),
    ):
        assert (
            other.returncode == 1
            and "InvalidAuthToken" in other.stderr
            and "refused: resources.ray_address" in other.stderr
        )


@pytest.mark.integration
def test_a_local_ray_listens_on_the_loopback_interface_only_without_unused_processes(
    tmp_path: Path,
):
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = [sys.executable, "-c", LISTENS, str(tmp_path)]
    ended = subprocess.run(
        program, env=own, capture_output=True, text=True, timeout=120, check=True
    )
    started = ended.stderr
    assert "gcs_server" in started and "raylet" in started
    for unused in ("log_monitor.py", "monitor.py", "dashboard/dashboard.py"):
        assert unused not in started, started
    listening = [ipaddress.ip_address(word) for word in ended.stdout.split()]
    assert len(listening) > 3
    for ip in listening:
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, ended.stdout


def test_token_settings_of_the_user_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in (ray_access.MODE, ray_access.TOKEN, ray_access.TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_access, "_before", {})
    loopback = {ray_access.BEYOND_THIS_MACHINE: "0"}
    ours = {
        **loopback,
        ray_access.MODE: "token",
        ray_access.TOKEN_PATH: str(tmp_path / ".ray" / "token"),
    }
    assert ray_access.settings(tmp_path) == ours == ray_access.settings(tmp_path)
    monkeypatch.setenv(ray_access.TOKEN, "secret")
    assert ray_access.settings(tmp_path) == {**loopback, ray_access.MODE: "token"}
    monkeypatch.setenv(ray_access.TOKEN_PATH, "/theirs")
    assert ray_access.settings(tmp_path) == {
        **loopback,
        ray_access.MODE: "token",
        ray_access.TOKEN_PATH: "/theirs",
    }
    monkeypatch.delenv(ray_access.TOKEN_PATH)
    monkeypatch.setenv(ray_access.MODE, "disabled")
    assert ray_access.settings(tmp_path / "other") == {**loopback, ray_access.MODE: "disabled"}
    assert not (tmp_path / "other").exists()


def test_the_first_process_creates_the_token_also_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    token = ray_access._token_file(tmp_path)
    first = token.read_text()
    assert len(first) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600
    assert ray_access._token_file(tmp_path).read_text() == first and list(
        token.parent.iterdir()
    ) == [token]


def test_an_address_without_a_cluster_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        ResourceError, match=r"resources.ray_address: (?s:.*)127.0.0.1:1: .*refused"
    ):
        connect(ResourcesConfig(ray_address="127.0.0.1:1"), tmp_path, namespace="nowhere")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS: (?s:.*)127.0.0.1:1: .*refused"):
        connect(ResourcesConfig(), tmp_path, namespace="nowhere")


def test_the_ray_address_local_starts_a_local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(access: dict[str, Any], **arguments: Any) -> Path:
        calls.append({**access, **arguments})
        return tmp_path / "session"

    monkeypatch.setattr(local_ray, "_init", init)
    monkeypatch.setattr(ray_watch, "watch_own", lambda: None)
    monkeypatch.setattr(local_ray, "_started_here", threading.Event())
    monkeypatch.setenv("RAY_ADDRESS", "local")
    connect(ResourcesConfig(), tmp_path, namespace="here")
    assert calls[0]["address"] == "local" and calls[0][ray_access.BEYOND_THIS_MACHINE] == "0"


def test_a_ray_on_a_machine_without_a_network_is_joined_with_the_token_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_ray, "get_node_ip_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = local_ray._access_settings(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path)
    assert variables == ray_access.settings(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("words", [[], ["begin"]])
def test_the_sigterm_handler_stays_after_ray_has_started(words: list[str], tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "SIGTERM" in done.stderr) == (7, False), done.stderr


class SlowRay:
    """Replaces `_connect` and `_disconnect`; a start waits for `go`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.go = threading.Event()
        self.error: ResourceError | None = None

    def connect(self, *_: Any) -> None:
        assert self.go.wait(10)
        self.log.append("connected" if self.error is None else "failed")
        if self.error is not None:
            raise self.error

    def disconnect(self) -> None:
        self.log.append("left")


@pytest.fixture
def slow_ray(monkeypatch: pytest.MonkeyPatch) -> SlowRay:
    made = SlowRay()
    monkeypatch.setattr(local_ray, "_connect", made.connect)
    monkeypatch.setattr(local_ray, "_disconnect", made.disconnect)
    monkeypatch.setattr(local_ray.atexit, "register", lambda _: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


@pytest.mark.parametrize("then", ["connect", "disconnect"])
def test_a_process_waits_for_the_ray_that_it_has_begun_to_start(
    then: str, slow_ray: SlowRay, tmp_path: Path
):
    for _ in range(2):
        begin_connecting(ResourcesConfig(), tmp_path, namespace="here")
    assert slow_ray.log == [], "the start is not over"
    threading.Timer(0.2, slow_ray.go.set).start()
    if then == "disconnect":
        disconnect()
        assert slow_ray.log == ["connected", "left"]
    else:
        connect(ResourcesConfig(), tmp_path, namespace="here")
        assert slow_ray.log == ["connected", "connected"]


def test_connect_waits_for_what_follows_the_start_of_ray(slow_ray: SlowRay, tmp_path: Path):
    threads: list[threading.Thread] = []

    def fail() -> None:
        threads.append(threading.current_thread())
        time.sleep(0.2)
        slow_ray.log.append("actors began")
        raise OSError("no room")

    slow_ray.go.set()
    begin_connecting(ResourcesConfig(), tmp_path, namespace="here", then=fail)
    connect(ResourcesConfig(), tmp_path, namespace="here")
    assert slow_ray.log == ["connected", "actors began", "connected"]
    threads[0].join(0.1)
    assert threads[0].is_alive(), "Ray's servers end with this thread"


async def test_leaving_a_ray_does_not_wait_for_what_follows_its_start(
    slow_ray: SlowRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C while the thread reads a store that does not answer."""
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "1")
    answered = threading.Event()
    reading = threading.Event()

    def read() -> None:
        reading.set()
        answered.wait(10)

    slow_ray.go.set()
    begin_connecting(ResourcesConfig(), tmp_path, namespace="here", then=read)
    assert reading.wait(10)
    waiting = asyncio.create_task(begun_start())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    disconnect()
    assert slow_ray.log == ["connected", "left"] and not answered.is_set()
    assert os.environ["RAY_ENABLE_AUTO_CONNECT"] == "0", "a later call must not start another Ray"
    answered.set()
    await begun_start()


def test_the_error_of_a_begun_start_is_that_of_the_next_connect(slow_ray: SlowRay, tmp_path: Path):
    slow_ray.error = ResourceError("Ray did not start", where="here")
    slow_ray.go.set()
    begin_connecting(ResourcesConfig(), tmp_path, namespace="here")
    with pytest.raises(ResourceError, match="Ray did not start"):
        connect(ResourcesConfig(), tmp_path, namespace="here")
    assert slow_ray.log == ["failed", "failed"]


def test_a_run_that_joins_a_cluster_begins_no_ray(
    slow_ray: SlowRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow_ray.go.set()
    joins = ResourcesConfig(ray_address="127.0.0.1:6379")
    begin_connecting(joins, tmp_path, namespace="here")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    begin_connecting(ResourcesConfig(), tmp_path, namespace="here")
    disconnect()
    assert slow_ray.log == ["left"]


def test_a_local_ray_that_does_not_start_in_time_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def time_out(**_: Any) -> None:
        # The class that Ray raises.
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", time_out)
    # The process may be connected to the Ray of other tests, which needs its variables.
    monkeypatch.setattr(ray_access, "apply", lambda _variables: None)
    monkeypatch.setattr(ray_access, "restore", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ResourceError, match="timed out during startup") as caught:
        connect(ResourcesConfig(), tmp_path, namespace="here")
    assert "try again" in str(caught.value.do)
