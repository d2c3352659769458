"""The S3 server on this machine (tools.s3_server)."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from rlpipe.store.objects.files import Files
from tools.s3_server import S3Server, free_ports


def test_free_ports_are_different_ones():
    assert len(set(free_ports(4))) == 4


@pytest.mark.integration
def test_after_a_kill_it_comes_back_with_what_it_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        files = Files(f"s3://{server.bucket}/kept")
        files.create("one", b"1")
        server.process.send_signal(signal.SIGKILL)
        server.restart()
        server.wait_ready()
        assert files.read("one") == b"1"
    assert server.process.poll() is not None


@pytest.mark.integration
def test_two_of_them_listen_on_loopback_alone_and_not_in_each_other_s_way(tmp_path: Path):
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
