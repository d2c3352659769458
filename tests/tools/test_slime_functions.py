"""Counts of the functions and tests of a checkout of slime (tools.slime_counts.functions)."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.slime_counts import functions


def checkout(folder: Path) -> Path:
    """Write a small checkout with two functions and two test files for plugins."""
    for name in ("slime", "examples/mine", "scripts", "slime_plugins", "tests/plugin_contracts"):
        (folder / name).mkdir(parents=True)
    (folder / "slime" / "__init__.py").write_text("")
    (folder / "slime" / "extra.py").write_text("def more(args, samples): ...\n")
    (folder / "examples" / "mine" / "mine.py").write_text("from slime.utils.types import Sample\n")
    (folder / "scripts" / "run.sh").write_text(
        "   --custom-rm-path mine.Sample\n   --dynamic-sampling-filter-path slime.extra.more\n"
    )
    tests = folder / "tests" / "plugin_contracts"
    (tests / "test_good.py").write_text(
        "from slime.utils.types import Sample\n\ndef test_it():\n    assert Sample().tokens == []\n"
    )
    (tests / "test_bad.py").write_text("def test_it():\n    assert 1 == 2\n")
    return folder


def test_functions_and_test_files_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(functions, "MORE", ())
    root = str(checkout(tmp_path))
    monkeypatch.setattr(sys, "argv", ["functions", root, "functions", "--without-source"])
    assert functions.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine.Sample: imported" and lines[1].startswith("slime.extra.more: Module")
    assert lines[-1] == "1 of 2 functions imported"
    monkeypatch.setattr(sys, "argv", ["functions", root, "functions"])
    assert functions.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 functions imported"
    monkeypatch.setattr(sys, "argv", ["functions", root, "contracts"])
    assert functions.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tests/plugin_contracts/test_bad.py: test_it: assert 1 == 2"
    assert lines[1:] == [
        "tests/plugin_contracts/test_good.py: passed",
        "1 of 2 test files passed",
    ]
