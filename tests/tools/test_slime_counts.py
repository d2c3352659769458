"""Counts of the launches of a checkout of slime (tools.slime_counts)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.slime_counts import __main__ as counts
from tools.slime_counts.launches import launchers, scripts
from tools.slime_counts.start import STARTED, TRAINER_ONLY, Start

WORDS = (
    "--hf-checkpoint /models/m --prompt-data /data/train.jsonl --rm-type math "
    "--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 2"
)
LIBRARY = """
from slime.utils.misc import exec_command

def execute_train(train_args, num_gpus_per_node, megatron_model_type, before_ray_job_submit=None):
    exec_command("pkill -9 ray")
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    exec_command(f"python3 train.py {train_args}")
"""
LAUNCHER = f"""
import os
import tempfile

import slime.utils.external_utils.command_utils as U

def execute():
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write("a: 1")
    for save in ("first", "second"):
        arguments = f"{WORDS} --save {{save}} --custom-config-path {{file.name}} "
        U.execute_train(arguments, 8, None, before_ray_job_submit=exit)
    os.unlink(file.name)
    assert os.path.exists("result of the training")

if __name__ == "__main__":
    raise SystemExit("the machine has no GPU")
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of slime with one launch script and one launcher."""
    for name, text in {
        "scripts/run.sh": f"python3 train.py {WORDS} --lr 1e-6\n",
        "scripts/other.sh": "echo no training\n",
        "tests/test_short.py": LAUNCHER,
        "slime/__init__.py": "",
        "slime/utils/__init__.py": "",
        "slime/utils/external_utils/__init__.py": "",
        "slime/utils/external_utils/command_utils.py": LIBRARY,
    }.items():
        (tmp_path / "slime" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "slime" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "slime"


def test_a_script_gives_the_words_of_its_launch(checkout: Path):
    (launch,) = scripts(checkout, checkout.parent)
    assert launch.name == "scripts/run.sh"
    assert launch.words == (*WORDS.split(), "--lr", "1e-6")


def test_a_script_that_starts_nothing_has_a_problem(checkout: Path):
    (checkout / "scripts" / "run.sh").write_text("exit 1\npython3 train.py\n")
    (launch,) = scripts(checkout, checkout.parent)
    assert launch.words == () and "does not start training" in launch.problem


def test_a_launcher_gives_all_its_launches_and_keeps_its_files(checkout: Path, tmp_path: Path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    first, second = launchers(checkout, scratch)
    assert (first.name, second.name) == ("tests/test_short.py#1", "tests/test_short.py#2")
    assert first.words[:-2] == (*WORDS.split(), "--save", "first")
    assert second.words[:-2] == (*WORDS.split(), "--save", "second")
    assert Path(first.words[-1]).parent == scratch and Path(first.words[-1]).is_file()


def test_the_counts_name_the_reason_of_a_refusal(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (checkout / "scripts" / "wrong.sh").write_text(f"python3 train.py {WORDS} --no-such-flag\n")
    monkeypatch.setattr(sys, "argv", ["counts", str(checkout)])
    assert counts.main() == 1
    printed = capsys.readouterr().out
    assert "scripts/run.sh: accepted" in printed
    assert "scripts/wrong.sh: refused: --no-such-flag: unknown flag" in printed
    assert "1 of 2 scripts accepted" in printed and "2 of 2 launchers accepted" in printed


def test_the_table_counts_the_results_of_starts(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    outcomes = iter([Start(STARTED), Start(TRAINER_ONLY, "no engine")])
    monkeypatch.setattr(counts, "start", lambda *_: next(outcomes))
    monkeypatch.setattr(sys, "argv", ["", str(checkout), "launchers", "--start", "starts"])
    assert counts.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("#1: started")
    assert lines[1].endswith("#2: started except the engine: no engine")
    assert lines[2:] == [
        "2 of 2 launchers accepted",
        "1 of 2 launchers started",
        "1 of 2 launchers started except the engine",
        "0 of 2 launchers not started",
        "0 of 2 launchers refused",
    ]


def test_only_launches_with_one_of_the_texts_are_counted(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["", str(checkout), "launchers", "--only", "x", "short.py#2"])
    assert counts.main() == 0
    assert "1 of 1 launchers accepted" in capsys.readouterr().out
