"""`args` of user functions in the trainer (rlpipe.actors.trainer.trainer_spec)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from tests.actors.trainer.trained import configuration


def spec(tmp_path: Path, **sections) -> TrainerSpec:
    config = configuration("/models/m", "run", reward={"function": {"type": "math"}}, **sections)
    return TrainerSpec.of(config, model_dir="/models/m", store_root="/store", work_dir=tmp_path)


def test_user_functions_get_slimes_names_and_the_spec_can_be_pickled(tmp_path: Path):
    hooked = spec(tmp_path, advantage={"custom_advantage_function_path": "mine.py:f", "gamma": 0.9})
    assert (
        hooked.hook_args.rollout_batch_size,
        hooked.hook_args.n_samples_per_prompt,
        hooked.hook_args.gamma,
    ) == (4, 2, 0.9)
    assert pickle.loads(pickle.dumps(hooked)) == hooked
    of_loss = {"loss": {"custom_pg_loss_reducer_function_path": "mine.py:f"}}
    assert spec(tmp_path, train=of_loss).hook_args is not None


def test_without_user_functions_there_are_no_args(tmp_path: Path):
    assert spec(tmp_path).hook_args is None


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"loss": {"use_tis": True}}},
        {"train": {"loss": {"use_tis": True, "tis_mode": "icepop"}}},
        {"train": {"loss": {"use_tis": True, "tis_level": "sequence"}}},
        {"train": {"loss": {"rs_veto_threshold": 0.1}}},
        {
            "train": {"loss": {"use_tis": True}, "parallel": {"context_parallel_size": 2}},
            "resources": {"actor_num_gpus_per_node": 2},
        },
        {"train": {"use_routing_replay": True, "use_rollout_routing_replay": True}},
        {"advantage": {"advantage_estimator": "ppo"}},
        {"advantage": {"reference": True}, "train": {"loss": {"kl_loss_coef": 0.1}}},
    ],
)
def test_a_single_optimizer_step_computes_the_proximal_log_probs_itself(
    tmp_path: Path, sections: dict[str, Any]
):
    assert spec(tmp_path, **sections).score_proximal is None


@pytest.mark.parametrize(
    "sections",
    [
        {"advantage": {"score_proximal": True}},
        {"advantage": {"advantage_estimator": "rloo", "kl_coef": 0.1, "reference": True}},
        {"advantage": {"use_opd": True}, "teacher": {"opd_type": "samples"}},
        {"advantage": {"rollout_data_postprocess_path": "mine.py:f"}},
        {"advantage": {"custom_advantage_function_path": "mine.py:f"}},
        {"train": {"loss": {"type": "custom", "custom_loss_function_path": "mine.py:f"}}},
        {"train": {"loss": {"use_tis": True, "custom_tis_function_path": "mine.py:f"}}},
        {"train": {"loss": {"use_tis": True, "tis_batch_normalize": True}}},
        {"train": {"loss": {"use_rs": True, "renormalize_rejected": True}}},
        {
            "train": {
                "loss": {"use_tis": True, "tis_level": "geometric"},
                "parallel": {"context_parallel_size": 2},
            },
            "resources": {"actor_num_gpus_per_node": 2},
        },
        {"train": {"custom_megatron_before_train_step_hook_path": "mine.py:f"}},
        {"train": {"custom_megatron_before_log_prob_hook_path": "mine.py:f"}},
        {"train": {"use_routing_replay": True}},
        {"train": {"megatron": {"hidden_dropout": 0.1}}},
        {"advantage": {"advantage_estimator": "ppo"}, "critic": {"num_critic_only_steps": 1}},
    ],
)
def test_a_batch_is_scored_first_where_a_result_depends_on_it(
    tmp_path: Path, sections: dict[str, Any]
):
    assert spec(tmp_path, **sections).score_proximal is True


def test_the_scoring_pass_can_be_turned_off(tmp_path: Path):
    sections = {"advantage": {"score_proximal": False}, "train": {"global_batch_size": 8}}
    assert spec(tmp_path, **sections).score_proximal is False
