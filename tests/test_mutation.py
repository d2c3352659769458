"""The mutations of tests.mutation: which places change, and that a test can find them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation import CORE, Mutation, draw, failed_test, files_covering, mutations

SOURCE = '''"""A docstring, which is no statement to remove."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3


def above(values: tuple[Literal[2], ...], strict: bool = False) -> list[int]:
    """Return the values above 1, é."""
    found = []
    for value in values:
        if value >= 1 and not (strict and value == 1):
            found.append(value + 0)
    return found
'''
TEST = """
from core.above import above


def test_the_values_above_one_are_returned():
    assert above((0, 1, 2)) == [1, 2]
"""


def mutated(source: str, one: Mutation) -> str:
    encoded = source.encode()
    return (encoded[: one.begin] + one.after.encode() + encoded[one.end :]).decode()


def test_comparisons_numbers_booleans_operators_and_statements_change():
    found = {(one.before, one.after) for one in mutations("above.py", SOURCE)}
    assert found == {
        ("False", "True"),
        ("value >= 1", "(value > 1)"),
        ("1", "2"),
        ("value == 1", "(value != 1)"),
        ("not (strict and value == 1)", "(strict and value == 1)"),
        ("strict and value == 1", "((strict) or (value == 1))"),
        (
            "value >= 1 and not (strict and value == 1)",
            "((value >= 1) or (not (strict and value == 1)))",
        ),
        ("found.append(value + 0)", "pass"),
        ("value + 0", "((value) - (0))"),
        ("0", "1"),
    }


@pytest.mark.parametrize("package", CORE)
def test_every_mutation_of_the_core_is_python(repository: Path, package: str):
    paths = sorted((repository / package).rglob("*.py"))[::7]
    assert paths
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for one in mutations(path.name, source)[::5]:
            ast.parse(mutated(source, one))


def test_a_seed_draws_the_same_mutations_of_different_lines(repository: Path):
    drawn = draw(repository, ["rlpipe/batch"], 20, seed=3)
    assert drawn == draw(repository, ["rlpipe/batch"], 20, seed=3)
    assert drawn != draw(repository, ["rlpipe/batch"], 20, seed=4)
    assert len({(one.file, one.line) for one in drawn}) == 20


def test_the_tests_of_a_module_are_those_that_import_it_and_then_its_room(repository: Path):
    direct, room = files_covering(repository, "rlpipe/batch/packing.py")
    assert "tests/batch/test_packing.py" in direct
    assert "tests/batch/test_build.py" in {*direct, *room}
    assert not set(direct) & set(room)


def test_a_mutation_is_found_by_a_test_that_fails(tmp_path: Path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "above.py").write_text(SOURCE.replace("tuple[Literal[2], ...]", "tuple"))
    (tmp_path / "test_above.py").write_text(TEST)
    assert failed_test(tmp_path, [["test_above.py"]]) == ""
    source = (tmp_path / "core" / "above.py").read_text()
    (removed,) = [one for one in mutations("core/above.py", source) if one.after == "pass"]
    removed.apply(tmp_path)
    assert "test_the_values_above_one" in failed_test(tmp_path, [["test_above.py"]])
