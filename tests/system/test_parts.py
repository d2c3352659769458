"""Seconds of the parts of a piece of work (rlpipe.system.parts)."""

from __future__ import annotations

import pytest

from rlpipe.system.parts import Parts


def test_parts_add_up_and_keep_the_time_of_a_failure(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr("rlpipe.system.parts.time.perf_counter", lambda: next(clock))
    parts = Parts()
    for _ in range(2):
        with parts.part("load"):
            pass
    with pytest.raises(ZeroDivisionError), parts.part("check"):
        _ = 1 / 0
    parts.inside("load", {"read": 4.0})
    assert parts.seconds == {"load": 5.0, "check": 1.0, "load/read": 4.0}
