"""Find the keys that a user may have meant by an unknown key.

similar_keys(name, ...)    keys that another framework calls so, similar keys, misplaced keys
nearest(name, names)       the most similar names
all_keys()                 every dotted key of a configuration
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from rlpipe.config.introduced import models_in
from rlpipe.config.run import RunConfig

_OPTIMIZER = "train.optimizer"
_PARALLEL = "train.parallel"
ALIASES = {
    # Optimizer.
    "lr learning_rate actor_learning_rate policy_lr": f"{_OPTIMIZER}.lr",
    "critic_learning_rate critic_lr": "critic.lr",
    "min_learning_rate lr_min": f"{_OPTIMIZER}.min_lr",
    "lr_scheduler lr_scheduler_type scheduler warmup_style": f"{_OPTIMIZER}.lr_decay_style",
    "warmup_steps num_warmup_steps lr_warmup": f"{_OPTIMIZER}.lr_warmup_steps",
    "max_grad_norm grad_clip gradient_clipping grad_norm": f"{_OPTIMIZER}.clip_grad",
    "wd l2": f"{_OPTIMIZER}.weight_decay",
    "beta1": f"{_OPTIMIZER}.adam_beta1",
    "beta2": f"{_OPTIMIZER}.adam_beta2",
    "adam_epsilon": f"{_OPTIMIZER}.adam_eps",
    # Length of the run.
    "steps max_steps num_steps total_steps iterations num_iterations total_training_steps "
    "max_num_steps epochs num_epoch num_epochs max_epochs total_epochs num_train_epochs "
    "num_episodes": "num_rollout",
    # Batches.
    "batch_size train_batch_size prompts_per_step num_prompts_per_step groups_per_batch "
    "prompt_batch_size": "rollout.rollout_batch_size train.global_batch_size",
    "mini_batch_size ppo_mini_batch_size train_global_batch_size": "train.global_batch_size",
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size "
    "per_device_train_batch_size micro_batch": "train.micro_batch_size",
    "updates_per_step ppo_epochs num_updates": "train.num_steps_per_rollout",
    "ppo_max_token_len_per_gpu max_token_len_per_gpu seq_len max_total_sequence_length": (
        "train.max_tokens_per_gpu"
    ),
    "n group_size num_generations num_generations_per_prompt rollouts_per_example "
    "samples_per_prompt num_samples": "rollout.n_samples_per_prompt",
    # Sampling.
    "temperature temp sampling_temperature": "rollout.rollout_temperature",
    "top_p": "rollout.rollout_top_p",
    "top_k": "rollout.rollout_top_k",
    "max_tokens max_new_tokens max_completion_length max_response_length max_response_len "
    "generate_max_len response_length": "rollout.rollout_max_response_len",
    "max_prompt_length max_prompt_len prompt_max_len": "data.rollout_max_prompt_len",
    "max_model_len max_context_len max_seq_len max_length": "rollout.rollout_max_context_len",
    "stop stop_strings": "rollout.rollout_stop",
    "stop_token_ids": "rollout.rollout_stop_token_ids",
    "max_async_level staleness max_staleness off_policy_steps": "async_buffer_size",
    # Loss and advantages.
    "kl beta kl_beta kl_loss kl_penalty_coef init_kl_coef reference_policy_kl_penalty": (
        "train.loss.kl_loss_coef advantage.kl_coef"
    ),
    "kl_coef": "advantage.kl_coef train.loss.kl_loss_coef",
    "clip epsilon clip_ratio clip_ratio_low cliprange ratio_clip_min eps": "train.loss.eps_clip",
    "epsilon_high clip_ratio_high ratio_clip_max": "train.loss.eps_clip_high",
    "clip_ratio_c": "train.loss.eps_clip_c",
    "entropy entropy_coeff ent_coef entropy_loss_coef": "train.loss.entropy_coef",
    "loss_type policy_loss": "train.loss.type",
    "algorithm algo adv_estimator estimator": "advantage.advantage_estimator",
    "gae_lambda lam lambda": "advantage.lambd",
    "discount": "advantage.gamma",
    "scale_rewards norm_adv_by_std_in_grpo": "advantage.grpo_std_normalization",
    # Model, data, reward.
    "model_name model_name_or_path model_path pretrain hf_model": "model.source.hf_checkpoint",
    "lora_rank lora_r r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "bf16 fp16 precision torch_dtype": "model.dtype",
    "dataset dataset_name train_file train_files train_data prompt_data": "data.prompts.paths",
    "prompt_key prompt_column": "data.prompts.input_key",
    "answer_key answer_column label_column": "data.prompts.label_key",
    "chat_template": "data.apply_chat_template",
    "reward_fn reward_func reward_funcs reward_function rm_type custom_rm_path": "reward.function",
    "reward_path reward_fn_path": "reward.function.path",
    "shuffle": "data.rollout_shuffle",
    "random_seed": "seed",
    "val_files eval_data eval_dataset test_files": "evaluation.datasets",
    # Resources, output.
    "tp tp_size tensor_parallel_size": f"{_PARALLEL}.tensor_model_parallel_size",
    "pp pp_size pipeline_parallel_size": f"{_PARALLEL}.pipeline_model_parallel_size",
    "cp cp_size": f"{_PARALLEL}.context_parallel_size",
    "ep ep_size expert_parallel_size": f"{_PARALLEL}.expert_model_parallel_size",
    "num_gpus n_gpus gpus n_gpus_per_node gpus_per_node": (
        "resources.actor_num_gpus_per_node resources.rollout_num_gpus"
    ),
    "nnodes num_nodes nodes": "resources.actor_num_nodes",
    "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static": "engine.sglang",
    "eval_steps eval_freq test_freq val_period eval_every": "evaluation.eval_interval",
    "val_before_train eval_before_train": "evaluation.skip_eval_before_train",
    "save_steps save_freq save_every": "checkpoint.save_interval",
    "save_total_limit max_ckpt_to_keep": "checkpoint.keep_local",
    "output_dir save_path ckpt_path default_local_dir save": "store.root",
    "name run_name experiment_name exp_name": "run",
    "wandb report_to logger": "observe.use_wandb",
    "project project_name wandb_project_name": "observe.wandb_project",
    "tensorboard_dir": "observe.tensorboard",
}
"""Names that TRL, verl, OpenRLHF, NeMo-RL, prime-rl and others use → keys, the likeliest first."""
_KEYS_OF_ALIAS = {
    alias: tuple(keys.split()) for names, keys in ALIASES.items() for alias in names.split()
}


def nearest(name: str, names: Iterable[str], at_most: int = 3) -> list[str]:
    """Return the names that are most similar to `name`, best first; may be empty."""
    return difflib.get_close_matches(name, list(names), n=at_most, cutoff=0.6)


def similar_keys(name: str, model: type[BaseModel] | None, section: str) -> list[str]:
    """Return the keys that `name` in a section may mean, the likeliest first.

    First keys that other frameworks call so, then similar keys of the section, then keys of this
    name in other sections. `section`: dotted key of `model`.
    """
    if model is None:
        return []
    # A key in the wrong section is as common as a typing error.
    prefix = f"{section}." if section else ""
    aliased = _KEYS_OF_ALIAS.get(name.lower().replace("-", "_"), ())
    last = [key.rpartition(".")[2] for key in aliased]
    # The same setting of this section, such as `critic.lr`.
    own = [
        prefix + word
        for word in (*last, *(text.removeprefix("rollout_") for text in last))
        if word in model.model_fields
    ]
    siblings = [prefix + sibling for sibling in nearest(name, model.model_fields)]
    # Variants of a section share keys, which `all_keys` yields once for each.
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == name]
    found = list(dict.fromkeys([*own, *aliased, *siblings, *elsewhere]))
    return found[:4] or [f"one of {', '.join(model.model_fields)}"]


def all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration model, parents before children."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in models_in(info.annotation):
            if inner is not model:
                yield from all_keys(inner, f"{prefix}{name}.")
