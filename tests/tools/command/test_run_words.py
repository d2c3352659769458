"""Flags that need the store or the prompts to become keys (tools.command.run_words)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.config.load import load_run
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.slime.command_line import read_flags
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tools.command import parsers
from tools.command.run_words import apply_flags, read_words

FLAGS = (
    "--hf-checkpoint /m --prompt-data a.jsonl --rm-type math --num-rollout 3 "
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --colocate"
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Branches:
    """Branches of an empty home."""
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    return Branches(Files(tmp_path / "store"))


def configured(words: str) -> RunConfig:
    arguments, rest = read_words(parsers.train(), f"{FLAGS} {words}".split())
    apply_flags(arguments, read_flags(rest))
    return load_run(arguments.recipe, arguments.overrides, arguments.run)


def test_rollouts_of_a_path_are_those_of_the_newest_run_that_saved_to_it(runs: Branches):
    for name, path in (("first", "/x/{rollout_id}.pt"), ("second", "/x/{rollout_id}.pt")):
        runs.create(name, {"flags": {"save_debug_rollout_data": path}}, init="init")
    runs.create("other", {"flags": {"save_debug_rollout_data": "/y/{rollout_id}.pt"}}, init="init")
    config = configured("--debug-train-only --load-debug-rollout-data /x/{rollout_id}.pt")
    assert config.debug.load_debug_rollout_data == "second"
    # No engines start, and slime trains on stored rollouts of any age.
    assert not config.resources.colocate and config.async_buffer_size == 2


def test_without_such_a_run_the_path_is_a_name_that_the_checks_do_not_find(runs: Branches):
    config = configured("--load-debug-rollout-data /x/rollout_{rollout_id}.pt")
    assert config.debug.load_debug_rollout_data == "rollout_-rollout_id"
    assert configured("--load-debug-rollout-data mine").debug.load_debug_rollout_data == "mine"


def test_iterations_that_slime_has_done_are_left_out_of_the_run_but_not_of_its_schedule(
    runs: Branches, tmp_path: Path
):
    folder = tmp_path / "slime" / "iter_0000001"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    load = f"--load {folder}"
    config = configured(f"{load} --global-batch-size 2")
    assert (config.num_rollout, config.train.optimizer.lr_decay_steps) == (1, 6)
    constant = configured(f"{load} --lr-decay-style constant")
    assert (constant.num_rollout, constant.train.optimizer.lr_decay_steps) == (1, None)
    assert configured(f"{load} --finetune").num_rollout == 3
    assert config.start_rollout_id == 2
    started = configured("--start-rollout-id 2")
    assert (started.num_rollout, started.start_rollout_id) == (1, 2)
    ppo = f"{load} --global-batch-size 2 --advantage-estimator ppo --num-critic-only-steps"
    for steps, left in ((1, 0), (3, 1)):
        config = configured(f"{ppo} {steps}")
        assert config.critic.num_critic_only_steps == left
        assert config.train.optimizer.lr_decay_steps == 6
    both = f"--load {folder.parent} --save {folder.parent}"
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("1")
    before = configured(both)
    (folder.parent / "rlpipe" / "branches" / "run").mkdir(parents=True)
    assert configured(both) == before  # the same command continues the run
    with pytest.raises(ConfigError) as caught:
        configured(f"{load} --start-rollout-id 3")
    assert caught.value.where == "--num-rollout"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "m"),
        ("--hf-checkpoint Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("--save /root/Qwen3-4B_slime/", "Qwen3-4B_slime"),
        ("--save /root/Qwen3-4B_slime --wandb-group mine", "mine"),
        ("--save /root/Qwen3-4B_slime --run other", "other"),
    ],
)
def test_a_run_of_flags_has_the_name_of_its_group_its_folder_or_its_model(
    runs: Branches, words: str, name: str
):
    assert configured(words).run == name
