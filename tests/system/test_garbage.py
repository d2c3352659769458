"""Blocks without collections of garbage (rlpipe.system.garbage)."""

from __future__ import annotations

import gc

import pytest

from rlpipe.system.garbage import collections_paused


def test_collections_go_on_after_the_outermost_block_and_after_an_error():
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collections_paused():
        with collections_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()
