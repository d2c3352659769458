"""Fixtures of the store's tests: the same store on local disk and on a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from rlpipe.store.objects.files import Files
from tests.servers import seaweed
from tools.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for all tests; the environment points at it while a test uses `s3_root`."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_root(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix in a bucket of a real S3 server."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/{uuid4().hex}"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.integration)])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    """An empty store, once on local disk and once on S3."""
    return Files(
        request.getfixturevalue("s3_root") if request.param == "s3" else tmp_path / "store"
    )


@pytest.fixture
def local_files(tmp_path: Path) -> Files:
    """An empty store on local disk, for tests that do not depend on the kind of store."""
    return Files(tmp_path / "store")
