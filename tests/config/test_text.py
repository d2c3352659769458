"""Read and write YAML (rlpipe.config.text)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.text import dump, parse
from rlpipe.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]))
)
KEYS = st.text("abcxyz_019eE.-", min_size=1)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0E+3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'1e-5'", "1e-5"),
        ("1e-5x", "1e-5x"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed, _ = parse(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@given(DATA)
def test_parse_of_dump_is_identity(value):
    parsed, _ = parse(dump(value), "here")
    assert repr(parsed) == repr(value)


def test_every_key_has_its_line():
    _, lines = parse("a:\n  b: 1\n  c:\n    - x\n    - d: 2\n", "here")
    assert lines == {"": 1, "a": 1, "a.b": 2, "a.c": 3, "a.c.0": 4, "a.c.1": 5, "a.c.1.d": 5}


def test_a_duplicate_key_is_an_error_with_both_lines():
    with pytest.raises(ConfigError) as caught:
        parse("a:\n  b: 1\n  c: 2\n  b: 3\n", "recipe.yaml")
    assert caught.value.where == "recipe.yaml:4"
    assert caught.value.found == "a.b, first on line 2"


def test_the_error_of_invalid_yaml_has_file_and_line():
    with pytest.raises(ConfigError) as caught:
        parse("a: 1\nb: [1, 2\n", "recipe.yaml")
    assert caught.value.where == "recipe.yaml:3"
