"""Blocks without collections of garbage (rlpipe.system.garbage)."""

from __future__ import annotations

import gc

import pytest

from rlpipe.system.garbage import collections_paused


def test_collections_go_on_after_the_outermost_block():
    assert gc.isenabled()
    with collections_paused():
        with collections_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_an_error():
    def fail() -> None:
        with collections_paused():
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()
