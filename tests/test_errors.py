"""The exception tree: its drawing, its messages, and pickling (rlpipe.errors)."""

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
    """Return class → base class, as the module's docstring draws them."""
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


def test_the_drawn_tree_equals_the_classes():
    assert drawn() == {
        kind.__name__: kind.__mro__[1].__name__ for kind in TREE if kind is not RlpipeError
    }


def test_every_error_of_the_tree_is_raised_somewhere():
    """Every class, or a subclass of it, is used outside of `errors`."""
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


def test_a_message_gives_where_found_expected_and_what_to_do():
    assert str(ConfigError("not a learning rate", **DETAILS)).splitlines() == [
        "train.optimizer.lr: not a learning rate",
        "  found:    -1",
        "  expected: at least 0",
        "  do:       set it",
    ]


def test_a_message_leaves_out_missing_details():
    assert str(DataError("no rows")) == "no rows"
    assert str(DataError("no rows", found=0)) == "no rows\n  found:    0"


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_details_through_pickling(kind: type[RlpipeError]):
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
def test_input_errors_are_also_built_in_errors(kind: type[RlpipeError], builtin: type[Exception]):
    with pytest.raises(builtin):
        raise kind("x")


def test_store_error_is_the_base_of_all_errors_of_the_store():
    assert {kind for kind in TREE if issubclass(kind, StoreError)} > {
        StoreError,
        StoreFull,
        ObjectMissing,
    }


def test_a_terminal_shows_a_word_that_users_know():
    assert errors.Fenced("the run a is running").kind == "InUse"
    assert ConfigError("wrong").kind == "ConfigError"
