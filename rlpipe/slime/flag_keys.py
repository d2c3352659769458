"""Convert slime's flags to configuration keys.

    keys_of(flags)         dotted key → value
    overrides_of(flags)    the same as `dotted.key=value`
    differences(flags)     flags with another result than in slime

Each converter in `_CONVERTERS` handles flags that together make a key or have values of other
names. A flag that is not given changes nothing: the recipe decides (`slime.yaml` without a recipe).
`evaluation_flags` and `reward_flags` convert held-out sets and rewards. `tools.train` counts
prompts for `--num-epoch`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS, LOSS_TYPES
from rlpipe.slime.command_line import ParsedFlags
from rlpipe.slime.differences import fixed_differences, scores_at_two_temperatures
from rlpipe.slime.evaluation_flags import datasets
from rlpipe.slime.function_paths import (
    FULLY_ASYNC,
    SFT_ROLLOUT,
    SLIME_FUNCTIONS,
    has_rollout_function,
    is_default_function,
)
from rlpipe.slime.model_flags import iterations_done, model_source, prediction_layers
from rlpipe.slime.reward_flags import DISTILLATION, reward_function
from rlpipe.slime.saved_state import other_prompts, prompt_position
from rlpipe.slime.server_groups import engine_layout, layout_difference
from rlpipe.system.megatron_weights import is_megatron_checkpoint

BASE = Path(__file__).with_name("slime.yaml")
"""Recipe of a command line without a recipe."""
Values = Mapping[str, Any]
Keys = dict[str, Any]

QWEN_MASKS = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
"""slime's loss mask types that train on all assistant messages."""


CRITIC_FLAGS = {
    "lr": "critic_lr",
    "lr_warmup_iters": "critic_lr_warmup_iters",
    "load": "critic_load",
    "save": "critic_save",
}
"""Name in the critic's part of `--megatron-config-path` → flag."""


STORE_OF_SLIMES_FOLDER = "rlpipe"
"""Folder of the store if --save has a checkpoint of slime."""


def keys_of(flags: ParsedFlags) -> Keys:
    """Return dotted key → value of a command line.

    Raises: ConfigError for flags that contradict each other.
    """
    values, custom = _with_files(flags.own)
    keys = _direct_keys(values)
    for convert in _CONVERTERS:
        keys |= convert(values)
    keys |= _continued_prompts(flags, values)
    if done := iterations_done(values):
        keys["start_rollout_id"] = done
    if "rollout_function_path" in values:
        keys |= _rollout_function(values)
    if (function := reward_function(values)) is not None and "reward.function" not in keys:
        keys["reward.function"] = function
    path = values.get("custom_reward_post_process_path")
    if convert := values.get("custom_convert_samples_to_train_data_path"):
        # In slime the function replaces the normalization and the post-processing of rewards.
        keys |= {
            "advantage.custom_convert_samples_to_train_data_path": convert,
            "advantage.rewards_normalization": False,
        }
    elif path and path != f"{DISTILLATION}.post_process_rewards":
        # In slime the function replaces the normalization of rewards.
        keys |= {
            "reward.custom_reward_post_process_path": path,
            "advantage.rewards_normalization": False,
        }
    if (held_out := datasets(values)) is not None:
        keys["evaluation.datasets"] = held_out
    if custom:
        keys["rollout.custom_config"] = custom
    keys |= {f"train.megatron.{name}": value for name, value in flags.megatron.items()}
    keys |= {f"engine.sglang.{name}": value for name, value in flags.sglang.items()}
    return keys | {f"engine.router.{name}": value for name, value in flags.router.items()}


def overrides_of(flags: ParsedFlags) -> list[str]:
    """Return a command line as `dotted.key=value` overrides; its own overrides come last.

    Flags that set no key become `flags.<name>`, for the `args` of user functions.
    """
    values, _ = _with_files(flags.own)
    kept = {f"flags.{name}": value for name, value in values.items() if FLAGS[name].effect != "to"}
    return [
        *(f"{key}={json.dumps(value)}" for key, value in (keys_of(flags) | kept).items()),
        *flags.overrides,
    ]


def differences(flags: ParsedFlags) -> list[str]:
    """Return one sentence for each flag with another result than in slime."""
    values, _ = _with_files(flags.own)
    sentences = fixed_differences(values)
    if values.get("rollout_function_path") == FULLY_ASYNC and not values.get("async_buffer_size"):
        sentences.append(
            f"--rollout-function-path: samples are at most {_least_ahead(values)} weight versions "
            "old (--async-buffer-size); slime's fully asynchronous rollout has no bound"
        )
    if done := iterations_done(values):
        continued = _continued_prompts(flags, values)
        prompts = (
            "prompts continue after those that slime has drawn"
            if continued
            else "`load` of --data-source-path decides the position in the prompts"
            if _has_own_source(values)
            else "prompts start from the beginning of the data"
        )
        sentences.append(
            f"--load: {done} iterations of --num-rollout are done. This run has the others. Its "
            f"store and messages count them from 0; {prompts}"
        )
        if continued and (files := other_prompts(values)) is not None:
            sentences.append(
                f"--prompt-data: slime's run had {files[0]}, this one has {files[1]}. The position "
                "is a number of rows, so both files must have the same rows"
            )
    if (difference := layout_difference(values)) is not None:
        sentences.append(difference)
    return sentences


def _with_files(values: Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags with those of `--megatron-config-path` and `--custom-config-path`, and other
    entries of the latter.
    """
    values = {**values, **_role_overrides(values)}
    if not values.get("custom_config_path"):
        return values, {}
    entries = read_yaml(values["custom_config_path"], "--custom-config-path")
    flags = {
        name: value
        for name, value in entries.items()
        if name in FLAGS and FLAGS[name].effect in ("to", "built")
    }
    others = {name: value for name, value in entries.items() if name not in flags}
    return {**values, **flags}, others


def _role_overrides(values: Values) -> dict[str, Any]:
    """Return the flags that `--megatron-config-path` sets for the policy and the critic.

    The file is `megatron: [{role: actor, overrides: {lr: 1e-6}}, {role: critic, ...}]`.
    Raises: ConfigError for an override without a flag.
    """
    path = values.get("megatron_config_path")
    if not path:
        return {}
    option = "--megatron-config-path"
    flags = {}
    for entry in read_yaml(path, option).get("megatron") or []:
        role = entry.get("role")
        for name, value in (entry.get("overrides") or entry.get("args") or {}).items():
            flag = CRITIC_FLAGS.get(name) if role == "critic" else name
            if flag not in FLAGS or FLAGS[flag].effect not in ("to", "built", "neutral"):
                raise ConfigError(
                    f"no setting of the {'critic' if role == 'critic' else 'policy'} alone",
                    where=f"{option}: {path}: {role}",
                    found=name,
                    expected=" or ".join(CRITIC_FLAGS) if role == "critic" else None,
                    do="remove it, or give it for both as a flag",
                )
            flags[flag] = value
    return flags


def read_yaml(path: str, flag: str) -> dict[str, Any]:
    """Return the mapping of a YAML file that a flag names. Raises: ConfigError."""
    content, _ = parse(read(Path(path), "the file", flag), path)
    if not isinstance(content, dict):
        raise ConfigError("the file is not a mapping of keys", where=flag, found=path)
    return content


def _direct_keys(values: Values) -> Keys:
    """Return the keys of flags with effect `to`, without those that other flags disable."""
    keys: Keys = {
        FLAGS[name].key: SLIME_FUNCTIONS.get(value, value) if isinstance(value, str) else value
        for name, value in values.items()
        if FLAGS[name].effect == "to" and not is_default_function(value)
    }
    if values.get("get_mismatch_metrics") and not values.get("use_tis"):
        # In slime the function then only measures, and rlpipe always measures.
        keys.pop("train.loss.custom_tis_function_path", None)
    if values.get("loss_type") == "sft_loss":
        # slime's way to start no engines; a supervised run of rlpipe never needs them.
        keys.pop("debug.debug_train_only", None)
    if "rollout.data_source_path" in keys and "prompt_data" not in values:
        keys = {key: value for key, value in keys.items() if not key.startswith("data.prompts.")}
        keys["data.prompts"] = None
    return keys


def _continued_prompts(flags: ParsedFlags, values: Values) -> Keys:
    """Return slime's position in the prompts.

    {} if a data source of the user draws them, or an override sets the position.
    """
    is_set = any(word.startswith("data.slime_position") for word in flags.overrides)
    return {} if is_set or _has_own_source(values) else prompt_position(values)


def _has_own_source(values: Values) -> bool:
    """True if a data source of the user draws prompts."""
    path = values.get("data_source_path")
    return path is not None and not is_default_function(path)


def _prompts(values: Values) -> Keys:
    keys: Keys = {}
    if "prompt_data" in values:
        keys |= {"data.prompts.type": "file", "data.prompts.paths": values["prompt_data"]}
    if (mask := values.get("loss_mask_type")) is not None:
        keys["rollout.loss_mask_type"] = "all_assistant" if mask in QWEN_MASKS else mask
    return keys


def _rollout_function(values: Values) -> Keys:
    path = values["rollout_function_path"]
    if path == SFT_ROLLOUT:
        # It renders the messages itself, without --apply-chat-template.
        return {"rollout.type": "dataset", "data.apply_chat_template": True}
    if path == FULLY_ASYNC:
        return {"async_buffer_size": values.get("async_buffer_size") or _least_ahead(values)}
    return {FLAGS["rollout_function_path"].key: path} if has_rollout_function(values) else {}


def _least_ahead(values: Values) -> int:
    """Return the smallest `async_buffer_size` with which a rollout overlaps training."""
    return max(1, values.get("update_weights_interval", 1))


def _loss(values: Values) -> Keys:
    loss_type = values.get("loss_type")
    if loss_type is not None and loss_type not in LOSS_TYPES:
        raise ConfigError(
            "unknown loss", where="--loss-type", found=loss_type, expected=" or ".join(LOSS_TYPES)
        )
    if loss_type == "sft_loss":
        return {
            "rollout.type": "dataset",
            "train.loss.type": "sft",
            "advantage.advantage_estimator": "none",
            "reward.function": {"type": "none"},
        }
    # The value is slime's `compute_advantages_and_returns`: false if the flag is given.
    if not values.get("disable_compute_advantages_and_returns", True):
        raise ConfigError(
            "only supervised rows have no advantages",
            where="--disable-compute-advantages-and-returns",
            expected="--loss-type sft_loss",
        )
    return {} if loss_type is None else {"train.loss.type": LOSS_TYPES[loss_type]}


def _kl(values: Values) -> Keys:
    keys: Keys = {}
    if values.get("use_kl_loss"):
        keys |= {
            "advantage.reference": True,
            "train.loss.kl_loss_coef": values.get("kl_loss_coef", 0.0),
        }
    elif values.get("kl_loss_coef"):
        raise ConfigError(
            "the flag has no effect without --use-kl-loss",
            where="--kl-loss-coef",
            found=values["kl_loss_coef"],
        )
    if values.get("kl_coef"):
        keys["advantage.reference"] = True
        if "kl_loss_type" in values:
            keys["advantage.kl_type"] = values["kl_loss_type"]
    if values.get("use_opd") and values.get("opd_type") == "sglang" and "rm_url" in values:
        # slime's URL is that of the request; the key is the server's address.
        keys["teacher.url"] = values["rm_url"].removesuffix("/generate")
    if scores_at_two_temperatures(values):
        keys["teacher.other_temperature"] = True
    return keys


def _old_policy(values: Values) -> Keys:
    """Convert --keep-old-actor: the ratio is to the weights that sampled.

    Samples of a rollout function may have no log-probs of the engines.
    """
    is_kept = values.get("keep_old_actor") and not has_rollout_function(values)
    return {"train.loss.use_rollout_logprobs": True} if is_kept else {}


def _batch(values: Values) -> Keys:
    """Convert --micro-batch-size, which slime ignores if it packs by tokens."""
    size = values.get("micro_batch_size")
    if size is None or values.get("use_dynamic_batch_size"):
        return {}
    return {FLAGS["micro_batch_size"].key: size}


def _resources(values: Values) -> Keys:
    keys: Keys = {}
    engine_gpus = values.get("rollout_num_gpus")
    if values.get("colocate") and engine_gpus is None:
        nodes = values.get("actor_num_nodes", FLAGS["actor_num_nodes"].default)
        per_node = values.get("actor_num_gpus_per_node", FLAGS["actor_num_gpus_per_node"].default)
        engine_gpus = nodes * per_node
    if engine_gpus is not None:
        keys["resources.rollout_num_gpus"] = engine_gpus
    host = values.get("sglang_router_ip")
    port = values.get("sglang_router_port")
    if (host is None) != (port is None):
        raise ConfigError(
            "incomplete address of the router",
            where="--sglang-router-ip, --sglang-router-port",
            found=[host, port],
            do="give both, or neither if the run should start a router",
        )
    if host is not None:
        keys["engine.router_url"] = f"http://{host}:{port}"
    if values.get("offload"):
        keys |= {"resources.offload_train": True, "resources.offload_rollout": True}
    return keys


def _sync(values: Values) -> Keys:
    """Convert slime's mode and transport of weight updates, which are one key in rlpipe."""
    for name, allowed in (
        ("update_weight_mode", ("full", "delta")),
        ("update_weight_transport", ("nccl", "disk")),
    ):
        if values.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                "not a value of this flag",
                where=FLAGS[name].option,
                found=values[name],
                expected=f"{allowed[0]} or {allowed[1]}",
            )
    transport = values.get("update_weight_transport")
    if values.get("update_weight_mode") == "delta":
        if transport != "disk":
            raise ConfigError(
                "delta updates need files",
                where="--update-weight-mode",
                found="delta",
                do="give --update-weight-transport disk too",
            )
        return {"sync.transport": "delta"}
    if transport == "disk":
        return {"sync.transport": "disk"}
    # slime does not use NCCL between processes on shared GPUs either.
    if transport == "nccl" and not values.get("colocate"):
        return {"sync.transport": "distributed"}
    return {}


def _store(values: Values) -> Keys:
    save = values.get("save")
    if not save:
        return {}
    if "://" in save:
        return {"store.root": save}
    # An audit of the store would report slime's files as unexplained.
    folder = Path(save).absolute()
    root = folder / STORE_OF_SLIMES_FOLDER if is_megatron_checkpoint(folder) else folder
    return {"store.root": str(root)}


def _other_keys(values: Values) -> Keys:
    """Convert sequence parallelism, seed, dtype, recomputation and profiling."""
    keys: Keys = {}
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        # Megatron-LM turns it off, too.
        keys["train.parallel.sequence_parallel"] = False
    if "seed" in values:
        keys["seed"] = values["seed"]
    if values.get("bf16"):
        keys["model.dtype"] = "bfloat16"
    if values.get("recompute_activations"):
        keys["train.megatron.recompute_granularity"] = "selective"
    profiles = values.get("profile") or values.get("use_pytorch_profiler")
    if profiles and "profile_target" not in values:
        keys["observe.profile_target"] = ["train_overall"]
    return keys


def run_of_saved_rollouts(path: str) -> str:
    """Return a name of a run for the path of `--load-debug-rollout-data`, which may be a name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(path).stem if "/" in path else path).strip("-.")


def _debug(values: Values) -> Keys:
    """Convert `--load-debug-rollout-data`, with which no engines start.

    slime reads a file for each iteration. Here a run of the store has all its rollouts:
    `tools.command.run_words` finds the run that was started with this path.
    """
    path = values.get("load_debug_rollout_data")
    if not path:
        return {}
    keys: Keys = {"debug.load_debug_rollout_data": run_of_saved_rollouts(path)}
    if values.get("colocate"):
        keys["resources.colocate"] = False
    # slime trains on stored rollouts of any age.
    oldest = values.get("num_rollout", 1) - 1
    if oldest > values.get("async_buffer_size", 0):
        keys["async_buffer_size"] = oldest
    return keys


def _gates(values: Values) -> Keys:
    """Convert `--ci-test`: a bound of slime's assertions that is broken fails the iteration."""
    if not values.get("ci_test"):
        return {}
    threshold = "ci_train_rollout_logprob_abs_diff_threshold"
    return {
        "gates": {
            "bounds": [
                {
                    "metric": "train/train_rollout_logprob_abs_diff",
                    "at_most": values.get(threshold, FLAGS[threshold].default),
                }
            ],
            "timeout_s": 1,
            "poll_s": 1,
        }
    }


_CONVERTERS: tuple[Callable[[Values], Keys], ...] = (
    model_source,
    prediction_layers,
    _prompts,
    _loss,
    _kl,
    _old_policy,
    _batch,
    _resources,
    engine_layout,
    _sync,
    _store,
    _other_keys,
    _debug,
    _gates,
)
