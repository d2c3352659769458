"""The live engine that all tests share."""

from __future__ import annotations

import pytest

from tests.live_engine import Live, live_engine


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    """Return a real server behind a real router."""
    return live_engine(request.config)
