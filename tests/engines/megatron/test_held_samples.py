"""Ranks that hold their own samples compute, bit for bit, what ranks with the batch compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlpipe.config.algorithms import LossConfig
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.system.ports import free_port
from tests.engines.megatron.held_jobs import score_and_train_held, value_and_error_of_rank_0
from tests.engines.megatron.test_parallel import LAYOUTS, TRAIN

CORRECTED = {"loss": {**TRAIN["loss"], "use_tis": True, "use_rs": True}}
PER_TOKEN = {"loss": {**TRAIN["loss"], "calculate_per_token_loss": True}}
CASES: dict[str, tuple[dict, int, dict[str, Any]]] = {
    "several steps": ({}, 11, {"scored": True, "steps": 3}),
    "fanned rollouts": ({}, 12, {"scored": True, "fanned": True}),
    "own log-probs of one step": (CORRECTED, 9, {}),
    "two blocks of shards": ({"max_tokens_per_gpu": 128}, 240, {"scored": True, "shuffled": True}),
    "means over tokens": (PER_TOKEN, 9, {"scored": True, "steps": 2}),
    "a constant length": ({"loss": {"constant_length": 16}}, 9, {"scored": True}),
    "one sample a micro-batch": ({"micro_batch_size": 1}, 5, {"scored": True}),
    "supervised": ({"loss": {"type": "sft"}}, 7, {"steps": 2}),
    "replayed experts": ({"use_routing_replay": True}, 9, {"scored": True, "steps": 2}),
    "a critic": ({}, 8, {"scored": True, "critic": True, "steps": 2}),
}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, other[name]), name
        else:
            assert value == other[name], name


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_their_samples_as_with_the_whole_batch(models, two_ranks, case: str):
    train, samples, options = CASES[case]
    family = "qwen3_moe" if "use_routing_replay" in train else "qwen3"
    arguments = (models[family], {**TRAIN, **train}, samples)
    whole, own = (
        two_ranks.run(score_and_train_held, *arguments, one, options) for one in (False, True)
    )
    for one, other in zip(whole, own, strict=True):
        assert_same(one, other)
    assert sum(one["trained"] for one in own) == samples
    assert {one["digest"] for one in [*whole, *own]} == {own[0]["digest"]}


@pytest.mark.integration
@pytest.mark.parametrize("layout", ["tensor parallel", "pipeline parallel", "context parallel"])
def test_ranks_of_one_replica_train_the_same_samples(models, two_ranks, layout: str):
    arguments = (models["qwen3"], TRAIN | LAYOUTS[layout], 9)
    options = {"scored": True, "steps": 2}
    whole, own = (
        two_ranks.run(score_and_train_held, *arguments, one, options) for one in (False, True)
    )
    for one, other in zip(whole, own, strict=True):
        assert_same(one, other)
        assert other["trained"] == 9


@pytest.mark.integration
def test_a_rank_without_samples_takes_part(models, two_ranks):
    arguments = (models["qwen3"], TRAIN, 1)
    whole, own = (
        two_ranks.run(score_and_train_held, *arguments, one, {"scored": True})
        for one in (False, True)
    )
    for one, other in zip(whole, own, strict=True):
        assert_same(one, other)
    assert sorted(one["trained"] for one in own) == [0, 1]


def test_one_rank_holds_all_samples(models):
    arguments = (models["qwen3"], TRAIN, 9)
    whole, own = (
        score_and_train_held(0, 1, free_port(), *arguments, one, {"scored": True})
        for one in (False, True)
    )
    assert_same(whole, own)


@pytest.mark.parametrize(
    ("loss", "scored", "whole"),
    [
        ({}, True, False),
        ({"use_tis": True}, False, False),
        ({"use_tis": True}, True, True),
        ({"rs_veto_threshold": 1e-4}, True, True),
        ({"custom_pg_loss_reducer_function_path": "mine.reduce"}, False, True),
    ],
)
@pytest.mark.parametrize("prediction_layers", [None, 1])
def test_steps_that_compare_samples_read_the_whole_batch(
    loss: dict[str, Any], scored: bool, whole: bool, prediction_layers: int | None
):
    config = SimpleNamespace(mtp_num_layers=prediction_layers)
    engine: Any = SimpleNamespace(
        trained=SimpleNamespace(bridge=SimpleNamespace(config=config)),
        _train=SimpleNamespace(loss=LossConfig.model_validate(loss)),
    )
    reads = MegatronEngine.reads_whole_batch(engine, scored=scored)
    assert reads is (whole or prediction_layers is not None)


@pytest.mark.integration
def test_all_ranks_get_the_value_and_the_error_of_rank_0(models, two_ranks):
    assert two_ranks.run(value_and_error_of_rank_0, models["qwen3"], TRAIN) == [
        (0, "of rank 0"),
        (0, "of rank 0"),
    ]
