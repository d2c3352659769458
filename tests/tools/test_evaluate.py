"""The command that evaluates the weights of a run (tools.evaluate)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlpipe.store.run_file import RunFile, write_run
from tests.tasks.test_begin import config
from tools import evaluate
from tools.evaluate import sampling_notes

SET = {"name": "held", "prompts": {"type": "file", "paths": ["b.jsonl"]}}
SAMPLED = "held: sampled with temperature 1.0, top_p 1.0, top_k -1, responses per prompt 1, "


@pytest.mark.parametrize(
    ("own", "end"),
    [
        ({}, "; other draws, so figures differ by chance"),
        (
            {"temperature": 0, "top_k": 5},
            "; the evaluations of old itself have temperature 0.0, top_k 5",
        ),
    ],
)
def test_the_sampling_of_an_evaluation_is_printed_with_what_the_run_does_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, float], end: str
):
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    of_run = config(run="old", evaluation={"datasets": [{**SET, **own}]})
    write_run(tmp_path, "old", RunFile(store="s", config=of_run.model_dump(mode="json")))
    used = config(evaluation={"datasets": [SET]})
    (line,) = sampling_notes(used, "old")
    assert line.startswith(SAMPLED) and line.endswith(end)
    (line,) = sampling_notes(used, None)
    assert line.startswith(SAMPLED) and ";" not in line


def test_a_run_in_the_place_of_a_recipe_gives_the_command_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path, "old", RunFile(store="s", config=config(run="old").model_dump(mode="json")))
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["tools.evaluate", "old@3", "--home", str(tmp_path)])
    assert evaluate.main() == 2
    assert "rlpipe evaluate --of old@3" in capsys.readouterr().err


def test_a_greedy_evaluation_like_the_runs_own_has_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    greedy = config(run="old", evaluation={"datasets": [{**SET, "temperature": 0}]})
    write_run(tmp_path, "old", RunFile(store="s", config=greedy.model_dump(mode="json")))
    (line,) = sampling_notes(greedy, "old")
    assert ";" not in line and "by chance" not in line
