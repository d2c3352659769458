"""A fork under its parent's configuration, before actors start (flows.derived_runs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.derived_runs import fork_run
from rlpipe.config.load import load_run, require_files, validate_stored
from rlpipe.config.model import BranchModel
from rlpipe.data.hub_commits import as_recorded
from rlpipe.errors import ConfigError
from rlpipe.lineage.continuation import check_same_run
from rlpipe.lineage.stage_inputs import reward_inputs
from rlpipe.preflight import check
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.model_files import write_model
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
    ("of", "overrides", "message"),
    [
        ("run@3", [], "K from 0 to 2"),
        ("run@x", [], "RUN or RUN@K"),
        ("absent", [], "the run does not exist"),
        ("run@1", ["num_rollout=2"], "(?s)the fork has no iteration to train.*more than 2"),
    ],
)
def test_wrong_input_is_refused(home: Path, of: str, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        fork_run(home, of, "new", overrides)


RECIPE = """\
run: run
num_rollout: 5
model: {source: {type: huggingface, hf_checkpoint: model}}
data: {prompts: {type: file, paths: [train.jsonl], label_key: answer}}
rollout: {rollout_batch_size: 4, n_samples_per_prompt: 4}
reward: {function: {type: python, path: "mine.py:score"}}
train: {global_batch_size: 16}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with relative paths of files in its folder."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    write_model(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (folder / "mine.py").write_text("def score(sample):\n    return 1.0\n")
    (folder / "mine.yaml").write_text(RECIPE)
    return folder / "mine.yaml"


def test_a_fork_started_in_another_folder_finds_the_files_of_its_parent(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(recipe.parent)
    home = tmp_path / "home"
    parent = load_run("mine.yaml")
    History(Files(home / "store"), parent).iterate(3)
    (tmp_path / "worker").mkdir()
    monkeypatch.chdir(tmp_path / "worker")
    config, stored = fork_run(home, "run@1", "hotter")
    require_files(stored)
    check(config, home)
    assert as_recorded(load_run(stored), home).reward == parent.reward


def test_a_fork_of_a_run_with_recorded_relative_paths_keeps_them(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(recipe.parent)
    home = tmp_path / "home"
    values = load_run("mine.yaml").model_dump(mode="json")
    values["reward"]["function"]["path"] = "mine.py:score"
    parent = validate_stored(values)
    History(Files(home / "store"), parent).iterate(3)
    _, stored = fork_run(home, "run@1", "hotter")
    fork = as_recorded(load_run(stored), home)
    assert reward_inputs(fork, "rollout").digest == reward_inputs(parent, "rollout").digest
    resumed = as_recorded(load_run("mine.yaml"), home)
    assert resumed == parent
    check_same_run(Branches(Files(home / "store")), resumed)


def test_a_run_continues_after_its_files_were_moved(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
):
    branches = Branches(Files(tmp_path / "store"))
    History(Files(tmp_path / "store"), load_run(recipe)).iterate(1)
    moved = recipe.parent.rename(tmp_path / "moved") / "mine.yaml"
    check_same_run(branches, load_run(moved))
    with pytest.raises(ConfigError, match=r"another configuration[\s\S]*reward\.function\.path"):
        check_same_run(branches, load_run(moved, ["reward.function.path=yours.py:score"]))
