"""A fork under its parent's configuration, before actors start (flows.derived_runs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.derived_runs import fork_run
from rlpipe.config.load import load_run
from rlpipe.config.model import BranchModel
from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.reprocessed import History, configuration


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run of three iterations out of five."""
    History(Files(tmp_path / "store"), configuration(tmp_path, num_rollout=5)).iterate(3)
    return tmp_path


def test_a_fork_has_its_parent_s_configuration_with_overrides(home: Path):
    config, recipe = fork_run(home, "run@1", "hotter", ["rollout.rollout_temperature=1.2"])
    assert (config.run, config.fork_from) == ("hotter", BranchModel(branch="run", iteration=1))
    assert config.rollout.rollout_temperature == 1.2
    assert config.reward == configuration(home, num_rollout=5).reward
    assert load_run(recipe, (), "hotter") == config


def test_the_default_is_the_newest_commit_and_stays_once_the_fork_has_begun(home: Path):
    config, _ = fork_run(home, "run", "next")
    assert config.fork_from == BranchModel(branch="run", iteration=2)
    assert fork_run(home, "run")[0].run == "run-from-2"
    files = Files(home / "store")
    Branches(files).create(
        "next", config.model_dump(mode="json"), Branches(files).get("run").init, "run/00000001"
    )
    assert fork_run(home, "run", "next")[0].fork_from == BranchModel(branch="run", iteration=1)


@pytest.mark.parametrize(
    ("of", "overrides", "said"),
    [
        ("run@3", [], "K from 0 to 2"),
        ("run@x", [], "RUN or RUN@K"),
        ("nobody", [], "the run does not exist"),
        ("run@1", ["num_rollout=2"], "(?s)the fork has no iteration to train.*more than 2"),
    ],
)
def test_wrong_input_is_refused(home: Path, of: str, overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        fork_run(home, of, "new", overrides)
