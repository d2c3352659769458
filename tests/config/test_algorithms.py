"""Estimators and losses: derived defaults, and combinations that are refused
(rlpipe.config.algorithms)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlpipe.algorithms.advantages import ScoredBatch, estimate
from rlpipe.config.algorithms import AdvantageConfig, LossConfig
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError


def run(**sections: Any) -> RunConfig:
    base = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        "reward": {"function": {"type": "math"}},
    }
    return validate({**base, **sections})


@pytest.mark.parametrize(
    ("estimator", "clips"),
    [("grpo", (0.2, None)), ("rloo", (0.2, None)), ("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 4.0))],
)
def test_an_estimator_sets_its_surrogate_and_the_clips_of_its_paper(estimator: str, clips: tuple):
    loss = run(advantage={"advantage_estimator": estimator}).train.loss
    assert loss.surrogate == (estimator if estimator in ("gspo", "cispo") else "clip")
    assert (loss.eps_clip, loss.eps_clip_high) == clips


def test_a_given_surrogate_or_clip_stays():
    assert (
        run(
            advantage={"advantage_estimator": "gspo"}, train={"loss": {"surrogate": "clip"}}
        ).train.loss.eps_clip
        == 0.2
    )
    slime = run(
        advantage={"advantage_estimator": "gspo"}, train={"loss": {"eps_clip": 0.2}}
    ).train.loss
    assert (slime.surrogate, slime.eps_clip, slime.eps_clip_high) == ("gspo", 0.2, None)


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({}, 1),
        ({"global_batch_size": 8}, 2),
        ({"num_steps_per_rollout": 4}, 4),
        ({"global_batch_size": 8, "num_steps_per_rollout": 2}, 2),
    ],
)
def test_batch_size_and_number_of_steps_are_derived_from_each_other(train: dict, steps: int):
    assert run(train=train).num_steps_per_rollout == steps


@pytest.mark.parametrize(
    "train",
    [
        {"global_batch_size": 5},
        {"num_steps_per_rollout": 3},
        {"global_batch_size": 8, "num_steps_per_rollout": 4},
    ],
)
def test_a_batch_that_cannot_be_divided_evenly_is_refused_with_the_numbers(train: dict):
    with pytest.raises(
        ConfigError, match=r"rollout_batch_size × rollout.n_samples_per_prompt = 16 must be"
    ):
        run(train=train)


REFUSED = [
    (
        {"advantage_estimator": "grpo", "kl_coef": 0.1, "reference": True},
        {},
        "grpo does not use kl_coef",
    ),
    ({"advantage_estimator": "rloo", "kl_coef": 0.1}, {}, "needs reference"),
    (
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False},
        {},
        "always whitens",
    ),
    ({"score_proximal": False, "use_opd": True}, {}, "no log-probs to compare"),
    ({}, {"kl_loss_coef": 0.1}, "needs advantage.reference"),
    (
        {"advantage_estimator": "rloo", "kl_coef": 0.1, "reference": True},
        {"kl_loss_coef": 0.1},
        "remove one of them",
    ),
    ({"score_proximal": False}, {"use_tis": True}, "score_proximal"),
    ({}, {"use_tis": True, "use_rollout_logprobs": True}, "remove use_tis"),
    ({}, {"use_rs": True, "rs_lower_bound": 3.0}, "rs_lower_bound"),
    ({}, {"calculate_per_token_loss": True, "constant_length": 10}, "two aggregations"),
    ({}, {"type": "custom"}, "need each other"),
    ({}, {"custom_tis_function_path": "a.b"}, "needs use_tis"),
]


@pytest.mark.parametrize(("advantage", "loss", "words"), REFUSED)
def test_conflicting_keys_are_refused_with_the_reason(advantage: dict, loss: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        run(advantage=advantage, train={"loss": loss})


ONE_SAMPLE = {"rollout_batch_size": 4, "n_samples_per_prompt": 1}
COMPARING = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize("estimator", COMPARING)
def test_one_sample_per_prompt_is_refused_by_estimators_that_compare_samples(estimator: str):
    with pytest.raises(
        ConfigError,
        match=rf"n_samples_per_prompt = 1: {estimator} compares .* every advantage .* is 0",
    ):
        run(rollout=ONE_SAMPLE, advantage={"advantage_estimator": estimator})
    batch = ScoredBatch(
        rewards=np.array([1.0, 0.0, 3.0]),
        group=np.arange(3),
        rollout=np.arange(3),
        lengths=np.array([2, 1, 2]),
        mask=np.ones(5),
    )
    whitened = AdvantageConfig.model_validate({"advantage_estimator": estimator})
    result = estimate(batch, whitened.model_copy(update={"normalize_advantages": False}))
    assert result is not None and not result.advantages.any(), "the error's claim is true"


@pytest.mark.parametrize(
    "sections",
    [
        {"advantage": {"advantage_estimator": "reinforce_plus_plus"}},
        {"advantage": {"advantage_estimator": "ppo"}},
        {"advantage": {"rewards_normalization": False}},
        {"advantage": {"custom_advantage_function_path": "a.b"}},
        {
            "advantage": {"use_opd": True},
            "teacher": {"opd_type": "megatron", "opd_teacher_load": "/t"},
        },
        {"train": {"loss": {"type": "custom", "custom_loss_function_path": "a.b"}}},
        {"debug": {"debug_rollout_only": True}},
        {"rollout": {**ONE_SAMPLE, "custom_generate_function_path": "a.b"}},
        {"rollout": {**ONE_SAMPLE, "rollout_function_path": "a.b"}},
        {
            "rollout": {**ONE_SAMPLE, "custom_generate_function_path": "a.b"},
            "advantage": {"advantage_estimator": "rloo", "fan_out_baseline": "sample"},
        },
        {
            "rollout": {**ONE_SAMPLE, "type": "dataset"},
            "train": {"loss": {"type": "sft"}},
            "advantage": {"advantage_estimator": "none"},
        },
    ],
)
def test_one_sample_per_prompt_is_enough_if_none_is_compared_or_a_rollout_may_fan_out(
    sections: dict,
):
    assert run(**{"rollout": ONE_SAMPLE, **sections}).rollout.n_samples_per_prompt == 1


def test_rloo_refuses_one_rollout_per_prompt_even_if_it_fans_out():
    rollout = {**ONE_SAMPLE, "custom_generate_function_path": "a.b"}
    with pytest.raises(ConfigError, match="fan_out_baseline: sample"):
        run(rollout=rollout, advantage={"advantage_estimator": "rloo"})


def test_without_the_proximal_pass_several_steps_need_the_engines_log_probs():
    advantage = {"score_proximal": False}
    two = {"num_steps_per_rollout": 2}
    assert run(advantage=advantage).num_steps_per_rollout == 1
    with pytest.raises(ConfigError, match="2 optimizer steps"):
        run(advantage=advantage, train=two)
    assert (
        run(
            advantage=advantage, train={**two, "loss": {"use_rollout_logprobs": True}}
        ).num_steps_per_rollout
        == 2
    )


def test_rejection_bounds_default_to_the_weight_bounds():
    assert LossConfig(use_rs=True).rs_bounds == (0.5, 2.0)
    assert LossConfig(use_rs=True, tis_clip=4.0, tis_clip_low=0.1).rs_bounds == (0.1, 4.0)
    assert LossConfig(use_rs=True, rs_lower_bound=0.9, rs_upper_bound=1.1).rs_bounds == (0.9, 1.1)


def test_reinforce_plus_plus_is_whitened_and_grpo_is_not():
    assert AdvantageConfig(advantage_estimator="reinforce_plus_plus_baseline").normalize_advantages
    assert not AdvantageConfig().normalize_advantages
    with pytest.raises(ValidationError, match="advantage_estimator"):
        AdvantageConfig.model_validate({"advantage_estimator": "trpo"})


def pairs(loss: dict[str, Any], **sections: Any) -> RunConfig:
    prompts = {"type": "file", "paths": ["a.jsonl"], "label_key": "c", "rejected_key": "r"}
    advantage = {
        "advantage_estimator": "none",
        "reference": loss["type"] == "dpo" and not loss.get("dpo", {}).get("reference_free"),
    }
    base = {
        "data": {"prompts": prompts},
        "rollout": {"type": "dataset", "rollout_batch_size": 4},
        "reward": {"function": {"type": "none"}},
        "advantage": advantage,
        "train": {"loss": loss},
    }
    return run(**{**base, **sections})


DPO = {"type": "dpo"}
REWARD_MODEL = {"type": "reward_model"}


def test_preference_losses_compare_pairs_and_only_dpo_reads_a_reference():
    free = {"type": "dpo", "dpo": {"reference_free": True}}
    losses = [pairs(loss).train.loss for loss in (DPO, free, REWARD_MODEL)]
    assert [loss.compares_pairs for loss in losses] == [True, True, True]
    assert [loss.reads_reference for loss in losses] == [True, False, False]


@pytest.mark.parametrize(
    ("loss", "sections", "message"),
    [
        (DPO, {"advantage": {"advantage_estimator": "none"}}, "compares with a reference"),
        ({"type": "sft"}, {}, "need each other; found type: sft with both"),
        (
            DPO,
            {"data": {"prompts": {"type": "file", "paths": ["a"]}}},
            "dpo without data.prompts.label_key and rejected_key",
        ),
        (DPO | {"entropy_coef": 0.1}, {}, "mean over pairs; remove entropy_coef"),
        (DPO | {"calculate_per_token_loss": True}, {}, "remove calculate_per_token_loss"),
        (DPO | {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, {}, "no effect on loss_type"),
        (REWARD_MODEL, {"checkpoint": {"save_hf": "/x/{rollout_id}"}}, "remove checkpoint.save_hf"),
        (
            DPO,
            {"rollout": {"type": "dataset", "rollout_batch_size": 4, "n_samples_per_prompt": 2}},
            "n_samples_per_prompt: 1",
        ),
    ],
)
def test_settings_that_do_not_fit_preference_rows_are_refused(loss, sections, message):
    with pytest.raises(ConfigError, match=message):
        pairs(loss, **sections)
