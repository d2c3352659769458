"""Virtual pipelining: two pipeline stages with two chunks each compute the same as one rank."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from rlpipe.system.ports import free_port
from tests.engines.megatron.checkpoint.test_checkpoint import check
from tests.engines.megatron.ranks import (
    copy_of_checkpoint,
    offload_and_train,
    save_and_resume,
    score_and_train,
    score_beside_a_teacher,
    train_on_any_number,
    value_and_train,
)
from tests.engines.megatron.routing_jobs import record_and_replay
from tests.engines.megatron.test_parallel import TRAIN
from tests.parameters import each

PIPELINE = {"parallel": {"pipeline_model_parallel_size": 2}}
CHUNKS = PIPELINE | {"megatron": {"virtual_pipeline_model_parallel_size": 2}}
SAME_CHUNKS = {
    "layers of a chunk": {"num_layers_per_virtual_pipeline_stage": 1},
    "layout": {"pipeline_model_parallel_layout": "Et|t|t|tL"},
    "larger groups": {
        "virtual_pipeline_model_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": 3,
    },
}


@pytest.fixture(scope="module")
def alone(models):
    """Return a function that returns the results of one rank, by family."""
    return cache(lambda family: score_and_train(0, 1, free_port(), models[family], TRAIN))


def compare(found: dict, wanted: dict) -> None:
    """Compare scores, metrics of four optimizer steps and updated weights."""
    assert np.abs(found["scores"] - wanted["scores"]).max() < 1e-5
    assert np.abs(found["reference"] - wanted["reference"]).max() < 1e-5
    assert len(found["steps"]) == len(wanted["steps"]) == 4
    for step, expected in zip(found["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert [*found["after"]] == [*wanted["after"]]
    for name, weight in wanted["after"].items():
        assert np.abs(found["after"][name] - weight).max() < 2e-5, name


@pytest.mark.integration
@pytest.mark.parametrize("family", each(["qwen3_deep", "qwen3_moe_deep"], ["qwen3_moe_deep"]))
def test_chunks_compute_the_same_as_one_rank(models, alone, two_ranks, family):
    first, second = two_ranks.run(score_and_train, models[family], TRAIN | CHUNKS)
    assert np.array_equal(first["scores"], second["scores"])
    assert first["steps"] == second["steps"]
    assert first["digest"] == second["digest"]
    compare(first, alone(family))
    again, _ = two_ranks.run(score_and_train, models[family], TRAIN | CHUNKS)
    assert (again["digest"], again["steps"]) == (first["digest"], first["steps"])


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("arguments", SAME_CHUNKS)
def test_every_argument_for_chunks_gives_the_same_result(models, alone, two_ranks, arguments):
    train = TRAIN | PIPELINE | {"megatron": SAME_CHUNKS[arguments]}
    first, _ = two_ranks.run(score_and_train, models["qwen3_deep"], train)
    compare(first, alone("qwen3_deep"))


@pytest.mark.long
@pytest.mark.integration
def test_any_number_of_micro_batches_and_overlapped_reduction(models, two_ranks):
    """The schedule takes even numbers: empty micro-batches fill up and change nothing."""
    train = TRAIN | {"loss": {}, "use_distributed_optimizer": True}
    wanted, _ = two_ranks.run(train_on_any_number, models["qwen3_deep"], train | PIPELINE)
    megatron = CHUNKS["megatron"] | {"overlap_grad_reduce": True, "bucket_size": 5000}
    first, second = two_ranks.run(
        train_on_any_number, models["qwen3_deep"], train | CHUNKS | {"megatron": megatron}
    )
    assert any(number % 2 for number in first["micro-batches"])
    for found, expected in zip(first["steps"], wanted["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, weight in wanted["after"].items():
        assert np.array_equal(first["after"][name], second["after"][name]), name
        assert np.abs(first["after"][name] - weight).max() < 1e-6, name


@pytest.mark.integration
@pytest.mark.parametrize("distributed_optimizer", each([False, True], [True]))
def test_a_checkpoint_of_chunks_loads_on_one_rank_and_back(
    models, two_ranks, tmp_path, distributed_optimizer
):
    """Weights, Adam's state and continued training are equal bit for bit."""
    train = {"max_tokens_per_gpu": 64, "use_distributed_optimizer": distributed_optimizer}
    model = models["qwen3_deep"]
    own, alone, back = (str(tmp_path / name) for name in ("own", "alone", "back"))
    digests, _ = two_ranks.run(save_and_resume, model, train | CHUNKS, own, free_port())
    check(digests)
    single = copy_of_checkpoint(0, 1, free_port(), model, train, own, alone)
    again, _ = two_ranks.run(copy_of_checkpoint, model, train | CHUNKS, alone, back)
    assert again["digest"] == digests["saved"]
    stages, _ = two_ranks.run(copy_of_checkpoint, model, train | PIPELINE, own, alone)
    for copy in (again, stages):
        assert [*copy["weights"]] == [*single["weights"]]
        for name, weight in single["weights"].items():
            assert np.array_equal(copy["weights"][name], weight), name
    once_more = copy_of_checkpoint(0, 1, free_port(), model, train, back, alone)
    assert (once_more["digest"], once_more["trained"]) == (single["digest"], single["trained"])


@pytest.mark.long
@pytest.mark.integration
def test_a_critic_in_chunks_computes_the_same_as_on_one_rank(models, two_ranks):
    model = models["qwen3_deep"]
    train = {"max_tokens_per_gpu": 64, "loss": {"eps_clip": 0.1}}
    wanted = value_and_train(0, 1, free_port(), model, train, {})
    first, second = two_ranks.run(value_and_train, model, train | CHUNKS, {})
    assert first["digest"] == second["digest"]
    assert np.abs(first["values"] - wanted["values"]).max() < 1e-5
    for step, expected in zip(first["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert np.abs(first["after"] - wanted["after"]).max() < 1e-4


@pytest.mark.integration
@pytest.mark.parametrize("recomputed", each([{}, {"recompute_granularity": "selective"}], [{}]))
def test_routing_is_recorded_and_replayed_in_chunks(models, two_ranks, recomputed):
    model = models["qwen3_moe_deep"]
    modules = {"recompute_modules": ["moe"]} if recomputed else {}
    train = {"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-3, "adam_eps": 1e-5}}
    wanted = record_and_replay(0, 1, free_port(), model, train)
    chunks = CHUNKS["megatron"] | recomputed | modules
    first, second = two_ranks.run(record_and_replay, model, train | PIPELINE | {"megatron": chunks})
    assert (wanted["others"] != wanted["experts"]).mean() > 0.5
    for found in (first, second):
        for name in ("experts", "again", "others"):
            assert np.array_equal(found[name], wanted[name]), name
        assert np.abs(found["replayed"] - wanted["replayed"]).max() < 1e-4
        assert found["free"] == [None, None]
    for step, expected in zip(first["steps"], wanted["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.integration
def test_a_teacher_with_fewer_layers_has_its_own_number_of_chunks(models, two_ranks):
    wanted = score_beside_a_teacher(
        0, 1, free_port(), models["qwen3_deep"], models["llama"], {"max_tokens_per_gpu": 64}
    )
    train = TRAIN | PIPELINE | {"megatron": {"num_layers_per_virtual_pipeline_stage": 1}}
    first, _ = two_ranks.run(score_beside_a_teacher, models["qwen3_deep"], models["llama"], train)
    for number, scores in wanted.items():
        assert np.abs(first[number] - scores).max() < 1e-5
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1


@pytest.mark.integration
def test_all_chunks_are_offloaded_and_restored(models, two_ranks):
    for found in two_ranks.run(offload_and_train, models["qwen3_deep"], CHUNKS):
        assert found["kept"] == 0
        assert found["before"] == found["after"] != found["end"]
