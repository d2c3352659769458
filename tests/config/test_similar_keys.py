"""The keys that an unknown key may mean (rlpipe.config.similar_keys)."""

from __future__ import annotations

import pytest

from rlpipe.config.data import EvalDataset
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import RunConfig
from rlpipe.config.similar_keys import ALIASES, all_keys, similar_keys
from rlpipe.config.train import CriticConfig, LoraConfig, TrainConfig


def test_each_alias_names_keys_that_exist_once():
    keys = set(all_keys())
    assert [key for named in ALIASES.values() for key in named.split() if key not in keys] == []
    words = [word for names in ALIASES for word in names.split()]
    assert len(words) == len(set(words))
    # At the root, the key itself is no unknown key.
    assert set(words).isdisjoint(RunConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lr", "train.optimizer.lr"),
        ("learning_rate", "train.optimizer.lr"),
        ("learning-rate", "train.optimizer.lr"),
        ("LR", "train.optimizer.lr"),
        ("epochs", "num_rollout"),
        ("batch_size", "rollout.rollout_batch_size"),
        ("n", "rollout.n_samples_per_prompt"),
        ("num_generations", "rollout.n_samples_per_prompt"),
        ("max_tokens", "rollout.rollout_max_response_len"),
        ("temperature", "rollout.rollout_temperature"),
        ("kl_coef", "advantage.kl_coef"),
        ("beta", "train.loss.kl_loss_coef"),
        ("clip_ratio", "train.loss.eps_clip"),
    ],
)
def test_a_name_of_another_framework_suggests_the_key_first(name: str, key: str):
    assert similar_keys(name, RunConfig, "")[0] == key
    assert key in similar_keys(name, TrainConfig, "train")


def test_the_same_setting_of_the_section_comes_first():
    assert similar_keys("learning_rate", CriticConfig, "critic")[0] == "critic.lr"
    assert similar_keys("max_tokens", EvalDataset, "evaluation.datasets.0")[0] == (
        "evaluation.datasets.0.max_response_len"
    )
    assert similar_keys("temperature", RolloutConfig, "rollout")[0] == "rollout.rollout_temperature"
    assert similar_keys("batch_size", TrainConfig, "train")[0] == "train.global_batch_size"
    assert similar_keys("lr", TrainConfig, "train")[0] == "train.optimizer.lr"
    assert similar_keys("r", LoraConfig, "train.lora") == ["train.lora.rank"]


def test_a_typing_error_suggests_the_section_and_a_misplaced_key_its_section():
    assert similar_keys("rankk", LoraConfig, "train.lora") == ["train.lora.rank"]
    assert similar_keys("clip_grad", RunConfig, "")[0] == "train.optimizer.clip_grad"
    (listed,) = similar_keys("zzz", LoraConfig, "train.lora")
    assert listed == f"one of {', '.join(LoraConfig.model_fields)}"
