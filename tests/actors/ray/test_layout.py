"""Separate or shared GPUs, decided from the GPUs of the cluster (rlpipe.actors.ray.layout)."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.actors.ray.layout import placed
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig

ENGINE_OF_FOUR = {
    "actor_num_gpus_per_node": 4,
    "rollout_num_gpus": 4,
    "rollout_num_gpus_per_engine": 4,
}


def configuration(resources: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    return validate(
        {
            "run": "run",
            "num_rollout": 3,
            "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
            "data": {"prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 64}},
            "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
            "reward": {"function": {"type": "math"}},
            "resources": resources or {},
            **sections,
        }
    )


def decision(config: RunConfig, *node_gpus: int) -> tuple[bool, int]:
    """Return whether GPUs are shared, and the GPUs of the engines."""
    resources = placed(config, node_gpus).config.resources
    assert isinstance(resources.colocate, bool)
    return resources.shares_gpus, resources.rollout_num_gpus


@pytest.mark.parametrize(
    ("resources", "node_gpus", "expected"),
    [
        ({}, (), (False, 1)),
        ({}, (1,), (True, 1)),
        ({}, (2,), (False, 1)),
        ({}, (8,), (False, 1)),
        ({}, (1, 1), (False, 1)),
        ({"actor_num_gpus_per_node": 2}, (2,), (True, 2)),
        ({"actor_num_gpus_per_node": 8}, (8,), (True, 8)),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4}, (8,), (False, 4)),
        ({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 4}, (8,), (True, 4)),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8}, (8, 8), (True, 16)),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8}, (8, 8, 8), (False, 1)),
        (ENGINE_OF_FOUR, (5, 3), (False, 4)),
        (ENGINE_OF_FOUR, (4, 3), (True, 4)),
        # Nine GPUs, but no node has the four of the engine.
        (ENGINE_OF_FOUR, (3, 3, 3), (False, 4)),
        ({"offload_train": True}, (1,), (True, 1)),
        ({"offload_train": True}, (2,), (False, 1)),
        ({"colocate": True}, (2,), (True, 1)),
        ({"colocate": False}, (1,), (False, 1)),
        ({"external_engines": ["127.0.0.1:30000"]}, (1,), (False, 1)),
    ],
)
def test_trainer_and_engines_share_gpus_only_where_separate_ones_do_not_suffice(
    resources: dict[str, Any], node_gpus: tuple[int, ...], expected: tuple[bool, int]
):
    assert decision(configuration(resources), *node_gpus) == expected


@pytest.mark.parametrize(
    "sections",
    [
        {"async_buffer_size": 1},
        {"sync": {"transport": "distributed"}},
        {"sync": {"in_flight": "in_place"}},
        {"debug": {"debug_train_only": True, "load_debug_rollout_data": "other"}},
    ],
)
def test_a_run_that_cannot_share_gpus_has_separate_ones(sections: dict[str, Any]):
    assert decision(configuration(**sections), 1) == (False, 1)


def test_a_run_that_fits_in_neither_way_keeps_the_error_of_separate_gpus():
    config = configuration({"actor_num_gpus_per_node": 4})
    assert placed(config, [2]).line is None
    assert decision(config, 2) == (False, 1)


def test_the_decision_has_a_line_with_its_numbers_and_the_run_keeps_auto():
    config = configuration()
    assert placed(config, [1]).line == (
        "trainer and engines share GPUs, 1 of 1, because separate ones would be 2 "
        "(resources.colocate: auto)"
    )
    assert placed(config, [8]).line == (
        "trainer and engines have separate GPUs, 2 of 8 (resources.colocate: auto)"
    )
    assert placed(config, []).line is None
    assert placed(configuration({"colocate": True}), [8]).line is None
    assert config.resources.colocate == "auto"
    resumed = validate(config.model_dump(mode="json"))
    assert placed(resumed, [1]) == placed(config, [1]), "a resume decides the same"
