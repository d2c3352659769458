"""Find given keys that have no effect because the switch that they depend on is off.

    unused(config, origin)
    ["train.loss.tis_clip (recipe.yaml:7) has no effect: it needs train.loss.use_tis: true"]

One table lists the dependencies. Such a key is a warning and no error: overrides change recipes,
and a file may contain settings of a variant that is off for the moment. A key of a file with its
default value is not reported, so that a dumped configuration loads without warnings. Keys that
contradict each other are errors of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlpipe.config.data import FilePrompts, NoReward
from rlpipe.config.problems import Origin
from rlpipe.config.rollout import GymEnvironment
from rlpipe.config.run import RunConfig

Condition = Callable[[RunConfig], Any]


@dataclass(frozen=True, slots=True)
class Dependency:
    """Keys, the condition of their effect, and the setting that a user needs for it."""

    keys: tuple[str, ...]
    has_effect: Condition
    switch: str


def _needs(keys: str, has_effect: Condition, switch: str) -> Dependency:
    return Dependency(tuple(keys.split()), has_effect, switch)


def _estimator(*names: str) -> Condition:
    """True for one of these estimators, and for a user function, which may read all keys."""
    return lambda c: (
        c.advantage.advantage_estimator in names or c.advantage.custom_advantage_function_path
    )


def _has_policy_loss(c: RunConfig) -> bool:
    """True for a policy loss, and for a user function that replaces it."""
    return c.train.loss.type in ("policy", "custom")


def _has_files(c: RunConfig) -> bool:
    sources = (c.data.prompts, *(dataset.prompts for dataset in c.evaluation.datasets))
    return any(isinstance(source, FilePrompts) for source in sources)


def _samples(c: RunConfig) -> bool:
    return c.rollout.type == "sample" or bool(c.evaluation.datasets)


def _may_leave_groups(c: RunConfig) -> bool:
    """True if a rollout can end with groups for the next one."""
    return c.rollout.type == "sample" and (
        not c.rollout.static or c.rollout.data_source_path is not None
    )


def _uses_tis_bounds(c: RunConfig) -> bool:
    loss = c.train.loss
    return loss.use_tis or (loss.use_rs and None in (loss.rs_lower_bound, loss.rs_upper_bound))


def _rejects(c: RunConfig) -> bool:
    loss = c.train.loss
    return loss.use_rs or loss.rs_veto_threshold is not None or loss.use_tis


def _is_gym(c: RunConfig) -> bool:
    return isinstance(c.rollout.environment, GymEnvironment)


def _has_turns(c: RunConfig) -> bool:
    rollout = c.rollout
    functions = (
        rollout.custom_generate_function_path,
        rollout.rollout_function_path,
        rollout.eval_function_path,
    )
    return bool(rollout.tools or _is_gym(c)) or any(functions)


DEPENDENCIES: tuple[Dependency, ...] = (
    # data and rollouts
    _needs(
        "data.apply_chat_template_kwargs",
        lambda c: c.data.apply_chat_template,
        "data.apply_chat_template: true",
    ),
    _needs("data.num_data_workers data.streaming_data", _has_files, "prompts of type file"),
    _needs(
        """
        rollout.rollout_top_p rollout.rollout_top_k rollout.rollout_stop
        rollout.rollout_stop_token_ids rollout.rollout_min_new_tokens rollout.tools
        rollout.custom_generate_function_path rollout.environment
        rollout.rollout_sample_hook_path
        """,
        _samples,
        "rollout.type: sample, or held-out sets",
    ),
    _needs(
        """
        rollout.over_sampling_batch_size rollout.dynamic_sampling_filter_path
        rollout.rollout_sample_filter_path rollout.rollout_all_samples_process_path
        """,
        lambda c: c.rollout.type == "sample",
        "rollout.type: sample",
    ),
    _needs(
        "rollout.partial_rollout rollout.buffer_filter_path rollout.max_sampling_rounds",
        _may_leave_groups,
        "rollout.over_sampling_batch_size above rollout_batch_size, or a filter or rollout "
        "function",
    ),
    _needs(
        "rollout.partial_rollout",
        lambda c: (
            c.async_buffer_size
            or c.rollout.mask_offpolicy_in_partial_rollout
            or c.rollout.rollout_function_path is not None
        ),
        "rollout.mask_offpolicy_in_partial_rollout: true or async_buffer_size above 0; otherwise "
        "every group starts again",
    ),
    _needs("rollout.partial_rollout", lambda c: not c.rollout.pooled, "rollout.selection: planned"),
    _needs(
        "rollout.mask_offpolicy_in_partial_rollout",
        lambda c: _may_leave_groups(c) or c.async_buffer_size,
        "rollout.partial_rollout or async_buffer_size",
    ),
    _needs(
        "rollout.loss_mask_type", lambda c: c.rollout.type == "dataset", "rollout.type: dataset"
    ),
    _needs(
        "rollout.max_turns",
        _has_turns,
        "rollout.tools, rollout.environment of type gym, or a function that samples",
    ),
    _needs(
        "rollout.max_turn_tokens",
        lambda c: c.rollout.tools or _is_gym(c),
        "rollout.tools, or rollout.environment of type gym",
    ),
    _needs(
        "rollout.tool_call_format rollout.tool_timeout_s rollout.max_tool_response_len",
        lambda c: c.rollout.tools,
        "rollout.tools",
    ),
    _needs("rollout.eval_function_path", lambda c: c.evaluation.datasets, "evaluation.datasets"),
    _needs(
        """
        reward.on_error reward.max_error_fraction reward.custom_reward_post_process_path
        reward.workers reward.attempts reward.sample_timeout_s reward.timeout_s
        """,
        lambda c: not isinstance(c.reward.function, NoReward),
        "a reward.function with a type other than none",
    ),
    # advantages
    _needs(
        "advantage.rewards_normalization",
        _estimator("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"),
        "advantage.advantage_estimator: grpo, gspo, cispo or reinforce_plus_plus_baseline",
    ),
    _needs(
        "advantage.grpo_std_normalization",
        _estimator("grpo", "gspo", "cispo"),
        "advantage.advantage_estimator: grpo, gspo or cispo",
    ),
    _needs(
        "advantage.fan_out_baseline",
        _estimator("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"),
        "an advantage.advantage_estimator with a group baseline",
    ),
    _needs(
        "advantage.gamma advantage.discount_masked_tokens",
        _estimator("reinforce_plus_plus", "ppo"),
        "advantage.advantage_estimator: reinforce_plus_plus or ppo",
    ),
    _needs("advantage.lambd", _estimator("ppo"), "advantage.advantage_estimator: ppo"),
    _needs(
        "advantage.kl_type",
        lambda c: (
            c.advantage.kl_coef
            or (c.advantage.reference and c.advantage.custom_advantage_function_path)
        ),
        "advantage.kl_coef above 0",
    ),
    _needs(
        """
        advantage.rollout_data_postprocess_path
        advantage.custom_convert_samples_to_train_data_path
        """,
        lambda c: c.advantage.advantage_estimator != "none",
        "an advantage.advantage_estimator other than none",
    ),
    _needs(
        "advantage.normalize_advantages",
        lambda c: (
            c.advantage.advantage_estimator != "none" or c.advantage.custom_advantage_function_path
        ),
        "an advantage.advantage_estimator other than none",
    ),
    _needs(
        "advantage.opd_kl_coef teacher", lambda c: c.advantage.use_opd, "advantage.use_opd: true"
    ),
    _needs(
        "teacher.url teacher.timeout_s teacher.other_temperature",
        lambda c: c.teacher.opd_type == "sglang",
        "teacher.opd_type: sglang",
    ),
    _needs(
        "teacher.opd_teacher_load teacher.opd_teacher_ckpt_step",
        lambda c: c.teacher.opd_type == "megatron",
        "teacher.opd_type: megatron",
    ),
    _needs("critic", lambda c: c.uses_critic, "advantage.advantage_estimator: ppo"),
    # the loss
    _needs(
        """
        train.loss.surrogate train.loss.eps_clip train.loss.eps_clip_high
        train.loss.eps_clip_c train.loss.use_opsm train.loss.use_rollout_logprobs
        train.loss.kl_loss_coef train.loss.custom_pg_loss_reducer_function_path
        """,
        _has_policy_loss,
        "train.loss.type: policy",
    ),
    _needs("train.loss.dpo", lambda c: c.train.loss.type == "dpo", "train.loss.type: dpo"),
    _needs(
        "train.loss.center_rewards_coefficient",
        lambda c: c.train.loss.type == "reward_model",
        "train.loss.type: reward_model",
    ),
    _needs(
        "train.loss.eps_clip_c",
        lambda c: c.train.loss.surrogate != "cispo",
        "a train.loss.surrogate other than cispo",
    ),
    _needs("train.loss.opsm_delta", lambda c: c.train.loss.use_opsm, "train.loss.use_opsm: true"),
    _needs(
        "train.loss.kl_loss_type train.loss.use_unbiased_kl",
        lambda c: c.advantage.reference and _has_policy_loss(c),
        "advantage.reference: true (and train.loss.kl_loss_coef above 0 to train on it)",
    ),
    _needs(
        "train.loss.tis_clip train.loss.tis_clip_low", _uses_tis_bounds, "train.loss.use_tis: true"
    ),
    _needs(
        "train.loss.tis_level train.loss.tis_mode train.loss.tis_batch_normalize",
        lambda c: c.train.loss.use_tis,
        "train.loss.use_tis: true",
    ),
    _needs(
        "train.loss.rs_level train.loss.rs_lower_bound train.loss.rs_upper_bound",
        lambda c: c.train.loss.use_rs,
        "train.loss.use_rs: true",
    ),
    _needs(
        "train.loss.renormalize_rejected",
        _rejects,
        "train.loss.use_rs, rs_veto_threshold or use_tis",
    ),
    _needs(
        "train.optimizer.min_lr train.optimizer.lr_decay_steps",
        lambda c: c.train.optimizer.lr_decay_style != "constant",
        "train.optimizer.lr_decay_style: linear or cosine",
    ),
    # pushes
    _needs(
        """
        sync.update_weight_disk_dir sync.update_weight_disk_keep_files
        sync.update_weight_local_checkpoint_dir sync.custom_update_weight_post_write_path
        """,
        lambda c: c.sync.through_files,
        "sync.transport: disk or delta",
    ),
    _needs(
        "sync.custom_pull_weights_pre_read_path",
        lambda c: (
            c.sync.transport == "delta"
            or (c.sync.through_files and c.sync.update_weight_local_checkpoint_dir)
        ),
        "sync.transport: delta, or disk with sync.update_weight_local_checkpoint_dir",
    ),
    _needs(
        """
        sync.update_weight_delta_encoding sync.update_weight_delta_checksum
        sync.update_weight_full_interval
        """,
        lambda c: c.sync.transport == "delta",
        "sync.transport: delta",
    ),
    _needs(
        "sync.max_logprob_difference", lambda c: c.sync.probe_samples, "sync.probe_samples above 0"
    ),
    _needs(
        """
        sync engine resources.rollout_num_gpus resources.rollout_num_gpus_per_engine
        resources.external_engines resources.colocate
        """,
        lambda c: c.needs_engines,
        "engines, which only rollout.type: sample or held-out sets need",
    ),
    _needs(
        "resources.rollout_num_gpus",
        lambda c: not c.resources.external_engines,
        "engines that the run starts, without resources.external_engines",
    ),
    _needs(
        "resources.exclusive_gpus",
        lambda c: c.resources.ray_address is None,
        "a local Ray (no resources.ray_address)",
    ),
    # observation and orchestration
    _needs(
        "evaluation.eval_interval evaluation.skip_eval_before_train",
        lambda c: c.evaluation.datasets,
        "evaluation.datasets",
    ),
    _needs(
        """
        observe.wandb_mode observe.wandb_project observe.wandb_team observe.wandb_group
        observe.wandb_run_id observe.wandb_dir observe.wandb_host
        """,
        lambda c: c.observe.use_wandb,
        "observe.use_wandb: true",
    ),
    _needs(
        "observe.prometheus_host", lambda c: c.observe.prometheus_port, "observe.prometheus_port"
    ),
    _needs(
        "observe.profile_step_start observe.profile_step_end observe.profile_ranks",
        lambda c: c.observe.profile_target or c.observe.record_memory_history,
        "observe.profile_target or observe.record_memory_history",
    ),
    _needs("gates.timeout_s gates.poll_s", lambda c: c.gates.bounds, "gates.bounds"),
    _needs(
        "orchestration.deployment",
        lambda c: c.orchestration.iterations == "deployment",
        "orchestration.iterations: deployment",
    ),
    _needs(
        "orchestration.retry_delay_s",
        lambda c: c.orchestration.retries,
        "orchestration.retries above 0",
    ),
)


def unused(config: RunConfig, origin: Origin) -> list[str]:
    """Return one sentence for each given key without effect."""
    switches: dict[str, str] = {}
    for dependency in DEPENDENCIES:
        if dependency.has_effect(config):
            continue
        for key in dependency.keys:
            for given in _given_keys(key, config, origin):
                switches.setdefault(given, dependency.switch)
    return [
        f"{key} ({origin.of(key)}) has no effect: it needs {switch}"
        for key, switch in switches.items()
    ]


def _given_keys(key: str, config: RunConfig, origin: Origin) -> Iterator[str]:
    """Yield the given keys at or below `key`.

    A key is given by an override, or by a file with a value other than its default.
    """
    below = f"{key}."
    for given in origin.overrides:
        if given == key or given.startswith(below):
            yield given
        elif key.startswith(f"{given}.") and not _is_default(key, config):
            yield key  # the override sets a whole section
    for given in origin.lines:
        if (given == key or given.startswith(below)) and not _is_default(given, config):
            yield given


def _is_default(key: str, config: RunConfig) -> bool:
    """True for the default value of a field, and for a section (its keys are reported instead)."""
    *parents, name = key.split(".")
    model: Any = config
    for parent in parents:
        model = getattr(model, parent, None)
    if not isinstance(model, BaseModel) or name not in type(model).model_fields:
        return True
    value = getattr(model, name)
    return isinstance(value, BaseModel) or value == type(model).model_fields[name].get_default(
        call_default_factory=True
    )
