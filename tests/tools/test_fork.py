"""The fork command: configuration and refused input (tools.fork)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlpipe.store.objects.files import Files
from tests.reprocessed import History, configuration
from tools import fork


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a run of two iterations out of five."""
    History(Files(tmp_path / "store"), configuration(tmp_path, num_rollout=5)).iterate(2)
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    return tmp_path


def called(home: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tools.fork", "--home", str(home), *words])
    return fork.main()


def test_dump_config_prints_the_configuration_of_the_fork(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert (
        called(
            home,
            monkeypatch,
            "run@0",
            "--run",
            "hotter",
            "--dump-config",
            "rollout.rollout_temperature=1.2",
        )
        == 0
    )
    output = capsys.readouterr().out
    assert not (home / "hotter").exists()
    assert "run: hotter" in output
    assert "rollout_temperature: 1.2" in output
    assert "fork_from:\n  branch: run\n  iteration: 0" in output


def test_a_fork_says_at_once_what_it_starts_from(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # The checks before the start refuse this configuration after the line.
    assert called(home, monkeypatch, "run@0", "--run", "hotter", "data.prompts.paths=[no.jsonl]")
    assert capsys.readouterr().err.startswith(
        "hotter: a fork of run@0, up to iteration 5; the weights are loaded after"
    )


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("absent",), "the run does not exist"),
        (("run@7",), "run@K with K from 0 to 1"),
        (("run", "num_rollout=2"), "the fork has no iteration to train"),
        (("run", "rollout.temperature=1"), "rollout_temperature"),
    ],
)
def test_wrong_input_is_refused(
    home: Path,
    words: tuple[str, ...],
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert called(home, monkeypatch, *words) == 2
    assert output in capsys.readouterr().err


def test_the_end_of_a_fork_prints_its_scores_as_training_does(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    summary = {
        "run": "hotter",
        "iterations": 2,
        "accuracy_before": 0.25,
        "accuracy_after": 0.5,
        "held_out_measure": "accuracy",
    }
    monkeypatch.setattr(fork, "check", lambda *_: None)
    monkeypatch.setattr(fork, "finish", lambda _: (0, summary))
    assert called(home, monkeypatch, "run@0", "--run", "hotter") == 0
    report = home / "hotter" / "report.html"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["hotter: accuracy 0.250 → 0.500", f"hotter: see {report}"]
    assert lines[2].endswith("convert dist2hf --of hotter --output-dir DIR")
