"""An S3 store with an outage (rlpipe.store.objects.s3): requests wait for its return."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rlpipe.errors import ObjectMissing, StoreError
from rlpipe.store.objects import s3
from rlpipe.store.objects.files import Files
from tools.s3_server import S3Server, s3_environment

pytestmark = pytest.mark.integration


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Point the S3 clients of this test to an address."""

    def point(url: str) -> None:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)

    return point


def test_requests_wait_for_a_store_that_restarts(tmp_path: Path, environment) -> None:
    with S3Server(tmp_path / "s3") as server:
        environment(server.url)
        files = Files(f"s3://{server.bucket}/runs")
        files.create("a", b"before")
        server.process.kill()
        server.process.wait()
        back = threading.Timer(2.0, server.restart)
        back.start()
        assert files.read("a") == b"before"
        server.process.kill()
        server.process.wait()
        threading.Timer(1.0, server.restart).start()
        # An earlier attempt may have written it, so the result may be True or False.
        files.create("b", b"after")
        assert files.read("b") == b"after"
        with pytest.raises(ObjectMissing):
            files.read("c")
        assert files.list() == ["a", "b"]


def test_a_store_that_never_answered_is_an_error_at_once(
    environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment("http://127.0.0.1:9")
    monkeypatch.setattr(s3, "OUTAGE_S", 600.0)
    start_s = time.monotonic()
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL"):
        Files("s3://bucket/runs").read("a")
    assert time.monotonic() - start_s < 300


def test_a_store_that_stays_unreachable_is_an_error(
    tmp_path: Path, environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path / "s3") as server:
        environment(server.url)
        monkeypatch.setattr(s3, "OUTAGE_S", 1.0)
        files = Files(f"s3://{server.bucket}/runs")
        files.create("a", b"")
        server.process.kill()
        server.process.wait()
        with pytest.raises(StoreError, match="S3 request failed"):
            files.read("a")
