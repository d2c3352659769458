"""The command and the flow that change the number of engines (tools.engines, flows.engines)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import engines as flow
from rlpipe.errors import ConfigError
from rlpipe.store.engine_targets import EngineTargets
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from tests.reprocessed import History, configuration
from tools import engines

Tool = Callable[..., int]


def run_of(home: Path, **sections: Any) -> Files:
    files = Files(home / "store")
    History(files, configuration(home, **sections)).iterate(1)
    return files


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))

    def called(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["rlpipe engines", "--home", str(tmp_path), *words])
        return engines.main()

    return called


def test_a_request_is_recorded_and_shown(
    tmp_path: Path, tool: Tool, capsys: pytest.CaptureFixture[str]
):
    files = run_of(tmp_path, resources={"rollout_num_gpus": 2})
    assert tool("run") == 0
    assert capsys.readouterr().out == "run: 2 engines, as configured\n"
    assert tool("run", "4") == 0
    assert capsys.readouterr().out == "run: 2 → 4 engines; its next start follows\n"
    assert tool("run", "4") == 0
    assert capsys.readouterr().out == "run: 4 engines, as before\n"
    assert tool("run") == 0
    assert "run: 4 engines, requested 2" in capsys.readouterr().out
    target = EngineTargets(files).newest("run")
    assert target is not None and (target.number, target.engines, target.configured) == (0, 4, 2)
    with_driver = Epochs(files).acquire("run")
    assert tool("run", "1") == 0
    assert capsys.readouterr().out == "run: 4 → 1 engine; the run follows within seconds\n"
    with_driver.release()


@pytest.mark.parametrize(
    ("sections", "words", "parts"),
    [
        ({}, ("rum", "2"), ["no run 'rum'", "did you mean run?"]),
        ({}, ("run", "0"), ["0 engines requested, 1 configured", "needs an engine"]),
        ({"resources": {"colocate": True}}, ("run", "2"), ["share GPUs"]),
        ({"resources": {"external_engines": ["127.0.0.1:1"]}}, ("run", "2"), ["belong to others"]),
    ],
)
def test_a_number_that_the_run_cannot_have_is_refused(
    tmp_path: Path,
    tool: Tool,
    capsys: pytest.CaptureFixture[str],
    sections: dict,
    words: tuple[str, ...],
    parts: list[str],
):
    files = run_of(tmp_path, **sections)
    assert tool(*words) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert EngineTargets(files).newest("run") is None


async def test_the_flow_requests_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    files = run_of(tmp_path)
    assert await flow.engines.fn("run", 3, files.root) == {"run": "run", "before": 1, "after": 3}
    with pytest.raises(ConfigError):
        await flow.engines.fn("run", 0, files.root)
    target = EngineTargets(files).newest("run")
    assert target is not None and target.engines == 3
