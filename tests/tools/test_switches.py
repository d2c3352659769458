"""The table of switches (tools.switches)."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tools import switches

GIB = 1024**3


def switch(before: str | None, to: str, seconds: float, used: int) -> dict[str, Any]:
    memory = {"trainer_peak_bytes": 3 * GIB, "trainer_bytes": GIB, "used_bytes": used * GIB}
    return {"from": before, "to": to, "seconds": seconds, **memory}


def test_a_row_for_each_pair_of_phases_has_seconds_and_memory():
    found = [
        switch(None, "train", 4.0, 10),
        switch("sample", "score", 1.0, 20),
        switch("sample", "score", 3.0, 22),
    ]
    found.append(switch("sample", "score", 2.0, 21))
    assert switches.summary(found) == [
        ("–", "train", 1, 4.0, 4.0, 3.0, 1.0, 10.0, 10.0, 10.0),
        ("sample", "score", 3, 2.0, 3.0, 3.0, 1.0, 20.0, 22.0, 21.0),
    ]


def test_an_unknown_run_gives_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
):
    monkeypatch.setattr(sys, "argv", ["tools.switches", "--run", "none", "--home", str(tmp_path)])
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    assert switches.main() == 2
    assert "there is no such run" in capsys.readouterr().err
