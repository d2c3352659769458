"""The reprocess command: refused input, and a whole run under Prefect (tools.reprocess)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from flows.derived_runs import reprocessing
from rlpipe import preflight
from rlpipe.config.run import RunConfig
from rlpipe.lineage.rollouts import find
from rlpipe.reprocess.branch import Reprocessor
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.conftest import REPOSITORY
from tests.reprocessed import History, configuration
from tools import reprocess

OTHER = "def score(sample):\n    return int(sample.response) / 10\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run of four iterations."""
    History(Files(tmp_path / "store"), configuration(tmp_path)).iterate(4)
    (tmp_path / "other.py").write_text(OTHER)
    return tmp_path


def other(home: Path) -> str:
    return f"reward.function={{type: python, path: {home}/other.py}}"


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--of", "absent"], "the run does not exist"),
        (
            ["--of", "run", "reward.function={type: python, path: nowhere.py}"],
            "cannot read the file of the function",
        ),
        (["--of", "run", "reward.function.path=math.sqrt.x"], "math.sqrt.x"),
        (["--of", "run", "rollout.dynamic_sampling_filter_path=os.path.join"], "no Python source"),
        (["--of", "run", "reward.function={type: none}"], "there is nothing to score"),
        (
            ["--of", "run", "--train", "run", "--train-set", "train.optimizer.lrr=1"],
            "train.optimizer.lr",
        ),
    ],
)
def test_wrong_input_is_refused_before_a_server_starts(
    home: Path,
    words: list[str],
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["tools.reprocess", "--home", str(home), *words])
    monkeypatch.setenv("RLPIPE_HOME", str(home))
    assert reprocess.main() == 2
    assert output in capsys.readouterr().err
    assert Branches(Files(home / "store")).names() == ["run"]


def test_a_run_that_trains_from_the_result_is_checked_before_the_result_is_stored(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    def check(config: RunConfig, home: Path, planned: Collection[str]) -> None:
        """Check the run without its prompts, which this home has not."""
        preflight._check_store(config, home, planned)

    monkeypatch.setattr(reprocess, "check", check)
    words = ["--of", "run", "--run", "new", "--train", "trained", other(home)]
    monkeypatch.setattr(sys, "argv", ["tools.reprocess", "--home", str(home), *words])
    monkeypatch.setattr(reprocess, "finish", lambda _: (0, None))
    assert reprocess.main() == 0


@pytest.mark.integration
def test_an_interrupted_reprocessing_continues_and_prints_differences(
    home: Path, prefect_server: str
):
    asked = reprocessing(home, of="run", run="new", overrides=[other(home)])

    async def begun() -> None:
        async with Reprocessor(asked.source.files, asked.config) as reprocessor:
            stored = find(asked.source.files, "run", 0)
            assert stored is not None
            await reprocessor.iteration(stored)

    asyncio.run(begun())
    words = ["--home", str(home), "--of", "run", "--run", "new", other(home)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.reprocess", *words],
        cwd=REPOSITORY,
        env=os.environ | {"PREFECT_API_URL": prefect_server},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert ", 1 reused; see" in done.stdout
    assert "iteration 0  reward" in done.stderr
    assert done.stdout.split()[:2] == ["stored", "new"] and "-0.0000" not in done.stdout
    output = json.loads((home / "new" / "reprocessed.json").read_text())
    assert output["changed"] == {"reward.function.path": f"{home}/right.py:score → {home}/other.py"}
    figures = {row["what"]: row["after"] for row in output["figures"]}
    assert figures["samples with a reward"] == figures["samples with advantages"] == 64
    for name in ("reprocessed.html", "reprocessed.png"):
        assert (home / "new" / name).stat().st_size > 10_000
    branch = Branches(asked.source.files).get("new")
    assert (branch.parent, branch.config["debug"]["load_debug_rollout_data"]) == (None, "run")
