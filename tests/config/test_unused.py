"""Warnings about given keys without effect (rlpipe.config.unused)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.load import dump, find_recipe, load_run, presets, recipes, unused_keys
from rlpipe.config.similar_keys import all_keys
from rlpipe.config.text import dump as dump_yaml
from rlpipe.config.unused import DEPENDENCIES
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of

RECIPE: dict[str, Any] = {
    "num_rollout": 3,
    "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
    "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    "reward": {"function": {"type": "math"}},
}
SUPERVISED = [
    "rollout.type=dataset",
    "train.loss.type=sft",
    "advantage.advantage_estimator=none",
    "reward.function={type: none}",
]
HELD_OUT = "evaluation.datasets=[{name: a, prompts: {type: file, paths: [a.jsonl]}}]"
PPO = "advantage.advantage_estimator=ppo"
RPP = "advantage.advantage_estimator=reinforce_plus_plus"
TEACHER = ["advantage.use_opd=true", "teacher.opd_type=sglang", "teacher.url=http://h:1"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_yaml(RECIPE))
    return path


CASES: list[tuple[list[str], str, list[str]]] = [
    # (overrides with the switch off, key of the warning, overrides that turn the switch on)
    (
        ["data.apply_chat_template_kwargs={a: 1}"],
        "data.apply_chat_template_kwargs",
        ["data.apply_chat_template=true"],
    ),
    (
        ["rollout.partial_rollout=true"],
        "rollout.partial_rollout",
        ["rollout.over_sampling_batch_size=8", "async_buffer_size=1"],
    ),
    (
        ["rollout.partial_rollout=true", "rollout.selection=first_finished", "async_buffer_size=1"],
        "rollout.partial_rollout",
        ["rollout.selection=planned", "rollout.over_sampling_batch_size=8"],
    ),
    (
        ["rollout.buffer_filter_path=a.py:f"],
        "rollout.buffer_filter_path",
        ["rollout.over_sampling_batch_size=8"],
    ),
    (
        ["rollout.max_sampling_rounds=2"],
        "rollout.max_sampling_rounds",
        ["rollout.dynamic_sampling_filter_path=a.py:f"],
    ),
    (
        ["rollout.mask_offpolicy_in_partial_rollout=true"],
        "rollout.mask_offpolicy_in_partial_rollout",
        ["async_buffer_size=1"],
    ),
    (["rollout.loss_mask_type=all_assistant"], "rollout.loss_mask_type", SUPERVISED),
    (
        ["rollout.max_turns=3"],
        "rollout.max_turns",
        ["rollout.custom_generate_function_path=a.py:f"],
    ),
    (["rollout.tool_timeout_s=3"], "rollout.tool_timeout_s", ["rollout.tools=[{path: a.py:f}]"]),
    (["rollout.eval_function_path=a.py:f"], "rollout.eval_function_path", [HELD_OUT]),
    (["evaluation.eval_interval=2"], "evaluation.eval_interval", [HELD_OUT]),
    ([*SUPERVISED, "rollout.rollout_top_k=3"], "rollout.rollout_top_k", [HELD_OUT]),
    ([*SUPERVISED, "sync.transport=disk"], "sync.transport", [HELD_OUT]),
    ([*SUPERVISED, "engine.quantization=fp8"], "engine.quantization", [HELD_OUT]),
    ([*SUPERVISED, "reward.attempts=2"], "reward.attempts", ["reward.function={type: math}"]),
    ([*SUPERVISED, "train.loss.eps_clip=0.3"], "train.loss.eps_clip", []),
    (["advantage.gamma=0.9"], "advantage.gamma", [RPP]),
    (["advantage.lambd=0.9"], "advantage.lambd", [PPO]),
    (["advantage.discount_masked_tokens=true"], "advantage.discount_masked_tokens", [PPO]),
    (
        [RPP, "advantage.grpo_std_normalization=false"],
        "advantage.grpo_std_normalization",
        ["advantage.advantage_estimator=grpo"],
    ),
    (
        [PPO, "advantage.fan_out_baseline=sample"],
        "advantage.fan_out_baseline",
        ["advantage.advantage_estimator=rloo"],
    ),
    (
        [PPO, "advantage.rewards_normalization=false"],
        "advantage.rewards_normalization",
        ["advantage.advantage_estimator=cispo"],
    ),
    (
        [PPO, "advantage.kl_type=k2"],
        "advantage.kl_type",
        ["advantage.reference=true", "advantage.kl_coef=0.1"],
    ),
    (["advantage.opd_kl_coef=0.5"], "advantage.opd_kl_coef", TEACHER),
    (["teacher.timeout_s=5"], "teacher.timeout_s", TEACHER),
    (
        [*TEACHER, "teacher.opd_teacher_load=/t"],
        "teacher.opd_teacher_load",
        ["teacher.opd_type=megatron"],
    ),
    (["critic.value_clip=0.1"], "critic.value_clip", [PPO]),
    (["critic.optimizer.lr=0.1"], "critic.optimizer.lr", [PPO]),
    (["critic={value_loss_coef: 1.0}"], "critic", [PPO]),
    (
        ["advantage.advantage_estimator=cispo", "train.loss.eps_clip_c=3"],
        "train.loss.eps_clip_c",
        ["train.loss.surrogate=clip"],
    ),
    (["train.loss.opsm_delta=0.1"], "train.loss.opsm_delta", ["train.loss.use_opsm=true"]),
    (["train.loss.kl_loss_type=k2"], "train.loss.kl_loss_type", ["advantage.reference=true"]),
    (
        ["train.loss.use_unbiased_kl=true"],
        "train.loss.use_unbiased_kl",
        ["advantage.reference=true"],
    ),
    (["train.loss.tis_clip=2.0"], "train.loss.tis_clip", ["train.loss.use_tis=true"]),
    (["train.loss.tis_clip_low=0.5"], "train.loss.tis_clip_low", ["train.loss.use_rs=true"]),
    (["train.loss.tis_level=sequence"], "train.loss.tis_level", ["train.loss.use_tis=true"]),
    (["train.loss={tis_mode: icepop}"], "train.loss.tis_mode", ["train.loss.use_tis=true"]),
    (["train.loss.rs_upper_bound=3"], "train.loss.rs_upper_bound", ["train.loss.use_rs=true"]),
    (
        ["train.loss.renormalize_rejected=true"],
        "train.loss.renormalize_rejected",
        ["train.loss.rs_veto_threshold=0.1"],
    ),
    (
        ["train.optimizer.min_lr=1e-8"],
        "train.optimizer.min_lr",
        ["train.optimizer.lr_decay_style=linear"],
    ),
    (["sync.update_weight_disk_dir=/w"], "sync.update_weight_disk_dir", ["sync.transport=disk"]),
    (
        ["sync.update_weight_full_interval=5"],
        "sync.update_weight_full_interval",
        ["sync.transport=delta"],
    ),
    (
        ["sync.probe_samples=0", "sync.max_logprob_difference=1"],
        "sync.max_logprob_difference",
        ["sync.probe_samples=2"],
    ),
    (
        ["resources.external_engines=[127.0.0.1:1]", "resources.rollout_num_gpus=2"],
        "resources.rollout_num_gpus",
        ["resources.external_engines=[]"],
    ),
    (
        ["resources.ray_address=h:1", "resources.exclusive_gpus=false"],
        "resources.exclusive_gpus",
        ["resources.ray_address=null"],
    ),
    (["observe.wandb_project=p"], "observe.wandb_project", ["observe.use_wandb=true"]),
    (
        ["observe.prometheus_host=0.0.0.0"],
        "observe.prometheus_host",
        ["observe.prometheus_port=9000"],
    ),
    (
        ["observe.profile_step_end=3"],
        "observe.profile_step_end",
        ["observe.profile_target=[train_actor]"],
    ),
    (
        ["gates.timeout_s=5"],
        "gates.timeout_s",
        ["gates.bounds=[{metric: train/grad_norm, at_most: 1}]"],
    ),
    (
        ["orchestration.deployment=a/b"],
        "orchestration.deployment",
        ["orchestration.iterations=deployment"],
    ),
    (
        ["orchestration.retries=0", "orchestration.retry_delay_s=1"],
        "orchestration.retry_delay_s",
        ["orchestration.retries=1"],
    ),
]


@pytest.mark.parametrize(("given", "key", "switch"), CASES, ids=[key for _, key, _ in CASES])
def test_a_key_gives_a_warning_until_its_switch_is_on(
    recipe: Path, given: list[str], key: str, switch: list[str]
):
    (warning,) = unused_keys(recipe, given)
    assert warning.startswith(f"{key} (override ")
    assert ") has no effect: it needs " in warning
    if switch:
        assert not any(
            other.startswith(f"{key} ") for other in unused_keys(recipe, [*given, *switch])
        )


def test_the_warning_about_a_users_recipe_has_the_line(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml({**RECIPE, "train": {"loss": {"tis_clip": 3.0}}}))
    (warning,) = unused_keys(path)
    line = path.read_text().splitlines().index("    tis_clip: 3.0") + 1
    assert (
        warning
        == f"train.loss.tis_clip ({path}:{line}) has no effect: it needs train.loss.use_tis: true"
    )


def test_a_dumped_configuration_gives_no_warning(recipe: Path, tmp_path: Path):
    printed = tmp_path / "printed.yaml"
    printed.write_text(dump(load_run(recipe)))
    assert unused_keys(printed) == unused_keys(recipe) == []


@pytest.mark.parametrize("name", recipes())
def test_recipes_of_the_project_and_copies_of_them_give_no_warning(name: str, tmp_path: Path):
    assert unused_keys(name) == []
    copied = tmp_path / f"{name}.yaml"
    copied.write_text(find_recipe(name).read_text())
    assert unused_keys(copied) == []


@pytest.mark.parametrize("name", presets())
def test_presets_give_no_warning(name: str, recipe: Path):
    recipe.write_text(f"preset: {name}\n{recipe.read_text()}")
    assert unused_keys(recipe) == []


def test_flags_of_slime_give_warnings_with_their_keys_and_defaults_do_not():
    words = (
        "--hf-checkpoint /m --prompt-data a.jsonl --num-rollout 4 --rollout-batch-size 2 "
        "--n-samples-per-prompt 4 --rm-type math"
    )
    assert unused_keys(BASE, overrides_of(read_flags(words.split()))) == []
    (warning,) = unused_keys(BASE, overrides_of(read_flags(f"{words} --tis-clip 3".split())))
    assert (
        warning == "train.loss.tis_clip (override train.loss.tis_clip=3.0) has no effect: "
        "it needs train.loss.use_tis: true"
    )


def test_every_key_of_the_table_is_in_the_configuration():
    keys = {key for dependency in DEPENDENCIES for key in dependency.keys}
    assert keys <= set(all_keys())
