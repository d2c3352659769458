"""Assignment of a run's processes to GPUs (rlpipe.config.model)."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.config.load import validate
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ConfigError
from rlpipe.slime.args import slime_args


def resources(**values: Any) -> ResourcesConfig:
    return ResourcesConfig.model_validate(values)


def run(**sections: Any):
    values = {
        "run": "r",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "none"}},
    }
    return validate({**values, **sections})


def test_colocated_engines_use_all_gpus_of_the_trainer_by_default():
    assert (
        resources(colocate=True, actor_num_nodes=2, actor_num_gpus_per_node=4).rollout_num_gpus == 8
    )
    assert (
        resources(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus=6).rollout_num_gpus
        == 6
    )
    assert resources(actor_num_gpus_per_node=4).rollout_num_gpus == 1


def test_an_engine_larger_than_a_node_is_spread_evenly_over_nodes():
    def nodes(**values: Any) -> tuple[int, int]:
        config = resources(rollout_num_gpus=16, **values)
        return config.engine_nodes, config.engine_gpus_per_node

    assert nodes(rollout_num_gpus_per_engine=8) == (1, 8)
    assert nodes(rollout_num_gpus_per_engine=16) == (2, 8)
    assert nodes(rollout_num_gpus_per_engine=16, num_gpus_per_node=4) == (4, 4)
    assert nodes(rollout_num_gpus_per_engine=2, num_gpus_per_node=4) == (1, 2)
    assert nodes(rollout_num_gpus_per_engine=16, external_engines=["a:1"]) == (1, 16), (
        "the run does not start it"
    )


def test_colocated_trainer_and_engines_sleep_unless_offload_is_off():
    shared = resources(colocate=True)
    assert (shared.trainer_sleeps, shared.engines_sleep) == (True, True)
    shared = resources(colocate=True, offload_train=False)
    assert (shared.trainer_sleeps, shared.engines_sleep) == (False, True)
    separate = resources(offload_train=False)
    assert (separate.trainer_sleeps, separate.engines_sleep) == (False, False)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"resources": {"colocate": False, "offload_rollout": True}},
            "offload_rollout: trainer and engines use separate GPUs",
        ),
        (
            {
                "resources": {
                    "colocate": True,
                    "actor_num_gpus_per_node": 6,
                    "rollout_num_gpus_per_engine": 4,
                    "rollout_num_gpus": 4,
                }
            },
            "GPUs of two nodes of actor_num_gpus_per_node = 6",
        ),
        (
            {"resources": {"rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 12}},
            "must be a multiple of num_gpus_per_node (8)",
        ),
        (
            {
                "resources": {
                    "colocate": True,
                    "actor_num_nodes": 3,
                    "actor_num_gpus_per_node": 8,
                    "rollout_num_gpus": 32,
                    "rollout_num_gpus_per_engine": 16,
                }
            },
            "would share only some GPUs with the trainer's 24 ranks",
        ),
        (
            {"resources": {"colocate": True}, "async_buffer_size": 1},
            "so no rollout runs ahead of training; found async_buffer_size = 1",
        ),
        (
            {"resources": {"colocate": True}, "sync": {"in_flight": "in_place"}},
            "expected sync.in_flight: abort or drain",
        ),
        (
            {"resources": {"colocate": True}, "sync": {"transport": "distributed"}},
            "expected sync.transport: tensor, disk or delta",
        ),
    ],
)
def test_impossible_colocation_is_refused_with_the_reason(sections: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        run(**sections)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"pool_size": 8}}, "needs rollout.selection: first_finished"),
        ({"async_buffer_size": 0}, "async_buffer_size: 0"),
        ({"deterministic": True}, "deterministic: true"),
        ({"rollout": {"rollout_function_path": "a.py:f"}}, "rollout.rollout_function_path"),
    ],
)
def test_open_groups_that_cannot_continue_are_refused_with_the_reason(
    sections: dict[str, Any], words: str
):
    rollout = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, **sections.pop("rollout", {})}
    if "pool_size" not in rollout:
        rollout["selection"] = "first_finished"
    with pytest.raises(ConfigError) as caught:
        run(rollout=rollout, **{"async_buffer_size": 1, **sections})
    assert words in str(caught.value)


def test_in_place_sync_is_accepted_if_engines_keep_their_cache():
    config = run(
        resources={"colocate": True, "offload_rollout": False}, sync={"in_flight": "in_place"}
    )
    assert not config.resources.engines_sleep


def test_args_of_slime_have_the_offload_settings():
    args = slime_args(run(resources={"colocate": True, "offload_train": False}))
    assert (args.colocate, args.offload, args.offload_train, args.offload_rollout) == (
        True,
        False,
        False,
        True,
    )
