"""Parameters that start a run: fields of the form, names of scheduled runs, seeds and forks."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prefect.utilities.callables import parameter_schema

from flows.audit import audit
from flows.convert import convert
from flows.evaluate import evaluate
from flows.fork import fork
from flows.parameters import apply_seed_and_fork, format_run_name, recipe_summary, run_name_of
from flows.reprocess import reprocess
from flows.train import train
from rlpipe.config.load import recipes

NIGHT = datetime(2026, 11, 21, 2, 0, tzinfo=UTC)


def form(flow: Any) -> dict[str, Any]:
    return parameter_schema(flow.fn).model_dump_for_openapi()


@pytest.mark.parametrize("flow", [train, fork, evaluate, reprocess, convert, audit])
def test_every_field_of_a_form_has_a_description(flow: Any):
    assert [
        name for name, field in form(flow)["properties"].items() if not field.get("description")
    ] == []


@pytest.mark.parametrize("flow", [train, fork, evaluate, reprocess, convert, audit])
def test_every_field_says_whether_it_is_required_and_has_an_example(flow: Any):
    schema = form(flow)
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        words = field["description"].split()
        assert (words[0] == "Required.") == (name in required), name
        assert words[0] in ("Required.", "Required", "Optional.", "Optional,"), name
        assert "Example:" in words or "such as `" in field["description"], name


def test_the_form_has_a_line_for_each_recipe():
    description = form(train)["properties"]["recipe"]["description"]
    lines = [line for line in description.split("\n\n") if line.startswith("- ")]
    assert [line.split("`")[1] for line in lines] == recipes()
    assert all(line.endswith(".") and 20 < len(line) < 240 for line in lines), lines


def test_the_summary_of_a_recipe_is_the_first_sentence_of_its_comment(tmp_path: Path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# Qwen3-0.6B on sums\n# and more. Not this.\nnum_rollout: 1\n# later.\n")
    assert recipe_summary(str(recipe)) == "Qwen3-0.6B on sums and more."
    recipe.write_text("num_rollout: 1\n")
    assert recipe_summary(str(recipe)) == ""


def test_a_recipe_is_chosen_from_a_list_or_given_as_a_file():
    recipe = form(train)["properties"]["recipe"]
    assert recipe["anyOf"][0]["enum"] == recipes()
    taken = Draft202012Validator(recipe).is_valid
    assert [taken(one) for one in (recipes()[0], "my/own.yaml", "no such recipe")] == [
        True,
        True,
        False,
    ]


def test_the_name_of_a_scheduled_run_contains_the_scheduled_time():
    assert format_run_name("nightly-%Y%m%d", NIGHT) == "nightly-20261121"
    assert format_run_name("mine", NIGHT) == "mine"
    assert format_run_name(None, NIGHT) is None


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"recipe": "deployments/recipes/search.yaml"}, "search"),
        ({"recipe": "search", "run": "at-%H"}, "at-02"),
        ({"recipe": "search", "overrides": ["run=a", "seed=1", "run=b"]}, "b"),
        ({"recipe": "search", "seed": 0}, "search-seed0"),
        ({"recipe": "search", "fork": "old@7"}, "old-from-7"),
        ({"recipe": "search", "fork": "old", "run": "new"}, "new"),
    ],
)
def test_a_flow_run_has_the_name_of_its_run(parameters: dict[str, Any], name: str):
    assert run_name_of(parameters, NIGHT) == name


def test_overrides_win_over_seed_and_fork():
    overrides, run = apply_seed_and_fork(
        "search", ["seed=5", "fork_from.iteration=2"], None, seed=1, fork="old@7"
    )
    assert overrides[0] == "fork_from={branch: old, iteration: 7}"
    assert overrides[-3:] == ["seed=1", "seed=5", "fork_from.iteration=2"]
    assert run == "search-seed1"
