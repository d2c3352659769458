"""What every test shares: a home of its own, and few threads, so that tests do not see each other or the user's runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]

settings.register_profile("rlpipe", deadline=None, max_examples=50)
settings.load_profile("rlpipe")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """The tests of a file stay in one process. Whole runs, with all their servers, come first and all in one: of two at once each
    would have half a machine. (A wrapper, so that pytest-xdist reads the groups afterwards.)"""
    items.sort(key=lambda item: item.get_closest_marker("whole_run") is None)
    for item in items:
        group = "whole runs" if item.get_closest_marker("whole_run") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    return (yield)


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs, models and the default store of a test go to its own temporary folder."""
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path / "home"))
