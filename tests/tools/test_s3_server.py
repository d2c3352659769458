"""The S3 server on this machine (tools.s3_server)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlpipe.store.files import Files
from tools.s3_server import S3Server, free_ports


def test_free_ports_are_different_ones():
    assert len(set(free_ports(4))) == 4


@pytest.mark.integration
def test_after_a_kill_it_comes_back_with_what_it_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
