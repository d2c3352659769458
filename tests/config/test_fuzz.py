"""Random and hostile configurations are loaded or refused with one ConfigError."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.site import load_site
from rlpipe.config.load import dump, load_run, validate
from rlpipe.config.text import parse
from rlpipe.errors import ConfigError

ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
)
HOSTILE = {
    "a NUL": "a: \x00",
    "an escaped NUL": 'a: "\\0"',
    "half a character": 'a: "\\ud800"',
    "a list in itself": "a: &a [*a]",
    "a mapping in itself": "a: &a {b: *a}",
    "aliases of aliases": ALIASES,
    "brackets without end": "[" * 5000,
    "brackets": "[" * 2000 + "]" * 2000,
    "a time": "a: !!timestamp foo",
    "no truth": "a: !!bool foo",
    "nothing, and something": "a: !!null foo",
    "bytes": "a: !!binary foo",
    "an empty tag": "a: !!binary ''",
    "an object": "a: !!python/object/apply:os.getcwd []",
    "a set": "a: !!set {b}",
    "a list as a key": "? [1]\n: 2",
    "digits": "a: 0x" + "f" * 5000,
}
OVERRIDES = (
    "seed=0x" + "f" * 60,
    "train.optimizer.lr=.inf",
    "train.optimizer.lr=1e400",
    "engine.sglang.mem_fraction_static=.nan",
    "evaluation.datasets.²=1",
    "preset=" + "a" * 5000,
    "advantage.advantage_estimator={a: 1}",
    "train.loss.surrogate=[]",
    "run=../elsewhere",
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["ppo", "x.py:f", "http://h:1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "path", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_yaml_that_is_not_plain_data_is_an_error_with_the_file(text: str):
    with pytest.raises(ConfigError) as caught:
        parse(text, "recipe.yaml")
    assert str(caught.value.where).startswith("recipe.yaml")


@given(st.text("a1:-?&*!|>[]{}'\"\\#%, \n\t~.<0xe", max_size=30))
def test_any_text_is_yaml_or_an_error(text: str):
    with suppress(ConfigError):
        parse(text, "x")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"[1]",
        b"1",
        b"~",
        b"",
        b"1: 2",
        b"run: [1]",
        b"preset: {a: 1}",
        b"preset: [../x]",
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_run(path)


@pytest.mark.parametrize(
    "content",
    [b"\xff", b"[1]", b"gpu_sets: " + b"[" * 3000, b"1: 2", b"deployments: [{flow: train}]"],
)
def test_a_file_that_is_not_a_site_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "site.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_site(path)


def test_a_schedule_without_a_next_run_is_refused(tmp_path: Path):
    path = tmp_path / "site.yaml"
    path.write_text("deployments: [{flow: train, name: a, schedules: [{interval_s: .inf}]}]")
    with pytest.raises(ConfigError, match="interval_s"):
        load_site(path)


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_value_that_records_cannot_contain_is_refused_with_its_key(override: str):
    with pytest.raises(ConfigError) as caught:
        load_run("calculator", [override])
    assert override.partition("=")[0].split(".")[-1][:8] in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "reward.function={type: remote, url: 'http://me:hunter2@host/x'}",
        "store.root=s3://me:hunter2@bucket/x",
        "data.prompts={type: file, paths: ['https://me:hunter2@host/a.jsonl']}",
        "engine.sglang.x=ftp://me:hunter2@host",
    ],
)
def test_a_password_is_refused_and_not_printed(override: str):
    with pytest.raises(ConfigError, match="password") as caught:
        load_run("calculator", [override])
    assert "hunter2" not in str(caught.value)


CALCULATOR: dict[str, Any] = load_run("calculator").model_dump(mode="json")


def _paths(value: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [keys, *(inner for name, child in items for inner in _paths(child, (*keys, name)))]


@given(st.sampled_from(_paths(CALCULATOR)[1:]), VALUES)
def test_a_recipe_with_a_random_value_is_valid_or_refused(keys: tuple[Any, ...], value: Any):
    values = copy.deepcopy(CALCULATOR)
    target = values
    for name in keys[:-1]:
        target = target[name]
    target[keys[-1]] = value
    with suppress(ConfigError):
        config = validate(values)
        assert validate(parse(dump(config), "x")[0]) == config
