"""Imports without garbage collections (rlpipe.system.imports)."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from rlpipe.system import imports
from rlpipe.system.imports import quick_imports

LEAVES_NOTHING_FROZEN = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))
from rlpipe.system.imports import quick_imports
with quick_imports():
    import argparse
assert gc.get_freeze_count() > 1000
"""


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The times at which everything was frozen: True if collections were on."""
    times: list[bool] = []
    monkeypatch.setattr(imports, "_frozen", False)
    monkeypatch.setattr(imports.gc, "freeze", lambda: times.append(gc.isenabled()))
    monkeypatch.setattr(imports.atexit, "register", lambda _: None)
    return times


def test_no_garbage_is_collected_until_the_outer_block_ends(frozen: list[bool]):
    with quick_imports():
        assert not gc.isenabled()
        with quick_imports():
            assert not gc.isenabled()
        assert not gc.isenabled() and not frozen
    assert gc.isenabled() and frozen == [False]


def test_only_the_first_block_of_a_process_freezes(frozen: list[bool]):
    for _ in range(2):
        with quick_imports():
            pass
    assert frozen == [False]


def test_a_failed_import_leaves_collections_on():
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()


def test_collections_that_are_off_stay_off(frozen: list[bool]):
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled() and not frozen
    finally:
        gc.enable()


def test_nothing_is_frozen_at_the_end_of_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_NOTHING_FROZEN], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "0\n"
