"""Fixtures of the tests of the chain and of signatures: a stored run and the audit's command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.store.objects.files import Files
from tests.store.audit.chained import Undrawn
from tests.store.audit.forging import LAST
from tools import audit


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations with a checkpoint and an evaluation after each."""
    root = tmp_path_factory.mktemp("chained") / "store"
    Undrawn(Files(root)).start().go(LAST + 1)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy of that store."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


@pytest.fixture
def tool(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.audit", *words, "--store", str(root)])
        return audit.main()

    return call
