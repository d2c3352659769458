"""Configuration of a reprocessed branch and of the run trained from it (flows.derived_runs)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flows.derived_runs import Reprocessing, reprocessing, training_recipe
from flows.reprocess import begin_branch, check_same_branch
from rlpipe.config.load import load_run
from rlpipe.config.model import BranchModel
from rlpipe.errors import ConfigError, ObjectConflict
from rlpipe.lineage.rollouts import find
from rlpipe.lineage.rollouts import iterations as run_iterations
from rlpipe.lineage.stage_inputs import reward_inputs
from rlpipe.reprocess.report import changed_settings
from rlpipe.store.branches import Branches
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import RunFile, write_run
from rlpipe.types import Stage
from tests.reprocessed import History, configuration

RLOO = "advantage.advantage_estimator=rloo"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a run of four iterations."""
    History(Files(tmp_path / "store"), configuration(tmp_path)).iterate(4)
    return tmp_path


def begun(home: Path, asked: Reprocessing) -> None:
    """Begin the branch as the flow does, with the old nodes."""
    files = asked.source.files
    check_same_branch(asked)
    begin_branch(asked)
    for k in asked.iterations:
        stored = find(files, asked.source.run, k)
        assert stored is not None
        write_note(files, asked.config.run, k, {Stage.ROLLOUT: stored.rollout.digest})


def test_a_whole_run_is_reprocessed_under_its_configuration_with_overrides(home: Path):
    asked = reprocessing(home, of="run", overrides=[RLOO])
    assert (asked.iterations, asked.parent) == ([0, 1, 2, 3], None)
    config = asked.config
    assert (config.run, config.num_rollout, config.fork_from) == ("run.reprocessed", 4, None)
    assert config.debug.load_debug_rollout_data == "run"
    assert config.advantage.advantage_estimator == "rloo"
    stored = find(asked.source.files, "run", 2)
    assert stored is not None
    assert stored.reward is not None
    assert reward_inputs(config, stored.rollout.digest).digest == stored.reward.digest, (
        "what is not different is known"
    )


def test_a_range_is_a_fork_of_the_commit_before(home: Path):
    asked = reprocessing(home, of="run", iterations="2:", run="late")
    assert (asked.iterations, asked.parent) == ([2, 3], "run/00000001")
    assert asked.config.fork_from == BranchModel(branch="run", iteration=1)
    recipe = training_recipe(home, asked, "trained", ["train.optimizer.lr=3e-4"])
    config = load_run(recipe, (), "trained")
    assert config.debug.load_debug_rollout_data == "late"
    assert config.fork_from == BranchModel(branch="run", iteration=1)
    assert (config.num_rollout, config.train.optimizer.lr, config.needs_engines) == (4, 3e-4, False)


@pytest.mark.parametrize("iterations", ["2:60", "0:5"])
def test_a_range_that_is_stored_in_part_only_is_refused(home: Path, iterations: str):
    with pytest.raises(ConfigError, match=r"of which only . to 3 are stored") as caught:
        reprocessing(home, of="run", iterations=iterations, run="late")
    assert str(caught.value.expected) == "a range within 0:4, without gaps"
    assert str(caught.value.do).startswith(f"give {iterations[0]}: ")


def test_a_reprocessed_branch_can_be_reprocessed_along_the_trained_run(home: Path):
    begun(home, reprocessing(home, of="run", iterations="1:3", run="once", overrides=[RLOO]))
    asked = reprocessing(
        home, of="once", run="twice", overrides=["advantage.advantage_estimator=grpo"]
    )
    assert (asked.iterations, asked.parent) == ([1, 2], "run/00000000")
    assert asked.config.debug.load_debug_rollout_data == "once"
    begun(home, asked)
    assert Branches(asked.source.files).sampled_by("twice") == "run"


def test_the_same_command_continues_after_its_source_has_grown(home: Path):
    files = Files(home / "store")
    cosine = {"optimizer": {"lr_decay_style": "cosine"}, "global_batch_size": 16}
    live = History(files, configuration(home, "live", train=cosine)).iterate(2)
    begun(home, reprocessing(home, of="live", overrides=[RLOO]))
    live.iterate(2)
    asked = reprocessing(home, of="live", overrides=[RLOO])
    begun(home, asked)
    assert asked.config.num_rollout == 4
    assert run_iterations(files, "live.reprocessed") == [0, 1, 2, 3]


def test_the_same_command_continues_after_its_source_changed_settings_that_decide_nothing(
    home: Path,
):
    command = {"of": "run", "iterations": "1:3", "overrides": [RLOO]}
    begun(home, reprocessing(home, **command))
    saving = configuration(home, checkpoint={"save_interval": 7}).model_dump(mode="json")
    write_run(home, "run", RunFile(store=str(home / "store"), config=saving))
    asked = reprocessing(home, **command)
    assert asked.config.checkpoint.save_interval == 7
    begun(home, asked)


def test_a_branch_refuses_other_settings_and_another_commit(home: Path):
    begun(home, reprocessing(home, of="run", iterations="1:3", overrides=[RLOO]))
    with pytest.raises(
        ConfigError, match=r"advantage\.advantage_estimator: was 'rloo', now 'grpo'"
    ):
        begun(
            home,
            reprocessing(
                home, of="run", iterations="1:3", overrides=["advantage.advantage_estimator=grpo"]
            ),
        )
    with pytest.raises(ConfigError, match=r"fork_from\.iteration: was 0, now 1"):
        begun(home, reprocessing(home, of="run", iterations="2:3", overrides=[RLOO]))
    asked = reprocessing(home, of="run", iterations="1:3", overrides=[RLOO])
    with pytest.raises(ObjectConflict, match="init"):
        begin_branch(replace(asked, init="0" * 64))


def test_first_weights_come_from_the_run_s_warm_start(home: Path):
    warm = configuration(home, "warmed", warm_start="spell_backward_sft")
    History(Files(home / "store"), warm).iterate()
    config = reprocessing(home, of="warmed").config
    assert config.start_from == BranchModel(branch="warmed.warm_start")
    assert config.warm_start is None
    # The weights are the same as before, so the page does not list the key.
    settings = [of.model_dump(mode="json") for of in (warm, config)]
    assert changed_settings(*settings) == {}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"of": "absent"}, "the run does not exist"),
        ({"of": "run", "run": "run"}, "another branch"),
        ({"of": "run", "iterations": "7:"}, "within 0:4"),
        ({"of": "run", "iterations": "a:b"}, "A:B, A:, :B, : or one number"),
        ({"of": "run", "overrides": ["num_rollout=3"]}, "sets this key itself"),
        ({"of": "run", "overrides": ["stop_when=null"]}, "sets this key itself"),
        ({"of": "run", "overrides": ["debug.debug_rollout_only=true"]}, "sets this key itself"),
        ({"of": "run", "overrides": ["advantage.estimator=rloo"]}, "advantage_estimator"),
    ],
)
def test_wrong_input_is_refused(home: Path, asked: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        reprocessing(home, **asked)


def test_the_run_that_trains_refuses_keys_that_it_sets_itself(home: Path):
    asked = reprocessing(home, of="run", overrides=[RLOO])
    with pytest.raises(ConfigError, match="num_rollout: a reprocessed run sets this key itself"):
        training_recipe(home, asked, "trained", ["num_rollout=3"])


def test_a_run_without_commits_cannot_be_trained_from_its_middle(home: Path):
    files = Files(home / "store")
    config = configuration(home, "sampled", debug={"debug_rollout_only": True})
    Branches(files).create(
        "sampled", config.model_dump(mode="json"), Branches(files).get("run").init
    )
    for k in range(3):
        stored = find(files, "run", k)
        assert stored is not None
        write_note(files, "sampled", k, {Stage.ROLLOUT: stored.rollout.digest})
    asked = reprocessing(home, of="sampled", iterations="1:3", overrides=[RLOO])
    assert asked.parent is None
    with pytest.raises(ConfigError, match="must begin with iteration 0"):
        training_recipe(home, asked, "trained")
    assert training_recipe(
        home, reprocessing(home, of="sampled", overrides=[RLOO]), "trained"
    ).is_file()
