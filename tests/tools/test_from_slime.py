"""The from-slime command: recipes of launch scripts and arguments (tools.from_slime)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.config.load import load_run
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of
from tools import from_slime

FLAGS = [
    *("--hf-checkpoint", "/models/m", "--prompt-data", "train.jsonl", "--rm-type", "math"),
    *("--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
    *("--lr", "1e-6", "--sglang-mem-fraction-static", "0.7", "--save", "/out/mine", "--swiglu"),
]
Command = Callable[..., int]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in an empty folder; return the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["rlpipe from-slime", *words])
        return from_slime.main()

    return run


def test_arguments_become_a_recipe_with_the_same_configuration(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command(*FLAGS) == 0
    printed = capsys.readouterr()
    (tmp_path / "copy.yaml").write_text(printed.out)
    assert load_run("copy.yaml") == load_run(BASE, overrides_of(read_flags(FLAGS)), "mine")
    assert "lr: 1.0e-06" in printed.out and "# slime: --lr" in printed.out
    assert "flags without effect" in printed.err and "rlpipe train my_run.yaml" in printed.err


def test_a_script_becomes_the_recipe_of_its_arguments(command: Command, tmp_path: Path):
    words = " ".join(FLAGS).replace("/models", "${MODELS}")
    (tmp_path / "run.sh").write_text(f"ARGS=(\n  {words}\n)\npython3 train.py ${{ARGS[@]}}\n")
    assert command("run.sh", "MODELS=/models", "-o", "new.yaml") == 0
    assert load_run("new.yaml") == load_run(BASE, overrides_of(read_flags(FLAGS)), "mine")
    assert (tmp_path / "new.yaml").read_text().startswith("# Converted from run.sh by")


def test_the_environment_of_the_job_is_a_note(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    variables = '{"PYTHONPATH": "/x", "NCCL_IB_TC": "160", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}'
    (tmp_path / "run.sh").write_text(
        f"ray job submit --runtime-env-json='{{\"env_vars\": {variables}}}' "
        f"-- python3 train.py {' '.join(FLAGS)}\n"
    )
    assert command("run.sh", "-o", "new.yaml") == 0
    notes = capsys.readouterr().err
    assert "rlpipe train: NCCL_IB_TC=160\n" in notes
    assert "INT4 training is not supported" in notes and "PYTHONPATH" not in notes


def test_flags_after_the_script_replace_its_own(command: Command, tmp_path: Path):
    (tmp_path / "run.sh").write_text(f"python3 train.py {' '.join(FLAGS)} --num-epoch 2\n")
    assert command("run.sh", "X=1", "--num-rollout", "7", "--lr", "2e-6", "-o", "new.yaml") == 0
    config = load_run("new.yaml")
    assert (config.num_rollout, config.train.optimizer.lr) == (7, 2e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to train"),
        (("none.sh",), "the launch script does not exist"),
        (("none.sh", "lr"), "not a variable of the script"),
        (("--lr", "x"), "not a value of this flag"),
        ((*FLAGS, "-o", "new.txt"), "not the name of a recipe"),
        ((*FLAGS, "-o", "none/new.yaml"), "--output: cannot write the recipe"),
    ],
)
def test_wrong_input_gives_exit_code_2(
    command: Command, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
):
    assert command(*words) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""
