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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.rollout import SLIME_FILTERS
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS, LOSS_TYPES
from rlpipe.slime.command_line import ParsedFlags
from rlpipe.slime.evaluation_flags import datasets
from rlpipe.slime.megatron_flags import MODEL
from rlpipe.slime.reward_flags import reward_function

BASE = Path(__file__).with_name("slime.yaml")
"""Recipe of a command line without a recipe."""
Values = Mapping[str, Any]
Keys = dict[str, Any]

SLIME_FUNCTIONS = {
    "slime.rollout.sglang_rollout.generate_rollout": None,
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": None,
    "slime.rollout.data_source.RolloutDataSource": None,
    "slime.rollout.sglang_streaming_rollout.generate_streaming": None,
    **SLIME_FILTERS,
}
"""Dotted path of a slime function → rlpipe's function; None: rlpipe's default behaviour."""
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
QWEN_MASKS = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
"""slime's loss mask types that train on all assistant messages."""
CHECKPOINT_FILES = (
    "latest_checkpointed_iteration.txt",
    "metadata.json",
    ".metadata",
    "common.pt",
    "config.json",
)
"""Files of Megatron's and Hugging Face's checkpoints."""


def keys_of(flags: ParsedFlags) -> Keys:
    """Return dotted key → value of a command line.

    Raises: ConfigError for flags that contradict each other.
    """
    values, custom = _with_custom_config(flags.own)
    keys = _direct_keys(values)
    for convert in _CONVERTERS:
        keys |= convert(values)
    if "rollout_function_path" in values:
        keys |= _rollout_function(values)
    if (function := reward_function(values)) is not None and "reward.function" not in keys:
        keys["reward.function"] = function
    if path := values.get("custom_reward_post_process_path"):
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
    values, _ = _with_custom_config(flags.own)
    kept = {f"flags.{name}": value for name, value in values.items() if FLAGS[name].effect != "to"}
    return [
        *(f"{key}={json.dumps(value)}" for key, value in (keys_of(flags) | kept).items()),
        *flags.overrides,
    ]


def differences(flags: ParsedFlags) -> list[str]:
    """Return one sentence for each flag with another result than in slime."""
    values, _ = _with_custom_config(flags.own)
    estimator = values.get("advantage_estimator")
    sentences = []
    if values.get("rollout_top_p", 1.0) != 1.0:
        sentences.append(
            "--rollout-top-p: log-probs are those of the full distribution; slime uses those of "
            "the nucleus"
        )
    if values.get("use_rollout_logprobs") and (values.get("kl_coef") or values.get("use_opd")):
        sentences.append(
            "--use-rollout-logprobs: the KL in the reward and the distillation term use the "
            "trainer's log-probs; slime uses the engine's"
        )
    if estimator == "ppo" and values.get("kl_coef"):
        sentences.append(
            "--kl-coef with ppo: the critic learns returns with the KL; slime's learns returns "
            "without it"
        )
    if values.get("partial_rollout") and not values.get("mask_offpolicy_in_partial_rollout"):
        sentences.append(
            "--partial-rollout: a group with tokens older than async_buffer_size is sampled again; "
            "slime trains on it. --mask-offpolicy-in-partial-rollout keeps these tokens with loss "
            "mask 0, in both"
        )
    if estimator == "cispo" and values.get("eps_clip", 0.2) < 1:
        sentences.append(
            "--eps-clip with cispo: the lower bound of the ratio is active, as in slime; the "
            "paper's is --eps-clip 1.0"
        )
    return sentences


def _with_custom_config(values: Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags with those of `--custom-config-path`, and the file's other entries."""
    if not values.get("custom_config_path"):
        return dict(values), {}
    entries = read_yaml(values["custom_config_path"], "--custom-config-path")
    flags = {
        name: value
        for name, value in entries.items()
        if name in FLAGS and FLAGS[name].effect in ("to", "built")
    }
    others = {name: value for name, value in entries.items() if name not in flags}
    return {**values, **flags}, others


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
        if FLAGS[name].effect == "to" and not _is_default_function(value)
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


def _is_default_function(value: Any) -> bool:
    """True for the path of a slime function that rlpipe's default behaviour replaces."""
    return isinstance(value, str) and SLIME_FUNCTIONS.get(value, value) is None


def _model(values: Values) -> Keys:
    directory = values.get("hf_checkpoint")
    if directory is None:
        return {}
    check_model(values, directory)
    return {"model.source": {"type": "huggingface", "hf_checkpoint": directory}}


def check_model(values: Values, directory: str) -> None:
    """Compare Megatron's model flags with config.json, if the directory has one.

    Raises: ConfigError with all flags that contradict it.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        return
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            "not a model's configuration", where=str(path), found=repr(error)
        ) from error
    if "kv_lora_rank" in config:
        config.pop("head_dim", None)  # latent attention has several head sizes
    else:
        heads = max(1, config.get("num_attention_heads", 1))
        config.setdefault("head_dim", config.get("hidden_size", 0) // heads)
    wrong = []
    for name, keys in MODEL.items():
        known = [value for value in (_nested(config, key) for key in keys) if value is not None]
        if name in values and known and float(values[name]) != float(known[0]):
            wrong.append(f"{FLAGS[name].option} {values[name]}, but {keys[0]} is {known[0]}")
    if values.get("untie_embeddings_and_output_weights") and config.get("tie_word_embeddings"):
        wrong.append("--untie-embeddings-and-output-weights, but tie_word_embeddings is true")
    if wrong:
        raise ConfigError(
            "the flags describe another model than --hf-checkpoint",
            where=str(path),
            found="\n            ".join(wrong),
            do="remove the model flags: config.json decides",
        )


def _nested(content: Any, key: str) -> Any:
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


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
        return {"rollout.type": "dataset"}
    if path == FULLY_ASYNC:
        if not values.get("async_buffer_size"):
            raise ConfigError(
                "asynchronous rollouts need a bound on their staleness",
                where="--rollout-function-path",
                found=path,
                do="remove it and give --async-buffer-size N",
            )
        return {}
    return {} if _is_default_function(path) else {FLAGS["rollout_function_path"].key: path}


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
        keys["teacher.url"] = values["rm_url"]
    return keys


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
    return {"store.root": save if "://" in save else str(Path(save).absolute())}


def _critic(values: Values) -> Keys:
    load = values.get("critic_load")
    if not load or not (Path(load) / "config.json").is_file():
        return {}
    if _same_folder(load, values.get("hf_checkpoint")):
        return {}
    return {"critic.hf_checkpoint": load}


def _checkpoints(values: Values) -> Keys:
    """Refuse every flag that names first weights which rlpipe would not read.

    slime starts from --load, else from --ref-load, and reads only the architecture from
    --hf-checkpoint. A run of rlpipe starts from --hf-checkpoint. An error is better than a start
    from other weights.
    """
    reference = values.get("ref_load")
    if reference and not _same_folder(reference, values.get("hf_checkpoint")):
        raise _not_read(
            "--ref-load", reference, "the same directory as --hf-checkpoint, or no --ref-load"
        )
    _check_load(values, "load", "save")
    _check_load(values, "critic_load", "critic_save")
    teacher = values.get("opd_teacher_load")
    if teacher and Path(teacher).is_dir() and not (Path(teacher) / "config.json").is_file():
        raise _not_read(
            "--opd-teacher-load",
            teacher,
            "a Hugging Face directory",
            new_flag="--opd-teacher-load",
        )
    return {}


def _check_load(values: Values, name: str, save_name: str) -> None:
    """Refuse weights that `--load` or `--critic-load` would load in slime.

    Launch scripts give one folder as --load and --save. Two states of this folder are accepted:
    absent or empty before the first start, and later with the run's own store, from which a run of
    the same name continues.
    """
    load = values.get(name)
    is_critic = name == "critic_load"
    if not load or _same_folder(load, values.get("hf_checkpoint")):
        return
    if is_critic and (Path(load) / "config.json").is_file():
        return
    folder = Path(load)
    is_own = any(_same_folder(load, values.get(flag)) for flag in (save_name, "save"))
    has_content = "://" in load or (
        folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    )
    if not has_content or (is_own and not _is_checkpoint(folder)):
        return
    option = FLAGS[name].option
    if is_own or not _is_store(folder):
        accepted = "a Hugging Face directory" if is_critic else "--hf-checkpoint"
        raise _not_read(
            option,
            load,
            f"{accepted}, or the folder of {FLAGS[save_name].option} without another framework's "
            "checkpoint",
            new_flag=option if is_critic else "--hf-checkpoint",
        )
    raise ConfigError(
        "a run does not continue from another store",
        where=option,
        found=load,
        expected="the folder of --save",
        do=f"give --save {load} and the run's name to continue the run, or --fork RUN for a new "
        "run",
    )


def _same_folder(path: str, other: str | None) -> bool:
    return other is not None and (path == other or Path(path).resolve() == Path(other).resolve())


def _is_checkpoint(folder: Path) -> bool:
    """True if the folder has weights of Megatron or Hugging Face."""
    return any((folder / name).exists() for name in CHECKPOINT_FILES) or any(folder.glob("iter_*"))


def _is_store(folder: Path) -> bool:
    return (folder / "branches").is_dir()


def _not_read(
    option: str, found: str, expected: str, *, new_flag: str = "--hf-checkpoint"
) -> ConfigError:
    return ConfigError(
        "a run does not start from these weights",
        where=option,
        found=found,
        expected=expected,
        do=f"remove {option} if the Hugging Face directory has the same weights; otherwise convert "
        "a Megatron checkpoint (python tools/convert_torch_dist_to_hf.py "
        f"--input-dir {found} --output-dir OUT --origin-hf-dir MODEL) and give {new_flag} OUT",
    )


def _other_keys(values: Values) -> Keys:
    """Convert seed, dtype, recomputation and profiling."""
    keys: Keys = {}
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


_CONVERTERS: tuple[Callable[[Values], Keys], ...] = (
    _checkpoints,
    _model,
    _prompts,
    _loss,
    _kl,
    _batch,
    _resources,
    _sync,
    _store,
    _critic,
    _other_keys,
)
