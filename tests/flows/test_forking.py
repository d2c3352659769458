"""A fork under its parent's configuration, before anything starts (flows.forking)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.forking import forked
from rlpipe.config.load import load_run
from rlpipe.config.model import BranchModel
from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.reprocessed import History, configuration


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a run of three iterations out of five."""
    History(Files(tmp_path / "store"), configuration(tmp_path, num_rollout=5)).iterate(3)
    return tmp_path


def test_a_fork_has_its_parent_s_configuration_but_for_what_is_said(home: Path):
    config, recipe = forked(home, "run@1", "hotter", ["rollout.rollout_temperature=1.2"])
    assert (config.run, config.fork_from) == ("hotter", BranchModel(branch="run", iteration=1))
    assert config.rollout.rollout_temperature == 1.2
    assert config.reward == configuration(home, num_rollout=5).reward
    assert load_run(recipe, (), "hotter") == config


def test_without_a_number_it_is_the_newest_and_stays_that_once_the_fork_has_begun(home: Path):
    config, _ = forked(home, "run", "next")
    assert config.fork_from == BranchModel(branch="run", iteration=2)
    assert forked(home, "run")[0].run == "run-from-2"
    files = Files(home / "store")
    Branches(files).create(
        "next", config.model_dump(mode="json"), Branches(files).get("run").init, "run/00000001"
    )
    assert forked(home, "run", "next")[0].fork_from == BranchModel(branch="run", iteration=1)


@pytest.mark.parametrize(
    ("of", "overrides", "said"),
    [
        ("run@3", [], "K from 0 to 2"),
        ("run@x", [], "RUN or RUN@K"),
        ("nobody", [], "there is no such run"),
        ("run@1", ["num_rollout=2"], "(?s)nothing would be trained.*more than 2"),
    ],
)
def test_what_cannot_be_forked_is_said(home: Path, of: str, overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        forked(home, of, "new", overrides)
