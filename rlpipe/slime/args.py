"""slime's names for rlpipe's configuration: the table of flags, and `args` for user functions.

    FLAGS["lr"].key                             "train.optimizer.lr"
    slime_args(config).rollout_batch_size       config.rollout.rollout_batch_size

`flag_table` and `megatron_flags` have the rows. A flag of a key that this version does not have is
refused (`absent`).
"""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from rlpipe.config.arguments import names
from rlpipe.config.data import FilePrompts, PythonReward, RowReward
from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.run import RunConfig
from rlpipe.config.similar_keys import all_keys
from rlpipe.slime.flag import Flag
from rlpipe.slime.flag_table import SLIME
from rlpipe.slime.megatron_flags import MEGATRON

FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*SLIME, *MEGATRON)}
FREE = ("train.megatron.", "engine.sglang.", "engine.router.")
"""Sections with arguments under their own names."""
WEIGHT_UPDATES = {"disk": ("full", "disk"), "delta": ("delta", "disk")}
"""sync.transport → slime's mode and transport of weight updates; others are slime's default."""
LOSS_TYPES = {"policy_loss": "policy", "sft_loss": "sft", "custom_loss": "custom"}
"""slime's --loss-type → train.loss.type."""
EVALUATION_KEYS = {
    "eval_temperature": "temperature",
    "eval_top_p": "top_p",
    "eval_top_k": "top_k",
    "eval_max_response_len": "max_response_len",
    "eval_max_prompt_len": "max_prompt_len",
    "eval_max_context_len": "max_context_len",
    "eval_min_new_tokens": "min_new_tokens",
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
}
"""slime's attribute of all held-out sets → key of one held-out set."""


def absent(flag: Flag) -> bool:
    """True if the flag sets a key that this version does not have."""
    return (
        flag.effect in ("to", "built")
        and not flag.key.startswith(FREE)
        and flag.key not in _config_keys()
    )


@cache
def _config_keys() -> frozenset[str]:
    return frozenset(all_keys())


def slime_args(config: RunConfig, *, router: str | None = None) -> Namespace:
    """Return the configuration as slime's `args`.

    `args` has an attribute for every flag of the table and for every argument of Megatron's classes
    and SGLang's. Its value is the run's key if one exists, else the value of the command line, else
    slime's default. Entries of `rollout.custom_config` are attributes too, and win.

    `router`: URL of the run's router, for `sglang_router_ip` and `sglang_router_port`.
    """
    values = _passed_through(config)
    values |= {flag.attribute: _value(config, flag) for flag in FLAGS.values()}
    values |= _derived(config) | _reward(config) | _evaluation(config)
    if router is not None:
        address = urlsplit(router if "//" in router else f"//{router}")
        values |= {"sglang_router_ip": address.hostname, "sglang_router_port": address.port}
    return Namespace(**{**values, **getattr(config.rollout, "custom_config", {})})


def _passed_through(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of Megatron's classes, SGLang and its router, with their defaults."""
    values: dict[str, Any] = {}
    for table, prefix in (("megatron", ""), ("sglang", "sglang_"), ("router", "router_")):
        for arguments in names.load(table)["receivers"].values():
            defaults = {
                name: entry["default"]
                for name, entry in arguments.items()
                if names.OBJECT not in entry["type"]
            }
            values |= {f"{prefix}{name}": defaults.get(name) for name in arguments}
    values |= config.train.megatron
    values |= {f"sglang_{name}": value for name, value in config.engine.sglang.items()}
    return values | {f"router_{name}": value for name, value in config.engine.router.items()}


def _value(config: RunConfig, flag: Flag) -> Any:
    """Return the value of the flag's key, or of the flag itself if it has no key."""
    if flag.effect != "to":
        return config.flags.get(flag.name, flag.default)
    missing = None if flag.key in _config_keys() else flag.default
    value: Any = config
    for name in flag.key.split("."):
        value = (
            value.get(name, missing) if isinstance(value, dict) else getattr(value, name, missing)
        )
    if isinstance(value, tuple):
        return list(value) or flag.default
    return value


def _derived(config: RunConfig) -> dict[str, Any]:
    """Return attributes that are not the value of one key."""
    source = config.model.source
    prompts = config.data.prompts
    model = source.hf_checkpoint if isinstance(source, HuggingFaceModel) else None
    paths = list(prompts.paths) if isinstance(prompts, FilePrompts) else []
    loss = config.train.loss
    rollout = config.rollout
    critic = config.critic.resolved_optimizer(config.train.optimizer)
    mode, transport = WEIGHT_UPDATES.get(config.sync.transport, ("full", "nccl"))
    function = rollout.rollout_function_path or FLAGS["rollout_function_path"].default
    return {
        "rollout_function_path": function,
        "eval_function_path": rollout.eval_function_path or function,
        "data_source_path": rollout.data_source_path or FLAGS["data_source_path"].default,
        "micro_batch_size": config.train.micro_batch_size
        or config.flags.get("micro_batch_size", 1),
        "update_weight_mode": mode,
        "update_weight_transport": transport,
        "hf_checkpoint": model,
        "ref_load": config.reference.ref_load or model,
        "load": config.flags.get("load", config.store.root),
        "num_rollout": config.start_rollout_id + config.num_rollout,
        "start_rollout_id": config.start_rollout_id,
        "save": config.flags.get("save", config.store.root),
        "critic_load": config.critic.megatron_checkpoint
        or config.critic.hf_checkpoint
        or config.flags.get("critic_load"),
        "critic_save": config.flags.get("critic_save", config.store.root),
        "critic_lr": critic.lr,
        "critic_lr_warmup_iters": critic.lr_warmup_steps,
        "seed": config.seed,
        "prompt_data": paths[0] if len(paths) == 1 else paths or None,
        "rollout_num_gpus": config.resources.rollout_num_gpus,
        "colocate": config.resources.shares_gpus,
        "offload": config.resources.trainer_sleeps and config.resources.engines_sleep,
        "offload_train": config.resources.trainer_sleeps,
        "offload_rollout": config.resources.engines_sleep,
        "sglang_tp_size": config.resources.rollout_num_gpus_per_engine,
        "over_sampling_batch_size": rollout.groups_per_round,
        "rollout_skip_special_tokens": rollout.functions_skip_special_tokens,
        "global_batch_size": config.train.global_batch_size or config.samples_per_iteration,
        "num_steps_per_rollout": config.num_steps_per_rollout,
        "eps_clip_high": loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high,
        "loss_type": {ours: theirs for theirs, ours in LOSS_TYPES.items()}.get(
            loss.type, f"{loss.type}_loss"
        ),
        "use_kl_loss": bool(loss.kl_loss_coef) or config.flags.get("use_kl_loss", False),
        "kl_loss_coef": loss.kl_loss_coef,
        "bf16": config.model.dtype == "bfloat16",
        "compute_advantages_and_returns": config.advantage.advantage_estimator != "none",
    }


def _reward(config: RunConfig) -> dict[str, Any]:
    """Return slime's attributes of the reward."""
    function = config.reward.function
    is_python = isinstance(function, PythonReward)
    kind = function.default if isinstance(function, RowReward) else function.type
    reward_key = getattr(function, "reward_key", None) or config.flags.get("reward_key")
    return {
        "rm_type": {"remote": "remote_rm", "python": None, "none": None}.get(kind or "", kind),
        "rm_url": getattr(function, "url", None)
        or config.flags.get("rm_url")
        or (config.teacher.url and f"{config.teacher.url.rstrip('/')}/generate"),
        "custom_rm_path": function.path if is_python else None,
        "group_rm": (is_python and function.group) or config.flags.get("group_rm", False),
        "reward_key": reward_key,
        "eval_reward_key": config.flags.get("eval_reward_key", reward_key),
        "custom_reward_post_process_path": config.reward.custom_reward_post_process_path,
    }


def _evaluation(config: RunConfig) -> dict[str, Any]:
    """Return slime's attributes of evaluations.

    slime has one value for all held-out sets: the value of the first set.
    """
    datasets = config.evaluation.datasets
    if not datasets:
        return {}
    first = datasets[0]
    pairs = [
        text
        for dataset in datasets
        if isinstance(dataset.prompts, FilePrompts)
        for path in dataset.prompts.paths
        for text in (dataset.name, path)
    ]
    return {
        "eval_prompt_data": pairs or None,
        **{name: getattr(first, key, None) for name, key in EVALUATION_KEYS.items()},
    }
