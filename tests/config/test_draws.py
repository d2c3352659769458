"""Settings of a curriculum: weights over time, limits, and what they cannot be used with."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.config.draws import CurriculumConfig, source_of_path
from rlpipe.config.load import validate
from rlpipe.errors import ConfigError
from tests.config.test_run import BASE

ONE = {"weights": [{"from_iteration": 0, "weights": {"a": 1}}]}
RATES = {"difficulty": {"easy": 0}}
SUPERVISED = {
    "rollout": {"type": "dataset", "rollout_batch_size": 4},
    "advantage": {"advantage_estimator": "none"},
    "train": {"loss": {"type": "sft"}},
    "reward": {"function": {"type": "none"}},
}


def configured(curriculum: dict[str, Any], data: dict[str, Any] | None = None, **keys: Any):
    section = {**BASE["data"], **(data or {}), "curriculum": curriculum}
    return validate({**BASE, "data": section, **keys})


def entries(**weights: dict[str, float]) -> list[dict[str, Any]]:
    return [{"from_iteration": int(k[1:]), "weights": own} for k, own in weights.items()]


@pytest.mark.parametrize(
    ("curriculum", "words"),
    [
        ({}, "expected weights or difficulty"),
        ({**RATES, "source_key": "source"}, "source_key names the sources of `weights`"),
        ({"weights": entries(k1={"a": 1})}, "from iteration 0 on"),
        ({"weights": entries(k0={"a": 1}) * 2}, "from iteration 0 on, in order"),
        ({"weights": entries(k0={"a": 1}, k5={"b": 1})}, "each entry needs all sources"),
        ({"weights": entries(k0={"a": 0})}, "one above 0"),
        ({"weights": entries(k0={})}, "one above 0"),
        ({"weights": entries(k0={"a": 1, "b": -1})}, "weights from 0 on"),
        ({"difficulty": {"easy_above": 0.3, "hard_below": 0.5}}, "a row has one difficulty"),
        ({"difficulty": {"normal": 0}}, "difficulty.normal"),
    ],
)
def test_a_curriculum_that_decides_nothing_or_contradicts_itself_is_refused(curriculum, words):
    with pytest.raises(ConfigError, match=words):
        configured(curriculum)


def test_weights_between_two_entries_are_constant_or_linear():
    keys: dict[str, Any] = {"weights": entries(k0={"a": 1, "b": 0}, k4={"a": 0, "b": 2})}
    constant = CurriculumConfig.model_validate(keys)
    assert [constant.weights_at(k)["b"] for k in range(6)] == [0, 0, 0, 0, 2, 2]
    linear = CurriculumConfig.model_validate({**keys, "between": "linear"})
    assert [linear.weights_at(k)["b"] for k in range(6)] == [0, 0.5, 1, 1.5, 2, 2]
    assert linear.weights_at(1)["a"] == 0.75
    assert CurriculumConfig.model_validate(RATES).weights_at(3) == {}


@pytest.mark.parametrize(
    ("curriculum", "keys", "words"),
    [
        (ONE, {"rollout": {**BASE["rollout"], "data_source_path": "m.Source"}}, "draws the rows"),
        (RATES, SUPERVISED, "samples nothing"),
        (RATES, {"reward": {"function": {"type": "none"}}}, "gives no rewards"),
        (RATES, {"debug": {"debug_rollout_only": True}}, "commits nothing"),
    ],
)
def test_a_curriculum_is_refused_where_it_cannot_decide(curriculum, keys, words):
    with pytest.raises(ConfigError, match=words):
        configured(curriculum, **keys)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"slime_position": {"epoch": 0, "offset": 1}}, "continues slime's order"),
        ({"prompts": {"type": "seeds", "size": 3}}, "source_key is needed"),
        ({"prompts": {"type": "file", "paths": ["x/a.jsonl", "y/a.parquet"]}}, "equal names"),
    ],
)
def test_prompts_of_a_curriculum_need_an_order_and_sources(data, words):
    environment = {"path": "m.Game", "type": "gym"}
    rollout = {**BASE["rollout"], "environment": environment}
    with pytest.raises(ConfigError, match=words):
        configured(ONE, data, rollout=rollout)


def test_supervised_rows_can_be_drawn_by_source_and_slices_of_a_file_are_one_source():
    assert configured(ONE, **SUPERVISED).data.curriculum is not None
    paths = ["x/a.jsonl@[0:5]", "x/a.jsonl@[5:]"]
    assert configured(ONE, {"prompts": {"type": "file", "paths": paths}}).data.curriculum
    assert source_of_path("hf://datasets/o/n@1/sets/math.v2.parquet@[:9]") == "math.v2"


def test_no_curriculum_leaves_the_identity_of_a_run_unchanged():
    assert "curriculum" not in validate(BASE).data.identity()
