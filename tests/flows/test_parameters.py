"""What is filled in to start a run: the form's fields, names of scheduled runs, seeds and forks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prefect.utilities.callables import parameter_schema

from flows.evaluate import evaluate
from flows.parameters import as_settled, name_of, named_at
from flows.train import train
from rlpipe.config.load import recipes

NIGHT = datetime(2026, 11, 21, 2, 0, tzinfo=UTC)


def form(flow: Any) -> dict[str, Any]:
    return parameter_schema(flow.fn).model_dump_for_openapi()


@pytest.mark.parametrize("flow", [train, evaluate])
def test_every_field_of_a_form_says_what_it_is(flow: Any):
    assert [
        name for name, field in form(flow)["properties"].items() if not field.get("description")
    ] == []


def test_a_recipe_is_chosen_from_those_of_the_project_or_named_as_a_file():
    recipe = form(train)["properties"]["recipe"]
    assert recipe["anyOf"][0]["enum"] == recipes()
    taken = Draft202012Validator(recipe).is_valid
    assert [taken(one) for one in (recipes()[0], "my/own.yaml", "no such recipe")] == [
        True,
        True,
        False,
    ]


def test_the_name_of_a_scheduled_run_has_the_moment_it_was_scheduled_for():
    assert named_at("nightly-%Y%m%d", NIGHT) == "nightly-20261121"
    assert named_at("mine", NIGHT) == "mine"
    assert named_at(None, NIGHT) is None


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"recipe": "deployments/recipes/search.yaml"}, "search"),
        ({"recipe": "search", "run": "at-%H"}, "at-02"),
        ({"recipe": "search", "seed": 0}, "search-seed0"),
        ({"recipe": "search", "fork": "old@7"}, "old-from-7"),
        ({"recipe": "search", "fork": "old", "run": "new"}, "new"),
    ],
)
def test_a_flow_run_is_called_as_its_run(parameters: dict[str, Any], name: str):
    assert name_of(parameters, NIGHT) == name


def test_overrides_win_over_what_a_seed_and_a_fork_set():
    overrides, run = as_settled(
        "search", ["seed=5", "fork_from.iteration=2"], None, seed=1, fork="old@7"
    )
    assert overrides[0] == "fork_from={branch: old, iteration: 7}"
    assert overrides[-3:] == ["seed=1", "seed=5", "fork_from.iteration=2"]
    assert run == "search-seed1"
