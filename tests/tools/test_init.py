"""The init command: a folder that is a valid run, with a reward and its test (tools.init)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpipe.config.hooks import load_hook
from rlpipe.config.load import load_run, unused_keys
from tools import init


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlpipe init", "sums"])
    assert init.main() == 0
    return tmp_path / "sums"


def test_the_recipe_is_valid_and_has_the_name_of_the_folder(made: Path):
    config = load_run(made / "recipe.yaml")
    assert config.run == "sums"
    assert unused_keys(made / "recipe.yaml") == []
    assert len((made / "recipe.yaml").read_text().splitlines()) < 40


def test_the_data_have_ten_prompts_with_answers_that_the_reward_accepts(made: Path):
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    for row in rows:
        first, second = row["prompt"].rstrip("=").split("+")
        assert row == {"prompt": row["prompt"], "answer": str(int(first) + int(second))}
    score = load_hook(f"{made}/reward.py:score")
    answers = [row["answer"] for row in rows]
    for answer in answers:
        # A response that has only the form of an answer gets nothing.
        rewards = [score(SimpleNamespace(response=one, label=answer)) for one in answers]
        assert rewards == [float(one == answer) for one in answers]


def test_the_test_of_the_reward_passes(made: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(made)]
    done = subprocess.run(command, cwd=made.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def test_the_test_passes_in_a_project_with_other_settings_of_pytest(made: Path):
    """As in a checkout of rlpipe, which imports tests without their folder."""
    (made.parent / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n'
    )
    test_the_test_of_the_reward_passes(made)


def test_the_readme_is_short_and_names_the_run(made: Path):
    text = (made / "README.md").read_text()
    assert len(text.splitlines()) <= 18
    assert (
        "RLPIPE_HOME" in text and "rlpipe train sums/recipe.yaml" in text and "my_run" not in text
    )


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("sums", "the folder is not empty"),
        ("store", "any name but store and models"),
        ("a name", "rlpipe init a_name"),
        ("sums/README.md/x", "cannot make the folder"),
    ],
)
def test_a_used_folder_and_a_wrong_name_are_refused(
    made: Path,
    name: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    before = sorted(made.parent.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["rlpipe init", name])
    assert init.main() == 2
    assert output in capsys.readouterr().err
    assert sorted(made.parent.rglob("*")) == before
