"""Whose GPUs the processes of a run are on (rlpipe.config.model)."""

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


def test_colocated_engines_have_all_gpus_of_the_trainer_unless_they_are_given_others():
    assert (
        resources(colocate=True, actor_num_nodes=2, actor_num_gpus_per_node=4).rollout_num_gpus == 8
    )
    assert (
        resources(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus=6).rollout_num_gpus
        == 6
    )
    assert resources(actor_num_gpus_per_node=4).rollout_num_gpus == 1


def test_an_engine_of_more_gpus_than_a_node_has_is_spread_evenly_over_several():
    def nodes(**values: Any) -> tuple[int, int]:
        found = resources(rollout_num_gpus=16, **values)
        return found.engine_nodes, found.engine_gpus_per_node

    assert nodes(rollout_num_gpus_per_engine=8) == (1, 8)
    assert nodes(rollout_num_gpus_per_engine=16) == (2, 8)
    assert nodes(rollout_num_gpus_per_engine=16, num_gpus_per_node=4) == (4, 4)
    assert nodes(rollout_num_gpus_per_engine=2, num_gpus_per_node=4) == (1, 2)
    assert nodes(rollout_num_gpus_per_engine=16, external_engines=["a:1"]) == (1, 16), (
        "others have started it"
    )


def test_both_make_room_for_the_other_unless_they_are_told_not_to():
    shared = resources(colocate=True)
    assert (shared.trainer_sleeps, shared.engines_sleep) == (True, True)
    shared = resources(colocate=True, offload_train=False)
    assert (shared.trainer_sleeps, shared.engines_sleep) == (False, True)
    apart = resources(offload_train=False)
    assert (apart.trainer_sleeps, apart.engines_sleep) == (False, False)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"resources": {"offload_rollout": True}},
            "offload_rollout: trainer and engines have GPUs of their own",
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
            "would lie on two nodes of actor_num_gpus_per_node = 6",
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
            "would lie on some of the trainer's 24 GPUs and on others beside",
        ),
        (
            {"resources": {"colocate": True}, "async_buffer_size": 1},
            "so no rollout runs ahead of it; found async_buffer_size = 1",
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
def test_what_cannot_be_colocated_is_refused_in_words(sections: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        run(**sections)
    assert said in str(caught.value)


def test_requests_may_stay_inside_engines_that_keep_their_cache():
    config = run(
        resources={"colocate": True, "offload_rollout": False}, sync={"in_flight": "in_place"}
    )
    assert not config.resources.engines_sleep


def test_slimes_args_say_who_makes_room():
    args = slime_args(run(resources={"colocate": True, "offload_train": False}))
    assert (args.colocate, args.offload, args.offload_train, args.offload_rollout) == (
        True,
        False,
        False,
        True,
    )
