"""Defaults of a command line in slime's style are slime's.

`SLIME` and `MEGATRON` have every default that affects sampling, estimation or optimization. They
were read from slime's two parsers: `slime/utils/arguments.py` at 624b824a and
`megatron/training/arguments.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.load import load_run
from rlpipe.config.run import RunConfig
from rlpipe.slime.args import FLAGS, slime_args
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, differences, overrides_of

NEEDED = (
    "--hf-checkpoint /m --prompt-data a.jsonl --num-rollout 4 --rollout-batch-size 2 "
    "--n-samples-per-prompt 4 --rm-type math"
)

SLIME: dict[str, Any] = {
    # sampling and data
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_context_len": None,
    "rollout_max_prompt_len": None,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_shuffle": False,
    "rollout_seed": 42,
    "dynamic_sampling_filter_path": None,
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "update_weights_interval": 1,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "input_key": "input",
    "label_key": None,
    "metadata_key": "metadata",
    "tool_key": "tools",
    "loss_mask_type": "qwen",
    "sglang_router_request_timeout_secs": 14400.0,
    "rollout_health_check_interval": 30.0,
    "rollout_health_check_timeout": 30.0,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    # batches
    "micro_batch_size": 1,
    "use_dynamic_batch_size": False,
    "log_probs_max_tokens_per_gpu": None,
    # the loss
    "loss_type": "policy_loss",
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,  # slime's parser says None and its validation makes it eps_clip
    "eps_clip_c": None,
    "value_clip": 0.2,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "calculate_per_token_loss": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_routing_replay": False,
    "use_rollout_routing_replay": False,
    # advantages
    "advantage_estimator": "grpo",
    "kl_coef": 0.0,
    "gamma": 1.0,
    "lambd": 1.0,
    "normalize_advantages": False,
    "grpo_std_normalization": True,
    "rewards_normalization": True,
    "ref_update_interval": None,
    "use_opd": False,
    "opd_kl_coef": 1.0,
    "num_critic_only_steps": 0,
    # optimizer
    "seed": 1234,
    "lr": 1e-6,
    "clip_grad": 1.0,
}
MEGATRON: dict[str, Any] = {
    "optimizer": "adam",
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 0,
    "lr_decay_iters": None,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "bf16": True,  # slime sets it unless --fp16 is given
    "use_distributed_optimizer": True,  # slime always sets it
}
REASONS: dict[str, str] = {
    "rollout_num_gpus": "slime derives None from --colocate; without it users give a number",
    "offload_train": "slime derives None from --colocate",
    "offload_rollout": "slime derives None from --colocate",
    "critic_num_nodes": "no flag of this commit",
    "critic_num_gpus_per_node": "no flag of this commit",
    "critic_lr": "no flag of this commit: the policy's",
    "max_turns": "no flag of slime: its functions have their own",
    "rollout_max_response_len": "slime's None is the context's length; a larger number is the same",
    "over_sampling_batch_size": "slime's validation makes None the batch size",
    "global_batch_size": "slime's None is the size of a rollout",
    "num_steps_per_rollout": "follows from the batch size",
    "eps_clip_high": "slime's validation makes None eps_clip",
    "eval_function_path": "slime's validation makes None the rollout function",
    "update_weight_buffer_size": "speed only",
    "balance_by_flops": "speed only",
    "start_rollout_id": "slime's start makes None 0",
    "save_interval": "slime saves nothing by default",
    "use_tensorboard": "logging only",
    "ref_load": "the first weights",
    "bf16": "slime's validation sets it",
    "use_distributed_optimizer": "slime's validation sets it",
}
"""Attributes with another default than the parser, and the reason."""


def loaded(words: str, *more: str) -> RunConfig:
    return load_run(BASE, [*overrides_of(read_flags(f"{NEEDED} {words}".split())), *more])


@pytest.mark.parametrize(("name", "default"), [*SLIME.items(), *MEGATRON.items()])
def test_an_argument_that_is_not_given_has_slimes_default(name: str, default: Any):
    assert getattr(slime_args(loaded("")), name) == default


def test_every_flag_has_its_parsers_default_or_a_reason():
    args = slime_args(loaded(""))
    given = read_flags(NEEDED.split()).own
    different = {
        flag.name
        for flag in FLAGS.values()
        if flag.name not in given and getattr(args, flag.attribute) != flag.default
    }
    assert different == set(REASONS)


def test_settings_without_a_flag_are_slimes():
    config = loaded("")
    assert config.advantage.discount_masked_tokens
    assert config.advantage.fan_out_baseline == "sample"
    assert config.advantage.kl_type == "k1"
    assert config.critic.value_loss_coef == 1.0
    assert (config.train.loss.tis_level, config.train.loss.tis_mode) == ("token", "clip")
    assert (config.train.loss.use_rs, config.train.loss.constant_length) == (False, None)
    assert config.rollout.loss_mask_type == "all_assistant"
    assert config.rollout.rollout_max_response_len >= 2**31 - 1
    assert config.train.optimizer.lr_decay_steps is None
    assert config.data.overlong_prompts == "drop"


def test_special_tokens_stay_in_responses_by_default(tmp_path: Path):
    assert loaded("").rollout.rollout_skip_special_tokens is False
    left_out = loaded("--rollout-skip-special-tokens")
    assert left_out.rollout.rollout_skip_special_tokens is True
    assert slime_args(left_out).rollout_skip_special_tokens is True
    sets = tmp_path / "eval.yaml"
    sets.write_text("eval: {datasets: [{name: a, path: a.jsonl, skip_special_tokens: true}]}\n")
    (held_out,) = loaded(f"--eval-config {sets}").evaluation.datasets
    assert held_out.sampling()["rollout_skip_special_tokens"] is True


@pytest.mark.parametrize("estimator", ["gspo", "cispo"])
def test_clip_ranges_are_slimes_on_a_command_line_and_the_papers_in_a_recipe(
    estimator: str, tmp_path: Path
):
    loss = loaded(f"--advantage-estimator {estimator}").train.loss
    assert (loss.surrogate, loss.eps_clip, loss.eps_clip_high) == (estimator, 0.2, None)
    loss = loaded(f"--advantage-estimator {estimator} --eps-clip-high 4.0").train.loss
    assert (loss.eps_clip, loss.eps_clip_high) == (0.2, 4.0)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "num_rollout: 1\nmodel: {source: {type: huggingface, hf_checkpoint: /m}}\n"
        "data: {prompts: {type: file, paths: [a.jsonl]}}\nreward: {function: {type: math}}\n"
        "rollout: {rollout_batch_size: 2, n_samples_per_prompt: 2}\n"
    )
    loss = load_run(recipe, [f"advantage.advantage_estimator={estimator}"]).train.loss
    assert (loss.eps_clip, loss.eps_clip_high) == {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}[
        estimator
    ]


REQUIRED_FLAGS = {
    "sequence_parallel": "--tensor-model-parallel-size 2",
    "critic_num_nodes": "--advantage-estimator ppo --critic-num-gpus-per-node 1",
    "critic_num_gpus_per_node": "--advantage-estimator ppo",
    "rollout_num_gpus_per_engine": "--rollout-num-gpus 2",
    "offload": "--colocate",
    "offload_train": "--colocate",
    "offload_rollout": "--colocate",
    "sglang_router_ip": "--sglang-router-port 1",
    "sglang_router_port": "--sglang-router-ip h",
    "update_weight_mode": "--update-weight-transport disk",
    "update_weights_interval": "--async-buffer-size 4",
    "kl_coef": "--advantage-estimator ppo",
    "custom_loss_function_path": "--loss-type custom_loss",
    "loss_type": "--custom-loss-function-path a.py:f",
    "disable_compute_advantages_and_returns": "--loss-type sft_loss",
    "kl_loss_coef": "--use-kl-loss",
    "ref_update_interval": "--use-kl-loss",
    "custom_tis_function_path": "--use-tis",
    "use_opd": "--opd-type megatron --opd-teacher-load /teacher",
    "opd_type": "--opd-teacher-load /teacher",
    "debug_train_only": "--load-debug-rollout-data other",
}
"""Flag → other flags that it needs."""
VALUES = {
    "multimodal_keys": '{"image":"a"}',
    "update_weight_mode": "delta",
    "update_weight_transport": "disk",
    "update_weight_delta_encoding": "overwrite",
    "update_weight_delta_checksum": "adler32",
    "rollout_external_engine_addrs": "http://127.0.0.1:1",
    "eval_prompt_data": "aime a.jsonl",
    "ref_load": "/m",
    "save": "/x",
    "eps_clip_c": "3",
    "loss_type": "custom_loss",
    "kl_loss_type": "k2",
    "advantage_estimator": "gspo",
    "opd_type": "megatron",
    "wandb_mode": "offline",
    "profile_target": "train_actor",
    "rm_type": "f1",
    "loss_mask_type": "qwen3",
    "lr_decay_style": "cosine",
    "custom_config_path": "own.yaml",
    "eval_config": "eval.yaml",
    "megatron_config_path": "roles.yaml",
    "sglang_config": "groups.yaml",
    "save_hf": "/x/{rollout_id}",
}
KINDS = {
    "int": "2",
    "float": "0.5",
    "str": "x",
    "strs": "x",
    "ints": "3",
    "json": '{"a":1}',
    "on": "",
    "off": "",
    "either": "",
}
"""A word of each kind that is no flag's default."""


@pytest.mark.parametrize(
    "name", [flag.name for flag in FLAGS.values() if flag.effect in ("to", "built", "neutral")]
)
def test_args_of_functions_have_the_values_of_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("search_url: http://x\n")
    (tmp_path / "roles.yaml").write_text("megatron: [{role: actor, overrides: {lr: 0.1}}]\n")
    (tmp_path / "groups.yaml").write_text(
        "sglang: [{name: m, server_groups: [{worker_type: regular, num_gpus: 4}]}]\n"
    )
    (tmp_path / "eval.yaml").write_text("eval: {datasets: [{name: a, path: a.jsonl}]}\n")
    flag = FLAGS[name]
    word = VALUES.get(name, KINDS[flag.kind])
    words = f"{REQUIRED_FLAGS.get(name, '')} {flag.option} {word} --actor-num-gpus-per-node 4"
    if name == "actor_num_gpus_per_node":
        words = f"{flag.option} {word}"
    given = read_flags(f"{NEEDED} {words}".split()).own[name]
    assert getattr(slime_args(loaded(words)), flag.attribute) == given


def test_args_of_functions_follow_an_override_after_the_flags():
    args = slime_args(
        loaded(
            "--lr 1e-5 --micro-batch-size 4", "train.optimizer.lr=2e-5", "train.micro_batch_size=2"
        )
    )
    assert (args.lr, args.micro_batch_size) == (2e-5, 2)
    assert slime_args(loaded("--use-dynamic-batch-size --micro-batch-size 4")).micro_batch_size == 4


def test_flags_without_a_key_are_kept_with_the_run_and_change_no_digest():
    config = loaded("--log-multi-turn --num-layers 36")
    assert (config.flags["log_multi_turn"], config.flags["num_layers"]) == (True, 36)
    assert "flags" not in config.identity()
    assert json.loads(config.model_dump_json())["flags"]["num_layers"] == 36


def test_reward_key_selects_the_entry_that_is_the_reward():
    function = loaded("--rm-type dapo --reward-key acc").reward.function
    assert function.model_dump() == {"type": "by_row", "default": "dapo", "reward_key": "acc"}
    assert "reward_key" not in loaded("--rm-type dapo").reward.function.identity()
    held_out = loaded(
        "--rm-type dapo --reward-key score --eval-prompt-data a a.jsonl --eval-reward-key acc"
    )
    (dataset,) = held_out.evaluation.datasets
    assert dataset.reward is not None
    assert dataset.reward.function.model_dump() == {
        "type": "by_row",
        "default": "dapo",
        "reward_key": "acc",
    }
    assert (slime_args(held_out).reward_key, slime_args(held_out).eval_reward_key) == (
        "score",
        "acc",
    )


def test_a_weight_bound_below_one_is_accepted_without_rejection():
    assert loaded("--use-tis --tis-clip 0.5").train.loss.tis_clip == 0.5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rollout-top-p 0.9", "nucleus"),
        ("--use-rollout-logprobs --advantage-estimator ppo --kl-coef 0.1", "uses the engine's"),
        ("--advantage-estimator ppo --kl-coef 0.1", "the critic learns"),
        ("--partial-rollout", "sampled again"),
        ("--advantage-estimator cispo", "lower bound"),
        ("--use-opd --opd-type sglang --rollout-temperature 0.8", "scores at temperature 1"),
        ("--enable-mtp-training", "keep their weights"),
        ("--keep-old-actor", "the engine's"),
        ("--keep-old-actor --rollout-function-path m.generate", "the weights before the update"),
        ("--use-opd --rm-type math", "every reward is 0"),
    ],
)
def test_differences_from_slime_are_reported(words: str, expected: str):
    assert any(expected in sentence for sentence in differences(read_flags(words.split())))
    assert differences(read_flags(NEEDED.split())) == []
