"""What does not fit together among the models beside the policy is said before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.config.load import validate
from rlpipe.errors import ConfigError

BASE: dict[str, Any] = {
    "run": "run",
    "num_rollout": 4,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
}
PPO: dict[str, Any] = {"advantage": {"advantage_estimator": "ppo"}}
SERVER = {"opd_type": "sglang", "url": "http://t:1"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"advantage": {"use_opd": True}}, "needs a teacher"),
        ({"teacher": {"opd_type": "megatron"}}, "opd_teacher_load"),
        ({"teacher": {"opd_type": "sglang"}}, "needs url"),
        (
            {
                "advantage": {"use_opd": True},
                "teacher": SERVER,
                "rollout": {
                    "rollout_batch_size": 4,
                    "n_samples_per_prompt": 2,
                    "rollout_temperature": 0.7,
                },
            },
            "scores at temperature 1",
        ),
        (
            {"train": {"use_routing_replay": True}, "advantage": {"score_proximal": False}},
            "routing of the scoring pass",
        ),
        (
            {
                "train": {"use_rollout_routing_replay": True, "loss": {"type": "sft"}},
                "rollout": {"type": "dataset", "rollout_batch_size": 4},
                "advantage": {"advantage_estimator": "none"},
            },
            "none samples",
        ),
        ({"reference": {"ref_update_interval": 2}}, "needs advantage.reference"),
        ({"critic": {"value_clip": 0}}, "value_clip"),
        (
            {"resources": {"critic_num_gpus_per_node": 1}},
            "only advantage.advantage_estimator: ppo has a critic",
        ),
        ({"resources": {"critic_num_nodes": 2}}, "2 nodes of no rank"),
        (
            {**PPO, "critic": {"parallel": {"tensor_model_parallel_size": 2}}},
            "in the policy's ranks it has their layout",
        ),
        (
            {
                **PPO,
                "critic": {"parallel": {"context_parallel_size": 2}},
                "resources": {"critic_num_gpus_per_node": 3},
            },
            "3 ranks must be a multiple of the critic's TP × PP × CP = 2",
        ),
    ],
)
def test_it_is_refused_with_the_key_that_is_wrong(keys: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        validate({**BASE, **keys})


def test_the_engines_routing_needs_no_scoring_pass():
    train = {"use_rollout_routing_replay": True, "use_routing_replay": True}
    assert validate(
        {**BASE, "train": train, "advantage": {"score_proximal": False}}
    ).train.replays_routing


def test_a_teacher_is_taken():
    config = validate({**BASE, "advantage": {"use_opd": True}, "teacher": SERVER})
    assert config.teacher.url == "http://t:1"
    assert config.ref_update_interval is None
    assert not config.uses_critic


def test_a_critic_may_have_ranks_and_a_layout_of_its_own_beside_colocated_engines():
    ranks = {"colocate": True, "critic_num_nodes": 2, "critic_num_gpus_per_node": 2}
    config = validate(
        {
            **BASE,
            **PPO,
            "resources": ranks,
            "critic": {"parallel": {"tensor_model_parallel_size": 2}},
        }
    )
    assert (config.resources.trainer_ranks, config.resources.critic_ranks) == (1, 4)
    assert validate({**BASE, **PPO}).resources.critic_ranks == 0


def test_a_critic_learns_as_the_policy_does_but_for_what_is_said():
    policy = {"lr": 1e-6, "lr_warmup_steps": 5, "weight_decay": 0.1}
    config = validate(
        {
            **BASE,
            **PPO,
            "train": {"optimizer": policy},
            "critic": {"lr": 1e-5, "lr_warmup_steps": 0},
        }
    )
    assert config.critic.resolved_optimizer(config.train.optimizer).model_dump() == {
        **config.train.optimizer.model_dump(),
        "lr": 1e-5,
        "lr_warmup_steps": 0,
    }
    own = config.critic.model_copy(
        update={"optimizer": config.train.optimizer, "lr": None, "lr_warmup_steps": None}
    )
    assert (
        own.resolved_optimizer(config.train.optimizer.model_copy(update={"lr": 1.0}))
        == config.train.optimizer
    )
