"""The column reference has every column and is current."""

from __future__ import annotations

import sys

from rlpipe.store.columns import STORED
from rlpipe.store.tables.derived import DERIVED
from tools import column_reference


def test_the_stored_reference_is_current(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["column_reference", "--check"])
    assert column_reference.main() == 0, capsys.readouterr().err


def test_a_changed_column_makes_the_reference_out_of_date(monkeypatch, capsys, tmp_path):
    target = tmp_path / "COLUMNS.md"
    target.write_text(column_reference.reference().replace("`seed`", "`sead`"), encoding="utf-8")
    monkeypatch.setattr(column_reference, "TARGET", target)
    monkeypatch.setattr(sys, "argv", ["column_reference", "--check"])
    assert column_reference.main() == 1
    assert "out of date" in capsys.readouterr().err


def test_every_column_of_every_table_is_in_the_reference():
    text = column_reference.reference()
    for table in (*STORED, *DERIVED):
        section = text.partition(f"### {table.name}\n")[2].partition("\n### ")[0]
        assert [name for name in table.schema.names if f"| `{name}` |" not in section] == []
