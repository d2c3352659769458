"""The local S3 server (tools.s3_server)."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from rlpipe.store.objects.files import Files
from tools.s3_server import GRPC_OFFSET, S3Server, free_ports


def test_free_ports_are_distinct():
    assert len(set(free_ports(4))) == 4


def test_no_free_port_is_the_grpc_port_of_another_one(monkeypatch: pytest.MonkeyPatch):
    offered = iter([38813, 48813, 28813, 31000])

    class Socket(nullcontext):
        def __enter__(self) -> Socket:
            return self

        def bind(self, address: tuple[str, int]) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(offered)

    monkeypatch.setattr("tools.s3_server.socket.socket", Socket)
    assert free_ports(2) == [38813, 31000]


@pytest.mark.integration
def test_acknowledged_writes_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        files = Files(f"s3://{server.bucket}/kept")
        files.create("one", b"1")
        server.process.send_signal(signal.SIGKILL)
        server.restart()
        server.wait_ready()
        assert files.read("one") == b"1"
        assert sockets(server)
    assert server.process.poll() is not None
    assert sockets(server) == []


def sockets(server: S3Server) -> list[Path]:
    """Sockets in /tmp of the ports of this server."""
    ports = {str(port + offset) for port in server._ports.values() for offset in (0, GRPC_OFFSET)}
    found = Path("/tmp").glob("seaweedfs-*.sock")
    return [path for path in found if path.stem.rpartition("-")[2] in ports]


@pytest.mark.integration
def test_two_servers_listen_on_loopback_only_without_conflict(tmp_path: Path):
    with S3Server(tmp_path / "one") as one, S3Server(tmp_path / "other") as other:
        for server in (one, other):
            found = [
                known.laddr
                for known in psutil.Process(server.process.pid).net_connections()
                if known.status == "LISTEN"
            ]
            assert {address.ip for address in found} == {"127.0.0.1"}
            ports = server._ports.values()
            assert {address.port for address in found} <= {
                *ports,
                *(port + 10000 for port in ports),
            }
