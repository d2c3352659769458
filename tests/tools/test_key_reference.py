"""The key reference names every key, with its meaning, and is current."""

from __future__ import annotations

import sys
from typing import Literal

from rlpipe.config.base import Config, Tuning
from rlpipe.config.similar_keys import all_keys
from tools import key_reference
from tools.key_reference import UNITS, flags_by_key, meaning_of, reference, sections


def is_in_a_table(key: str) -> bool:
    """True if a table has the key, under its own path or under the path of a model that is printed
    once."""
    for section in sections():
        for path in section.other_paths:
            other = path.replace(".N", "") + "."
            if key.startswith(other):
                key = key.replace(other, section.path.replace(".N", "") + ".", 1)
    path, _, name = key.rpartition(".")
    return any(
        section.path.replace(".N", "") == path and name in section.model.model_fields
        for section in sections()
    )


def test_the_stored_reference_is_current(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["key_reference", "--check"])
    assert key_reference.main() == 0, capsys.readouterr().err


def test_a_changed_model_makes_the_stored_reference_out_of_date(monkeypatch, capsys, tmp_path):
    target = tmp_path / "KEYS.md"
    target.write_text(
        reference().replace("`rollout_temperature`", "`temperature`"), encoding="utf-8"
    )
    monkeypatch.setattr(key_reference, "TARGET", target)
    monkeypatch.setattr(sys, "argv", ["key_reference", "--check"])
    assert key_reference.main() == 1
    assert "python -m tools.key_reference" in capsys.readouterr().err


def test_every_key_of_the_configuration_is_in_a_table():
    assert [key for key in all_keys() if not is_in_a_table(key)] == []
    assert not is_in_a_table("rollout.temperature")


def test_every_key_has_a_meaning():
    empty = [
        f"{section.path}.{name}"
        for section in sections()
        for name, info in section.model.model_fields.items()
        if not meaning_of(info)
    ]
    assert empty == []


def test_every_flag_that_sets_a_key_is_in_the_reference():
    text = reference()
    flags = [flag for names in flags_by_key().values() for flag in names]
    assert len(flags) > 150
    assert [flag for flag in flags if f"`{flag}`" not in text] == []


def test_every_unit_belongs_to_a_key():
    assert (
        set(UNITS) - {name for section in sections() for name in section.model.model_fields}
        == set()
    )


def test_a_row_has_type_bounds_default_unit_and_tuning_mark():
    class Inner(Config):
        """One part."""

        type: Literal["a", "b"]
        wait_s: float | None = Tuning(default=None, gt=0)
        """Longest wait | deadline.

        None: no limit.
        """

    class Outer(Config):
        parts: tuple[Inner, ...] = ()

    chosen = sections(Outer)
    assert [section.title for section in chosen] == ["Top level", "`parts.N` with `type: a` or `b`"]
    text = key_reference._table(
        chosen[1], {section.model: section for section in chosen}, {"parts.wait_s": ["--wait"]}
    )
    row = (
        r"| `wait_s` ° | number > 0 or none | none | s "
        r"| Longest wait \| deadline.<br>None: no limit. | `--wait` |"
    )
    assert row in text.splitlines()


def test_keys_of_a_tuning_model_have_the_mark():
    text = reference()
    assert "| `metric` ° |" in text.split("## `stop_when`")[1].split("## ")[0]
    assert "| `rollout_temperature` |" in text
