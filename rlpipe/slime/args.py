"""slime's names for our configuration: the table of its flags, and `args` as its custom functions
expect it.

    FLAGS["lr"].key                             "train.optimizer.lr"
    slime_args(config).rollout_batch_size       config.rollout.rollout_batch_size

A flag whose key is not in this version's configuration is refused like those that say so themselves
(`absent`).

Not here: the rows (`slime_table`, `slime_megatron`), reading a command line (`flags`).
"""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from rlpipe.config.arguments import names
from rlpipe.config.data import FilePrompts, PythonReward, RowReward
from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.problems import all_keys
from rlpipe.config.run import RunConfig
from rlpipe.slime.flag import Flag
from rlpipe.slime.flag_table import SLIME
from rlpipe.slime.megatron import MEGATRON

FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*SLIME, *MEGATRON)}
FREE = ("train.megatron.", "engine.sglang.", "engine.router.")
TRANSPORTS = {"disk": ("full", "disk"), "delta": ("delta", "disk")}
"""Ours → slime's mode and transport of weight updates; the others are its default."""
LOSS_TYPES = {"policy_loss": "policy", "sft_loss": "sft", "custom_loss": "custom"}
"""slime's names of the loss → ours."""


def absent(flag: Flag) -> bool:
    """Does the flag set a key that this version's configuration has not?"""
    return (
        flag.verdict in ("to", "built")
        and not flag.key.startswith(FREE)
        and flag.key not in _keys()
    )


@cache
def _keys() -> frozenset[str]:
    return frozenset(all_keys())


def slime_args(config: RunConfig, *, router: str | None = None) -> Namespace:
    """The configuration as slime's `args`: an attribute for every flag of the table, of Megatron's
    classes and of SGLang's.

    An attribute is what the run does, where a key of ours says so; else what the command line gave;
    else slime's default. `router` is the URL of the run's router, for `sglang_router_ip` and
    `sglang_router_port`; entries of `rollout.custom_config` are attributes too, and win.
    """
    values = _passed_through(config)
    values |= {flag.attribute: _value(config, flag) for flag in FLAGS.values()}
    values |= _derived(config) | _rewarded(config) | _evaluated(config)
    if router is not None:
        address = urlsplit(router if "//" in router else f"//{router}")
        values |= {"sglang_router_ip": address.hostname, "sglang_router_port": address.port}
    return Namespace(**{**values, **getattr(config.rollout, "custom_config", {})})


def _passed_through(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for table, prefix in (("megatron", ""), ("sglang", "sglang_"), ("router", "router_")):
        for arguments in names.load(table)["receivers"].values():
            held = {
                name: entry["default"]
                for name, entry in arguments.items()
                if names.OBJECT not in entry["type"]
            }
            values |= {f"{prefix}{name}": held.get(name) for name in arguments}
    given = {f"sglang_{name}": value for name, value in config.engine.sglang.items()}
    given |= {f"router_{name}": value for name, value in config.engine.router.items()}
    return {**values, **config.train.megatron, **given}


def _value(config: RunConfig, flag: Flag) -> Any:
    """The value of the flag's key, or of the flag itself where it has no key of its own."""
    if flag.verdict != "to":
        return config.flags.get(flag.name, flag.default)
    missing = None if flag.key in _keys() else flag.default
    found: Any = config
    for name in flag.key.split("."):
        found = (
            found.get(name, missing) if isinstance(found, dict) else getattr(found, name, missing)
        )
    if isinstance(found, tuple):
        return list(found) or flag.default
    return found


def _derived(config: RunConfig) -> dict[str, Any]:
    """Attributes that are not one key's value."""
    source = config.model.source
    prompts = config.data.prompts
    model = source.hf_checkpoint if isinstance(source, HuggingFaceModel) else None
    paths = list(prompts.paths) if isinstance(prompts, FilePrompts) else []
    loss = config.train.loss
    rollout = config.rollout
    critic = config.critic.optimizer_beside(config.train.optimizer)
    mode, transport = TRANSPORTS.get(config.sync.transport, ("full", "nccl"))
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
        "ref_load": model,
        "load": config.flags.get("load", config.store.root),
        "save": config.store.root,
        "critic_load": config.critic.hf_checkpoint or config.flags.get("critic_load"),
        "critic_save": config.flags.get("critic_save", config.store.root),
        "critic_lr": critic.lr,
        "critic_lr_warmup_iters": critic.lr_warmup_steps,
        "seed": config.seed,
        "prompt_data": paths[0] if len(paths) == 1 else paths or None,
        "rollout_num_gpus": config.resources.rollout_num_gpus,
        "offload": config.resources.trainer_sleeps and config.resources.engines_sleep,
        "offload_train": config.resources.trainer_sleeps,
        "offload_rollout": config.resources.engines_sleep,
        "sglang_tp_size": config.resources.rollout_num_gpus_per_engine,
        "over_sampling_batch_size": rollout.groups_per_round,
        "rollout_skip_special_tokens": rollout.functions_skip_special_tokens,
        "global_batch_size": config.train.global_batch_size or config.samples_per_iteration,
        "num_steps_per_rollout": config.num_steps_per_rollout,
        "eps_clip_high": loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high,
        "loss_type": {ours: theirs for theirs, ours in LOSS_TYPES.items()}[loss.type],
        "use_kl_loss": bool(loss.kl_loss_coef) or config.flags.get("use_kl_loss", False),
        "kl_loss_coef": loss.kl_loss_coef,
        "bf16": config.model.dtype == "bfloat16",
        "compute_advantages_and_returns": config.advantage.advantage_estimator != "none",
    }


def _rewarded(config: RunConfig) -> dict[str, Any]:
    function = config.reward.function
    ours = isinstance(function, PythonReward)
    kind = function.default if isinstance(function, RowReward) else function.type
    reward_key = getattr(function, "reward_key", None) or config.flags.get("reward_key")
    return {
        "rm_type": {"remote": "remote_rm", "python": None, "none": None}.get(kind or "", kind),
        "rm_url": getattr(function, "url", None)
        or config.teacher.url
        or config.flags.get("rm_url"),
        "custom_rm_path": function.path if ours else None,
        "group_rm": (ours and function.group) or config.flags.get("group_rm", False),
        "reward_key": reward_key,
        "eval_reward_key": config.flags.get("eval_reward_key", reward_key),
        "custom_reward_post_process_path": config.reward.custom_reward_post_process_path,
    }


def _evaluated(config: RunConfig) -> dict[str, Any]:
    """The held-out sets' settings: those of the first one, where slime has one for all."""
    datasets = config.evaluation.datasets
    if not datasets:
        return {}
    first = datasets[0]
    names = {
        "eval_temperature": "temperature",
        "eval_top_p": "top_p",
        "eval_top_k": "top_k",
        "eval_max_response_len": "max_response_len",
        "eval_max_prompt_len": "max_prompt_len",
        "eval_max_context_len": "max_context_len",
        "eval_min_new_tokens": "min_new_tokens",
        "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    }
    pairs = [
        text
        for one in datasets
        if isinstance(one.prompts, FilePrompts)
        for path in one.prompts.paths
        for text in (one.name, path)
    ]
    return {
        "eval_prompt_data": pairs or None,
        **{name: getattr(first, key, None) for name, key in names.items()},
    }
