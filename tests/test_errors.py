"""The exception tree: drawn as it is, readable, and the same on the other side of a process
boundary (rlpipe.errors)."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from rlpipe import errors
from rlpipe.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    ObjectMissing,
    RlpipeError,
    StoreError,
    StoreFull,
)

TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RlpipeError)
]
DETAILS = {"where": "train.optimizer.lr", "found": "-1", "expected": "at least 0", "do": "set it"}


def drawn() -> dict[str, str]:
    """Class → the one above it, as the module's docstring draws them."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)([A-Z]\w+)", line)
        if found:
            depth = len(found[1]) // 4
            above[depth:] = [found[2]]
            if depth:
                parents[found[2]] = above[depth - 1]
    return parents


def test_the_drawing_is_the_tree():
    assert drawn() == {
        kind.__name__: kind.__mro__[1].__name__ for kind in TREE if kind is not RlpipeError
    }


def test_every_error_of_the_tree_is_raised_somewhere():
    """A name that nothing raises, and that no error raised is a kind of, promises what nobody
    keeps."""
    root = Path(errors.__file__).parents[1]
    sources = [
        path
        for room in ("rlpipe", "tasks", "flows", "tools", "deployments")
        for path in (root / room).rglob("*.py")
    ]
    named = {
        node.id
        for path in sources
        if path != Path(errors.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name)
    }
    unused = {
        kind.__name__
        for kind in TREE
        if not named & {child.__name__ for child in TREE if issubclass(child, kind)}
    }
    assert unused == set()


def test_an_error_says_where_what_was_found_what_was_expected_and_what_to_do():
    assert str(ConfigError("not a learning rate", **DETAILS)).splitlines() == [
        "train.optimizer.lr: not a learning rate",
        "  found:    -1",
        "  expected: at least 0",
        "  do:       set it",
    ]


def test_what_an_error_does_not_know_it_does_not_say():
    assert str(DataError("no rows")) == "no rows"
    assert str(DataError("no rows", found=0)) == "no rows\n  found:    0"


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_all_it_says(kind: type[RlpipeError]):
    error = kind("not a learning rate", **DETAILS)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.problem, copy.where, copy.found, copy.expected, copy.do) == (
        "not a learning rate",
        *DETAILS.values(),
    )


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (DataError, ValueError),
        (ObjectMissing, LookupError),
        (DeadlineExceeded, TimeoutError),
    ],
)
def test_input_errors_are_python_s_own_kinds_too(kind: type[RlpipeError], builtin: type[Exception]):
    with pytest.raises(builtin):
        raise kind("x")


def test_one_clause_catches_all_that_the_store_says():
    assert {kind for kind in TREE if issubclass(kind, StoreError)} > {
        StoreError,
        StoreFull,
        ObjectMissing,
    }
