"""Run files of a home (rlpipe.store.run_file), and the errors of commands that cannot read one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from flows.derived_runs import write_recipe
from rlpipe.errors import ConfigError, ObjectCorrupt
from rlpipe.store.run_file import (
    RunFile,
    find_run,
    get_run,
    run_path,
    store_of,
    stores_of,
    write_run,
)

DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    '{"store": 7, "config": {}}',
    '{"config": {}}',
    '{"store": "s3://b/p"}',
    "\xff",
]


def test_a_run_file_is_read_back_and_the_default_is_the_store_of_the_home(tmp_path: Path):
    run_file = RunFile(
        store="s3://bucket/prefix", config={"run": "run"}, epoch=3, ray="10.0.0.1:6379"
    )
    assert find_run(tmp_path, "run") is None and store_of(tmp_path, "run") == tmp_path / "store"
    with pytest.raises(ConfigError, match="there is no such run"):
        get_run(tmp_path, "run")
    write_run(tmp_path, "run", run_file)
    assert find_run(tmp_path, "run") == get_run(tmp_path, "run") == run_file
    assert store_of(tmp_path, "run") == run_file.store
    assert list((tmp_path / "run").iterdir()) == [run_path(tmp_path, "run")]


def test_the_stores_of_a_home_are_its_own_and_those_of_its_runs(tmp_path: Path):
    own = tmp_path / "store"
    assert stores_of(tmp_path) == [str(own)]
    for name in ("a", "b"):
        write_run(tmp_path, name, RunFile(store=str(tmp_path / "shared"), config={}))
    assert stores_of(tmp_path) == [str(tmp_path / "shared")]
    own.mkdir()
    write_run(tmp_path, "c", RunFile(store=own.as_uri(), config={}))
    assert len(stores_of(tmp_path)) == 2, "the store of the home has two names"
    run_path(tmp_path, "c").unlink()
    assert stores_of(tmp_path) == [str(own), str(tmp_path / "shared")]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_malformed_run_file_is_named(tmp_path: Path, text: str):
    write_run(tmp_path, "run", RunFile(store="x", config={}))
    run_path(tmp_path, "run").write_bytes(text.encode("latin-1"))
    for read in (find_run, get_run, store_of):
        with pytest.raises(ObjectCorrupt, match="not a readable run file"):
            read(tmp_path, "run")


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "verify", "--run", "run"),
        ("rollouts", "--run", "run"),
        ("replay", "--run", "run"),
        ("report", "--run", "run"),
        ("switches", "--run", "run"),
        ("timeline", "--run", "run"),
        ("fork", "run", "--run", "new"),
        ("reprocess", "--of", "run"),
        ("evaluate", "--of", "run"),
    ],
)
def test_a_command_names_an_unreadable_run_file_and_the_fix(
    tmp_path: Path,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write_run(tmp_path, "run", RunFile(store="x", config={}))
    run_path(tmp_path, "run").write_text('{"store": ')
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    tool = importlib.import_module(f"tools.{words[0]}")
    monkeypatch.setattr(sys, "argv", [f"tools.{words[0]}", *words[1:]])
    assert tool.main() == 2
    output = capsys.readouterr().err
    assert (
        "ObjectCorrupt" in output
        and str(run_path(tmp_path, "run")) in output
        and "start the run again" in output
    )


def test_two_concurrent_writers_of_a_recipe_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = Path.write_text

    def interrupted(path: Path, text: str, **options: str) -> int:
        """Write the same recipe in another writer after half of this write."""
        done = plain(path, text, **options)
        monkeypatch.undo()
        write_recipe(tmp_path, "run", {"by": "the other"})
        return done

    monkeypatch.setattr(Path, "write_text", interrupted)
    recipe = write_recipe(tmp_path, "run", {"by": "this one"})
    assert "this one" in recipe.read_text() and [recipe] == list(recipe.parent.iterdir())
