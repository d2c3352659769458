"""A process that uses Ray stays master of its signals, and of who else uses it
(rlpipe.actors.ray.local_ray, ray_access)."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from rlpipe.actors.ray import access as ray_access
from rlpipe.actors.ray import local_ray
from rlpipe.actors.ray.local_ray import address, connect
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from rlpipe.actors.ray.local_ray import connect, disconnect
from rlpipe.config.model import ResourcesConfig

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
connect(ResourcesConfig(), Path(sys.argv[1]), namespace="signals")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
disconnect()
sys.exit(7 if asked else 1)
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
    for one in process.net_connections():
        if one.status == psutil.CONN_LISTEN:
            print(one.laddr.ip)
"""


def joined(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that joins this one's Ray, which is asked for a second only, and has it run
    something."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"RAY_NUM_REDIS_GET_RETRIES": "1", **environment}
    command = [sys.executable, "-c", JOINS, address(), str(home)]
    return subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.integration
def test_a_local_ray_serves_who_has_its_token_on_this_machine_and_nobody_else(
    local_ray: str, tmp_path: Path
):
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
def test_it_listens_on_the_loopback_interface_alone(tmp_path: Path):
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    program = [sys.executable, "-c", LISTENS, str(tmp_path)]
    ended = subprocess.run(
        program, env=own, capture_output=True, text=True, timeout=120, check=True
    )
    listening = [ipaddress.ip_address(word) for word in ended.stdout.split()]
    assert len(listening) > 3
    for ip in listening:
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, ended.stdout


def test_what_the_user_says_of_tokens_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in (ray_access.MODE, ray_access.TOKEN, ray_access.TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_access, "_before", {})
    alone = {ray_access.BEYOND_THIS_MACHINE: "0"}
    ours = {
        **alone,
        ray_access.MODE: "token",
        ray_access.TOKEN_PATH: str(tmp_path / ".ray" / "token"),
    }
    assert ray_access.settings(tmp_path) == ours == ray_access.settings(tmp_path)
    monkeypatch.setenv(ray_access.TOKEN, "secret")
    assert ray_access.settings(tmp_path) == {**alone, ray_access.MODE: "token"}
    monkeypatch.setenv(ray_access.TOKEN_PATH, "/theirs")
    assert ray_access.settings(tmp_path) == {
        **alone,
        ray_access.MODE: "token",
        ray_access.TOKEN_PATH: "/theirs",
    }
    monkeypatch.delenv(ray_access.TOKEN_PATH)
    monkeypatch.setenv(ray_access.MODE, "disabled")
    assert ray_access.settings(tmp_path / "other") == {**alone, ray_access.MODE: "disabled"}
    assert not (tmp_path / "other").exists()


def test_the_token_is_the_first_one_s_also_where_a_file_has_but_one_name(
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


def test_an_address_where_no_cluster_is_is_said_at_once(
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


def test_an_address_of_ray_s_that_means_a_local_one_starts_it_as_none_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        local_ray, "_init", lambda access, **arguments: asked.append({**access, **arguments})
    )
    monkeypatch.setenv("RAY_ADDRESS", "local")
    connect(ResourcesConfig(), tmp_path, namespace="here")
    assert asked[0]["address"] == "local" and asked[0][ray_access.BEYOND_THIS_MACHINE] == "0"


def test_a_ray_of_a_machine_without_a_network_is_joined_with_the_home_s_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_ray, "get_node_ip_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = local_ray._access_settings(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path)
    assert found == ray_access.settings(tmp_path)


@pytest.mark.integration
def test_sigterm_is_heard_by_whom_it_was_before_ray_started(tmp_path: Path):
    assert (
        subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=False).returncode == 7
    )
