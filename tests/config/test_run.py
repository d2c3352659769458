"""Rules between the sections of a run: its models, ranks and external engines
(rlpipe.config.run)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlpipe.config.load import validate
from rlpipe.config.model import EngineConfig, ResourcesConfig, external_conflict
from rlpipe.config.train import SyncConfig
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
        ({"train": {}}, "needs train.lora"),
        ({"engine": {"quantization": "fp8"}}, "engine.quantization"),
        ({"sync": {"transport": "adapter", "in_flight": "in_place"}}, "sync.in_flight: in_place"),
        (
            {"sync": {"transport": "adapter", "check_weight_update_equal": True}},
            "check_weight_update_equal",
        ),
        (
            {"resources": {"colocate": True, "offload_rollout": True}},
            "resources.offload_rollout",
        ),
        (
            {
                "resources": {"external_engines": ["http://127.0.0.1:9"]},
                "engine": {"router_url": "http://127.0.0.1:8"},
            },
            "resources.external_engines",
        ),
    ],
)
def test_pushes_of_adapters_refuse_settings_that_need_all_weights(keys: dict[str, Any], words: str):
    adapters = {**BASE, "train": {"lora": {"rank": 4}}, "sync": {"transport": "adapter"}}
    assert validate(adapters).sync.transport == "adapter"
    shared = validate({**adapters, "resources": {"colocate": True}})
    assert not shared.resources.engines_sleep and shared.resources.trainer_sleeps
    assert validate(shared.model_dump(mode="json")) == shared
    with pytest.raises(ConfigError, match=words):
        validate({**adapters, **keys})


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
            "no engine samples",
        ),
        ({"reference": {"ref_update_interval": 2}}, "needs advantage.reference"),
        ({"critic": {"value_clip": 0}}, "value_clip"),
        (
            {"resources": {"critic_num_gpus_per_node": 1}},
            "only advantage.advantage_estimator: ppo has a critic",
        ),
        ({"resources": {"critic_num_nodes": 2}}, "2 nodes without ranks"),
        (
            {**PPO, "critic": {"parallel": {"tensor_model_parallel_size": 2}}},
            "a critic in the policy's ranks has the policy's layout",
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
def test_a_conflict_is_refused_with_the_key_that_causes_it(keys: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        validate({**BASE, **keys})


def test_replay_of_the_engines_routing_needs_no_scoring_pass():
    train = {"use_rollout_routing_replay": True, "use_routing_replay": True}
    assert validate(
        {**BASE, "train": train, "advantage": {"score_proximal": False}}
    ).train.replays_routing


def test_a_teacher_server_is_accepted():
    config = validate({**BASE, "advantage": {"use_opd": True}, "teacher": SERVER})
    assert config.teacher.url == "http://t:1"
    assert config.ref_update_interval is None
    assert not config.uses_critic


def test_a_critic_may_have_separate_ranks_and_layout_with_colocated_engines():
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


def test_a_critic_uses_the_policys_optimizer_except_for_its_own_keys():
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


LOCAL = "127.0.0.1:30000"
REMOTE = "http://10.0.0.7:30000"


def conflict(
    *engines: str, engine: Any = None, store: str | None = None, **sync: Any
) -> str | None:
    resources = ResourcesConfig.model_validate({"external_engines": engines})
    return external_conflict(
        resources, EngineConfig.model_validate(engine or {}), SyncConfig(**sync), store
    )


def test_an_address_has_a_host_and_a_port_and_an_optional_scheme():
    resources = ResourcesConfig.model_validate(
        {"external_engines": [LOCAL, "https://a.b:1/"], "rollout_num_gpus_per_engine": 4}
    )
    assert resources.external_engines == ("http://127.0.0.1:30000", "https://a.b:1")
    assert resources.num_engines == 2
    for wrong in ("10.0.0.7", "ftp://a:1", "a:1/v1", ""):
        with pytest.raises(ValidationError, match="http://host:port or host:port"):
            EngineConfig.model_validate({"router_url": wrong})


@pytest.mark.parametrize(
    "values",
    [{"external_engines": [LOCAL, LOCAL]}, {"external_engines": [LOCAL], "colocate": True}],
)
def test_external_engines_are_distinct_and_exclude_colocation(values: dict[str, Any]):
    with pytest.raises(ValidationError, match="external"):
        ResourcesConfig.model_validate(values)


@pytest.mark.parametrize(
    "result",
    [
        conflict(),
        conflict(LOCAL),
        conflict(LOCAL, transport="delta"),
        conflict(REMOTE, transport="distributed"),
        conflict(REMOTE, transport="disk", update_weight_disk_dir="/shared"),
        conflict(REMOTE, transport="disk", store="file:///shared"),
        conflict(REMOTE, transport="delta", update_weight_local_checkpoint_dir="/shared"),
        conflict(LOCAL, engine={"router_url": "a:1"}),
    ],
)
def test_reachable_external_engines_are_accepted(result: str | None):
    assert result is None


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (conflict(REMOTE), "uses memory of this machine"),
        (conflict(LOCAL, REMOTE, transport="delta"), "update_weight_local_checkpoint_dir"),
        (
            conflict(REMOTE, transport="disk", store="s3://b/p"),
            "update_weight_local_checkpoint_dir",
        ),
        (
            conflict(LOCAL, engine={"sglang": {"mem_fraction_static": 0.5}}),
            "remove one of them",
        ),
        (
            conflict(engine={"router_url": "a:1", "router": {"policy": "random"}}),
            "remove one of them",
        ),
    ],
)
def test_unreachable_engines_and_ignored_arguments_are_refused(result: str | None, words: str):
    assert result is not None and words in result


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"function": {"type": "math"}}, False),
        ({"function": {"type": "remote", "url": "http://t:1"}}, False),
        ({"function": {"type": "python", "path": "r.py:f"}}, True),
        ({"function": {"type": "math"}, "custom_reward_post_process_path": "r.py:f"}, True),
    ],
)
def test_only_functions_of_the_user_get_the_tokens_of_samples(
    reward: dict[str, Any], expected: bool
):
    assert validate({**BASE, "reward": reward}).reward.reads_tokens is expected
