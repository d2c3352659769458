"""The language of the code: words and forms that readers had to read twice do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.source_counts import DIALECT, FOLDERS, Documented, asks, python_files

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "tools/source_counts.py",  # the list of the words
    "tests/test_language.py",  # examples of them
    "tests/postgres.py",  # the name of a user of Unix
}


def sources() -> Iterator[tuple[str, str]]:
    """Yield name and text of each source file and each test."""
    for folder in (*FOLDERS, "tests"):
        for path in python_files(str(ROOT / folder)):
            name = path.relative_to(ROOT).as_posix()
            if name not in ALLOWED:
                yield name, path.read_text(encoding="utf-8")


def test_no_source_file_has_a_word_of_the_old_dialect():
    found = [
        f"{name}:{number}: {match[0]!r}"
        for name, text in sources()
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := DIALECT.search(line))
    ]
    assert found == []


def test_no_docstring_asks_a_question():
    found = [
        f"{name}:{getattr(node, 'lineno', 1)}"
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Documented) and asks(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_no_module_says_what_is_not_in_it():
    found = [name for name, text in sources() if re.search(r"\bNot here:", text)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("Whom HTTPS servers are believed to be", True),
        ("what nobody needs is being removed", True),
        ("the files lies beside it", True),
        ("Push weights to every engine.", False),
        ("families of models", False),
    ],
)
def test_the_word_list_finds_the_dialect_and_nothing_else(line: str, found: bool):
    assert bool(DIALECT.search(line)) == found
