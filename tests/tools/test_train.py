"""The train command: accepted and refused input, and errors (tools.train)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments.recipes.tiny_models import character_tokenizer
from rlpipe.config.load import home, load_run
from rlpipe.config.model import BranchModel
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tests.model_files import write_model
from tools import train
from tools.command.verbs import VERBS
from tools.local_servers import LocalServers

RECIPE = """\
num_rollout: 3
model:
  source: {{type: huggingface, hf_checkpoint: {place}/model}}
data:
  prompts: {{type: file, paths: [{place}/train.jsonl], label_key: answer}}
rollout:
  rollout_batch_size: 1
  n_samples_per_prompt: 2
reward:
  function: {{type: math}}
"""
ROW = '{"prompt": "1 + 1 =", "answer": "2"}\n'
Command = Callable[..., int]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a recipe, its prompts and its model."""
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(ROW)
    (tmp_path / "small.yaml").write_text(RECIPE.format(place=tmp_path))
    return tmp_path


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Arguments that were passed to the run; the run itself is replaced."""
    handed_on: list[argparse.Namespace] = []

    def drive(arguments: argparse.Namespace, _config: Any) -> int:
        handed_on.append(arguments)
        return 0

    monkeypatch.setattr(train, "drive", drive)
    return handed_on


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, driven: list[argparse.Namespace]) -> Command:
    """Run `main` with these arguments; return the exit code."""

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.train", *map(str, arguments)])
        return train.main()

    return run


@pytest.fixture
def refused(
    command: Command,
    driven: list[argparse.Namespace],
    capsys: pytest.CaptureFixture[str],
    place: Path,
) -> Callable:
    """Return the error of the recipe with these arguments."""

    def run(arguments: Sequence[str] = (), recipe: str | Path = place / "small.yaml") -> str:
        assert command("--recipe", recipe, *arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert driven == []
        assert "Traceback" not in printed.err
        return printed.err

    return run


def test_a_valid_recipe_is_run_with_the_given_options(command: Command, driven: list, place: Path):
    assert (
        command(
            "--recipe",
            place / "small.yaml",
            "--run",
            "mine",
            "num_rollout=5",
            "train.optimizer.lr=1e-5",
        )
        == 0
    )
    (arguments,) = driven
    assert (arguments.recipe, arguments.run) == (str(place / "small.yaml"), "mine")
    assert arguments.overrides == ["num_rollout=5", "train.optimizer.lr=1e-5"]
    # The times of waits, which the next start shows; nothing of a run.
    assert [path.name for path in home().iterdir()] == [".waits.json"]


@pytest.mark.parametrize("before", [[], ["--run", "mine"], ["--takeover"]])
def test_the_recipe_may_be_the_first_word(
    command: Command, driven: list, place: Path, before: list[str]
):
    assert command(*before, place / "small.yaml", "num_rollout=5") == 0
    (arguments,) = driven
    assert arguments.recipe == str(place / "small.yaml")
    assert arguments.overrides == ["num_rollout=5"]


def test_two_recipes_are_refused(refused: Callable):
    assert refused(["two.yaml"]).startswith("ConfigError: two.yaml: not an override\n")


@pytest.mark.parametrize("more", [[], ["--dump-config"]])
def test_a_key_without_effect_is_printed(
    command: Command, place: Path, capsys: pytest.CaptureFixture[str], more: list[str]
):
    assert command("--recipe", place / "small.yaml", "train.loss.tis_clip=3", *more) == 0
    printed = capsys.readouterr()
    key = "train.loss.tis_clip (override train.loss.tis_clip=3)"
    assert printed.err == f"warning: {key} has no effect: it needs train.loss.use_tis: true\n"
    assert "warning" not in printed.out


@pytest.mark.parametrize("tokens", [4095, 4096])
def test_a_response_limit_beyond_the_context_is_a_warning(
    command: Command,
    driven: list,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    tokens: int,
):
    config = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 4096})
    )
    assert command(f"{place}/small.yaml", f"rollout.rollout_max_response_len={tokens}") == 0
    warned = "do not fit into the model's context of 4096" in capsys.readouterr().err
    assert warned == (tokens == 4096) and driven


def test_a_run_that_leaves_servers_of_up_unused_is_a_warning(
    command: Command,
    driven: list,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    servers = LocalServers(place)
    for name, port in (("prefect", 4201), ("ray", 6380)):
        servers.keep(name, os.getpid(), [port])
    run = (f"{place}/small.yaml", "--home", place)
    assert command(*run) == 0
    assert "servers of" not in capsys.readouterr().err
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4201/api")
    assert command(*run) == 0
    assert "add resources.ray_address=127.0.0.1:6380" in capsys.readouterr().err
    assert command(*run, "resources.ray_address=127.0.0.1:6380") == 0
    assert "servers of" not in capsys.readouterr().err and driven


def test_the_error_of_a_misspelt_key_names_line_and_nearest_key(refused: Callable, place: Path):
    override = "train.optimizer.lrr=1e-5"
    assert refused([override]).startswith(
        f"ConfigError: train.optimizer.lrr (override {override}): unknown key\n"
        "  expected: train.optimizer.lr\n"
        "  do:       rename it"
    )
    recipe = place / "small.yaml"
    recipe.write_text(
        recipe.read_text().replace("num_rollout: 3", "num_rollout: 3\nnum_rolouts: 4")
    )
    assert refused().startswith(
        f"ConfigError: num_rolouts ({recipe}:2): unknown key\n  expected: num_rollout; or rollout\n"
    )


@pytest.mark.parametrize("flag", ["--dry-run", "--validate", "--check_only"])
def test_a_flag_to_check_only_names_the_commands_that_check(refused: Callable, flag: str):
    error = refused([flag])
    assert error.startswith(f"ConfigError: {flag.replace('_', '-')}: unknown flag\n")
    for verb in ("doctor", "config"):
        assert f"`rlpipe {verb} RECIPE`" in error and VERBS[verb]


def test_a_missing_prompt_file_is_named(refused: Callable, place: Path):
    (place / "train.jsonl").unlink()
    printed = refused()
    assert printed.startswith(f"DataError: {place}/train.jsonl: the prompt file cannot be read\n")
    assert "  do:       " in printed


def test_an_empty_prompt_file_is_named(refused: Callable, place: Path):
    (place / "train.jsonl").write_text("\n\n")
    assert refused().startswith(f"DataError: {place}/train.jsonl: the prompt file is empty\n")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "the line is not JSON"),
        ('{"answer": "2"}', "the row has no 'prompt'"),
        ('{"prompt": "1"}', "the row has no 'answer'"),
    ],
)
def test_a_bad_row_is_named_with_its_line(refused: Callable, place: Path, row: str, problem: str):
    (place / "train.jsonl").write_text(ROW * 2 + row + "\n" + ROW)
    assert refused().startswith(f"DataError: {place}/train.jsonl:3: {problem}\n")


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "exit status 0"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_reward_file_that_exits_or_raises_on_import_is_named(
    refused: Callable, place: Path, code: str, printed: str
):
    (place / "reward.py").write_text(f"def reward(sample): return 1.0\n{code}\n")
    error = refused([f"reward.function={{type: python, path: '{place}/reward.py'}}"])
    assert f"reward.function.path: {place}/reward.py" in error
    assert printed in error


def test_a_missing_model_directory_is_named_with_its_key(refused: Callable, place: Path):
    printed = refused([f"model.source.hf_checkpoint={place}/nowhere"])
    assert printed.startswith(
        "ConfigError: model.source.hf_checkpoint: not a Hugging Face model directory\n"
    )
    assert f"no directory {place}/nowhere" in printed


def test_the_error_of_a_missing_recipe_names_the_nearest(refused: Callable, place: Path):
    assert "spell_backward" in refused(recipe="spell_backwards")
    assert refused(recipe=place / "none.yaml").startswith(
        f"ConfigError: {place}/none.yaml: the recipe file does not exist\n"
    )


def test_an_argument_without_a_key_is_refused(refused: Callable):
    assert refused(["num_rollout"]).startswith("ConfigError: num_rollout: not an override\n")


@pytest.mark.parametrize("arguments", [["--recipe"], ["--recipe", "r", "--seed", "x"]])
def test_a_wrong_command_line_gives_exit_code_2(
    command: Command, driven: list, arguments: list[str]
):
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    assert caught.value.code == 2
    assert driven == []


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "ConfigError: rlpipe train: nothing to train"),
        (
            ["--recipe", "spell_backward", "--takeovr"],
            "ConfigError: --takeovr: unknown flag\n  expected: --takeover",
        ),
        (
            ["--recipe", "spell_backward", "--lora-rank", "8"],
            "ConfigError: --lora-rank: rlpipe does not accept this flag",
        ),
    ],
)
def test_the_error_names_wrong_flags(
    command: Command,
    driven: list,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    printed: str,
):
    assert command(*arguments) == 2
    assert capsys.readouterr().err.startswith(printed)
    assert driven == []


def slime_flags(place: Path) -> list[str]:
    """A command line in slime's style, for the files of `place`."""
    return [
        *("--hf-checkpoint", str(place / "model"), "--prompt-data", str(place / "train.jsonl")),
        *("--input-key", "prompt", "--label-key", "answer", "--rollout-batch-size", "2"),
        *("--n-samples-per-prompt", "2", "--rm-type", "math"),
        *(
            "--colocate",
            "--use-fault-tolerance",
            "--sglang-mem-fraction-static",
            "0.8",
            "--attention-dropout",
            "0.0",
        ),
    ]


def test_a_command_line_in_slimes_style_needs_no_recipe(
    command: Command, driven: list, place: Path, capsys: pytest.CaptureFixture[str]
):
    assert (
        command(
            *slime_flags(place),
            "--num-rollout",
            "3",
            "--save",
            "ckpt/mine",
            "train.loss.eps_clip=0.3",
        )
        == 0
    )
    (arguments,) = driven
    config = load_run(arguments.recipe, arguments.overrides, arguments.run)
    assert (config.run, config.num_rollout, config.train.loss.eps_clip) == ("mine", 3, 0.3)
    assert (config.resources.trainer_ranks, config.resources.rollout_num_gpus) == (8, 8)
    assert (config.seed, config.data.rollout_seed, config.data.rollout_shuffle) == (1234, 42, False)
    assert config.engine.sglang == {"mem_fraction_static": 0.8}
    printed = capsys.readouterr().err
    assert "flags without effect (rlpipe flags gives reasons): --use-fault-tolerance\n" in printed
    assert config.resources.colocate


def test_flags_change_a_recipe_and_overrides_win(command: Command, driven: list, place: Path):
    recipe = ["--recipe", place / "small.yaml"]
    assert (
        command(
            *recipe, "--lr", "1e-5", "--clip-grad", "2", "--run", "x", "train.optimizer.lr=2e-5"
        )
        == 0
    )
    config = load_run(driven[0].recipe, driven[0].overrides, driven[0].run)
    assert (config.run, config.train.optimizer.lr, config.train.optimizer.clip_grad) == (
        "x",
        2e-5,
        2.0,
    )


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks before the start, which import Megatron in a process of their own."""
    monkeypatch.setattr(train, "check", lambda *_: None)


def test_epochs_become_iterations(command: Command, driven: list, unchecked: None, place: Path):
    (place / "train.jsonl").write_text(ROW * 5)
    assert command(*slime_flags(place), "--num-epoch", "3") == 0
    assert load_run(driven[0].recipe, driven[0].overrides, driven[0].run).num_rollout == 7


def test_epochs_count_kept_prompts_only(
    command: Command, driven: list, unchecked: None, place: Path
):
    shutil.rmtree(place / "model")
    write_model(place / "model", max_position_embeddings=12)
    character_tokenizer("").save_pretrained(place / "model")
    lengths = [3, 11, 12, 40, 5, 8, 13]  # three of them leave no room in the model's context
    (place / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": "1" * n, "answer": "2"}) + "\n" for n in lengths)
    )

    def iterations(*more: str) -> int:
        assert command(*slime_flags(place), "--num-epoch", "3", *more) == 0
        return load_run(driven[-1].recipe, driven[-1].overrides, driven[-1].run).num_rollout

    assert iterations() == 3 * 4 // 2
    assert iterations("--rollout-max-prompt-len", "5") == 3 * 2 // 2
    assert iterations("--rollout-max-context-len", "9") == 3 * 3 // 2
    assert iterations("data.overlong_prompts=truncate_left") == 3 * 7 // 2


def test_dump_config_prints_the_whole_configuration_and_runs_nothing(
    command: Command, driven: list, place: Path, capsys: pytest.CaptureFixture[str]
):
    (place / "train.jsonl").unlink()
    assert (
        command(
            "--recipe",
            place / "small.yaml",
            "--run",
            "mine",
            "--dump-config",
            "train.optimizer.lr=1e-5",
        )
        == 0
    )
    assert driven == []
    dumped = place / "dumped.yaml"
    dumped.write_text(capsys.readouterr().out)
    assert load_run(dumped) == load_run(place / "small.yaml", ["train.optimizer.lr=1e-5"], "mine")


def test_dump_config_of_a_wrong_configuration_is_refused(refused: Callable):
    assert "num_rollout" in refused(["--dump-config", "num_rollout=-1"])


def test_the_flow_finds_the_home(command: Command, place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    assert command("--recipe", "small.yaml", "--home", "elsewhere") == 0
    assert home() == place / "elsewhere"
    assert os.environ["RLPIPE_HOME"] == str(place / "elsewhere")


@pytest.mark.parametrize(("given", "name"), [([], "small-seed7"), (["--run", "mine"], "mine")])
def test_another_seed_is_a_separate_run_with_a_default_name(
    command: Command, driven: list, place: Path, given: list[str], name: str
):
    assert (
        command(
            "--recipe", place / "small.yaml", "--seed", "7", *given, "rollout.rollout_batch_size=2"
        )
        == 0
    )
    (arguments,) = driven
    config = load_run(arguments.recipe, arguments.overrides, arguments.run)
    assert (config.run, config.seed, config.train.seed, config.data.rollout_seed) == (name, 7, 7, 7)
    assert config.rollout.rollout_batch_size == 2


def test_seed_0_is_a_seed(command: Command, driven: list, place: Path):
    assert command("--recipe", place / "small.yaml", "--seed", "0") == 0
    assert (driven[0].run, driven[0].overrides) == ("small-seed0", ["seed=0"])


@pytest.mark.parametrize(
    ("given", "name", "iteration"),
    [
        (["--fork", "old@4"], "old-from-4", 4),
        (["--fork", "old"], "old-from-newest", None),
        (["--fork", "old@4", "--run", "n"], "n", 4),
    ],
)
def test_a_fork_is_a_separate_run_without_a_warm_start(
    command: Command, driven: list, place: Path, given: list[str], name: str, iteration: int | None
):
    Branches(Files(home() / "store")).create("old", {}, "0" * 64)
    (place / "small.yaml").write_text(
        "warm_start: spell_backward_sft\n" + RECIPE.format(place=place)
    )
    assert command("--recipe", place / "small.yaml", *given, "rollout.rollout_batch_size=2") == 0
    (arguments,) = driven
    config = load_run(arguments.recipe, arguments.overrides, arguments.run)
    assert (config.run, config.fork_from) == (name, BranchModel(branch="old", iteration=iteration))
    assert (config.warm_start, config.start_from) == (None, None)
    assert config.rollout.rollout_batch_size == 2


def test_a_fork_of_an_invalid_iteration_is_refused(refused: Callable):
    assert "fork_from.iteration" in refused(["--fork", "old@last"])
