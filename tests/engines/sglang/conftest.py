"""The live engine that all rooms share."""

from __future__ import annotations

import pytest

from tests.live_engine import Live, live_engine


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    """A real server with a real router before it."""
    return live_engine(request.config)
