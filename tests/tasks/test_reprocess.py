"""A reprocessed branch is open in one process, and its store is recorded (tasks.reprocess)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.run import RunConfig
from rlpipe.errors import Fenced
from rlpipe.lineage.rollouts import find
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.notes import noted_iterations
from rlpipe.store.objects.files import Files
from tasks.reprocess import _OPEN, opened
from tests.reprocessed import History, configuration
from tools import audit


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A store other than the home's, with a run of two iterations."""
    files = Files(tmp_path / "elsewhere")
    History(files, configuration(tmp_path)).iterate(2)
    return files


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return configuration(
        tmp_path,
        "new",
        advantage={"advantage_estimator": "rloo"},
        debug={"load_debug_rollout_data": "run"},
    )


def opening(files: Files, config: RunConfig, home: Path) -> Any:
    return opened("run", config, files, home / config.run, Progress(config.run, 2))


async def test_an_open_branch_refuses_other_processes_and_garbage_collection(
    files: Files, config: RunConfig, tmp_path: Path
):
    async with opening(files, config, tmp_path):
        with pytest.raises(Fenced, match="is running in another process"):
            await opening(files, config, tmp_path).__aenter__()
        with (
            pytest.raises(Fenced, match="is running in another process"),
            Epochs(files).exclusive(),
        ):
            pass
    with Epochs(files).exclusive(), pytest.raises(Fenced, match="garbage collection is running"):
        await opening(files, config, tmp_path).__aenter__()
    async with opening(files, config, tmp_path):
        pass


async def test_a_replaced_process_writes_no_note(files: Files, config: RunConfig, tmp_path: Path):
    async with opening(files, config, tmp_path):
        stored = find(files, "run", 0)
        assert stored is not None
        Epochs(files).acquire("new", takeover=True)
        with pytest.raises(Fenced, match="taken over"):
            await _OPEN["new"].reprocessor.iteration(stored)
    assert noted_iterations(files, "new") == []


async def test_tools_find_a_branch_that_was_reprocessed_in_another_store(
    files: Files,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    async with opening(files, config, tmp_path):
        Branches(files).create(
            "new", config.model_dump(mode="json"), Branches(files).get("run").init
        )
        for k in range(2):
            stored = find(files, "run", k)
            assert stored is not None
            await _OPEN["new"].reprocessor.iteration(stored)
    monkeypatch.setattr(
        sys, "argv", ["tools.audit", "verify", "--home", str(tmp_path), "--run", "new"]
    )
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    assert audit.main() == 0
    assert "new: nothing is wrong" in capsys.readouterr().out
