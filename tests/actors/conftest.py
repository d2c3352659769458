"""A small Ray of this package's own, started once and ended with its last test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlpipe.actors.local_ray import connect, disconnect
from rlpipe.config.model import ResourcesConfig

NAMESPACE = "rlpipe-tests"


@pytest.fixture(scope="package")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The namespace of a running local Ray."""
    connect(ResourcesConfig(), tmp_path_factory.mktemp("ray"), namespace=NAMESPACE)
    yield NAMESPACE
    disconnect()
