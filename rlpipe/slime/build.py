"""From slime's flags to our keys: those that several flags make together, and those whose values
have other names.

Each `_part` below takes the flags that were given, by name, and answers dotted keys with their
values. A flag that was not given changes nothing: what is not said is the recipe's (`slime.yaml`
where there is none).

Not here: reading the words (`flags`), held-out sets (`slime_eval`), counting prompts for
`--num-epoch` (`tools.train`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.rollout import SLIMES_FILTERS
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS, LOSS_TYPES
from rlpipe.slime.command_line import Given
from rlpipe.slime.evaluation import datasets
from rlpipe.slime.megatron import MODEL
from rlpipe.slime.reward import reward_function

BASE = Path(__file__).with_name("slime.yaml")
"""The recipe that a command line without one starts from."""
Values = Mapping[str, Any]
Keys = dict[str, Any]

THEIR_FUNCTIONS = {
    "slime.rollout.sglang_rollout.generate_rollout": None,
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": None,
    "slime.rollout.data_source.RolloutDataSource": None,
    "slime.rollout.sglang_streaming_rollout.generate_streaming": None,
    **SLIMES_FILTERS,
}
"""Functions of slime's own that its command lines name → ours; None where it is what rlpipe does
without being told."""
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def keys_of(given: Given) -> Keys:
    """Dotted key → value for everything a command line gives. Raises: ConfigError for flags that
    contradict each other."""
    values, own = _with_custom_config(given.own)
    keys: Keys = {
        FLAGS[name].key: value for name, value in values.items() if FLAGS[name].verdict == "to"
    }
    keys = {key: _ours(value) for key, value in keys.items() if not _is_theirs(value)}
    if values.get("get_mismatch_metrics") and not values.get("use_tis"):
        keys.pop(
            "train.loss.custom_tis_function_path", None
        )  # there it only measures, which is done in any case
    if values.get("loss_type") == "sft_loss":
        keys.pop(
            "debug.debug_train_only", None
        )  # how slime does without engines, which supervised rows never need here
    if (
        values.get("data_source_path")
        and "rollout.data_source_path" in keys
        and "prompt_data" not in values
    ):
        keys = {
            key: value for key, value in keys.items() if not key.startswith("data.prompts.")
        } | {"data.prompts": None}
    for part in (
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
        _numbers,
    ):
        keys |= part(values)
    if "rollout_function_path" in values:
        keys |= _rollout_function(values)
    if (function := reward_function(values)) is not None and "reward.function" not in keys:
        keys["reward.function"] = function
    if path := values.get("custom_reward_post_process_path"):
        keys |= {
            "reward.custom_reward_post_process_path": path,
            "advantage.rewards_normalization": False,
        }
    if (held_out := datasets(values)) is not None:
        keys["evaluation.datasets"] = held_out
    if own:
        keys["rollout.custom_config"] = own
    keys |= {f"train.megatron.{name}": value for name, value in given.megatron.items()}
    keys |= {f"engine.sglang.{name}": value for name, value in given.sglang.items()}
    return keys | {f"engine.router.{name}": value for name, value in given.router.items()}


def overrides_of(given: Given) -> list[str]:
    """The same as `dotted.key=value` overrides, with those of the command line after them.

    Flags that set no key of their own are kept as `flags.<name>`, for the `args` of functions.
    """
    values, _ = _with_custom_config(given.own)
    kept = {f"flags.{name}": value for name, value in values.items() if FLAGS[name].verdict != "to"}
    return [
        *(f"{key}={json.dumps(value)}" for key, value in (keys_of(given) | kept).items()),
        *given.overrides,
    ]


def differences(given: Given) -> list[str]:
    """One sentence for each flag that computes something else than in slime, and cannot be made to
    compute the same."""
    values, _ = _with_custom_config(given.own)
    estimator = values.get("advantage_estimator")
    found = {
        "--rollout-top-p: log-probs are those of the whole distribution; slime takes those of the nucleus": (
            values.get("rollout_top_p", 1.0) != 1.0
        ),
        "--use-rollout-logprobs: the KL in the reward and the distillation term are measured from the trainer's log-probs; "
        "slime measures them from the engine's": values.get("use_rollout_logprobs")
        and (values.get("kl_coef") or values.get("use_opd")),
        "--kl-coef with ppo: the critic learns returns with the KL in them; slime's learns returns without": (
            estimator == "ppo" and values.get("kl_coef")
        ),
        "--partial-rollout: a group with tokens older than async_buffer_size begins again; slime trains on them. "
        "--mask-offpolicy-in-partial-rollout keeps them without a part in the loss, in both": (
            values.get("partial_rollout") and not values.get("mask_offpolicy_in_partial_rollout")
        ),
        "--eps-clip with cispo: the lower bound of the ratio is active, as in slime; --eps-clip 1.0 is the paper's": (
            estimator == "cispo" and values.get("eps_clip", 0.2) < 1
        ),
    }
    return [text for text, is_so in found.items() if is_so]


def _with_custom_config(values: Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flags with what `--custom-config-path` says of them, and its entries that are no
    flags."""
    if not values.get("custom_config_path"):
        return dict(values), {}
    entries = read_yaml(values["custom_config_path"], "--custom-config-path")
    flags = {
        name: value
        for name, value in entries.items()
        if name in FLAGS and FLAGS[name].verdict in ("to", "built")
    }
    return {**values, **flags}, {
        name: value for name, value in entries.items() if name not in flags
    }


def read_yaml(path: str, flag: str) -> dict[str, Any]:
    """A YAML file that a flag names. Raises: ConfigError."""
    content, _ = parse(read(Path(path), "the file", flag), path)
    if not isinstance(content, dict):
        raise ConfigError("the file is not a mapping of keys", where=flag, found=path)
    return content


def _is_theirs(value: Any) -> bool:
    return isinstance(value, str) and value in THEIR_FUNCTIONS and THEIR_FUNCTIONS[value] is None


def _ours(value: Any) -> Any:
    return THEIR_FUNCTIONS.get(value, value) if isinstance(value, str) else value


def _model(values: Values) -> Keys:
    directory = values.get("hf_checkpoint")
    if directory is None:
        return {}
    check_model(values, directory)
    return {"model.source": {"type": "huggingface", "hf_checkpoint": directory}}


def check_model(values: Values, directory: str) -> None:
    """Megatron's flags of the model against config.json, if there is one. Raises: ConfigError for
    each that contradicts it."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        return
    try:
        said = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            "not a model's configuration", where=str(path), found=repr(error)
        ) from error
    if "kv_lora_rank" in said:
        said.pop("head_dim", None)
    else:
        said.setdefault(
            "head_dim", said.get("hidden_size", 0) // max(1, said.get("num_attention_heads", 1))
        )
    wrong = []
    for name, names in MODEL.items():
        known = [value for value in (_at(said, key) for key in names) if value is not None]
        if name in values and known and float(values[name]) != float(known[0]):
            wrong.append(f"{FLAGS[name].spelled} {values[name]}, but {names[0]} is {known[0]}")
    untied = values.get("untie_embeddings_and_output_weights")
    tied = said.get("tie_word_embeddings")
    if untied and tied:
        wrong.append("--untie-embeddings-and-output-weights, but tie_word_embeddings is true")
    if wrong:
        raise ConfigError(
            "the flags describe another model than --hf-checkpoint",
            where=str(path),
            found="\n            ".join(wrong),
            do="leave the model flags out: config.json decides",
        )


def _at(content: Any, key: str) -> Any:
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _prompts(values: Values) -> Keys:
    keys: Keys = {}
    if "prompt_data" in values:
        keys |= {"data.prompts.type": "file", "data.prompts.paths": values["prompt_data"]}
    if (mask := values.get("loss_mask_type")) is not None:
        theirs = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
        keys["rollout.loss_mask_type"] = "all_assistant" if mask in theirs else mask
    return keys


def _rollout_function(values: Values) -> Keys:
    path = values["rollout_function_path"]
    if path == SFT_ROLLOUT:
        return {"rollout.type": "dataset"}
    if path == FULLY_ASYNC:
        if not values.get("async_buffer_size"):
            raise ConfigError(
                "rollouts run ahead of training as far as they are told",
                where="--rollout-function-path",
                found=path,
                do="leave it out and give --async-buffer-size N",
            )
        return {}
    return {} if _is_theirs(path) else {FLAGS["rollout_function_path"].key: path}


def _loss(values: Values) -> Keys:
    given = values.get("loss_type")
    computed = values.get("disable_compute_advantages_and_returns", True)
    if given is not None and given not in LOSS_TYPES:
        raise ConfigError(
            "unknown loss", where="--loss-type", found=given, expected=" or ".join(LOSS_TYPES)
        )
    if given == "sft_loss":
        supervised = {
            "rollout.type": "dataset",
            "train.loss.type": "sft",
            "advantage.advantage_estimator": "none",
        }
        return {**supervised, "reward.function": {"type": "none"}}
    if not computed:
        raise ConfigError(
            "only supervised rows have no advantages",
            where="--disable-compute-advantages-and-returns",
            expected="--loss-type sft_loss",
        )
    return {} if given is None else {"train.loss.type": LOSS_TYPES[given]}


def _kl(values: Values) -> Keys:
    keys: Keys = {}
    if values.get("use_kl_loss"):
        keys |= {
            "advantage.reference": True,
            "train.loss.kl_loss_coef": values.get("kl_loss_coef", 0.0),
        }
    elif values.get("kl_loss_coef"):
        raise ConfigError(
            "without --use-kl-loss it would have no effect",
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
    """slime packs by tokens where it is told to, and then a micro-batch's number of samples means
    nothing."""
    size = values.get("micro_batch_size")
    return (
        {}
        if size is None or values.get("use_dynamic_batch_size")
        else {FLAGS["micro_batch_size"].key: size}
    )


def _resources(values: Values) -> Keys:
    engines = values.get("rollout_num_gpus")
    if values.get("colocate") and engines is None:
        nodes, each = (
            values.get(name, FLAGS[name].default)
            for name in ("actor_num_nodes", "actor_num_gpus_per_node")
        )
        engines = nodes * each
    keys: Keys = {} if engines is None else {"resources.rollout_num_gpus": engines}
    if (router := [values.get(f"sglang_router_{part}") for part in ("ip", "port")]) != [None, None]:
        if None in router:
            do = "give both, or neither for a router of the run's own"
            raise ConfigError(
                "half an address",
                where="--sglang-router-ip, --sglang-router-port",
                found=router,
                do=do,
            )
        keys["engine.router_url"] = f"http://{router[0]}:{router[1]}"
    return keys | (
        {f"resources.offload_{what}": True for what in ("train", "rollout")}
        if values.get("offload")
        else {}
    )


def _sync(values: Values) -> Keys:
    """slime's two flags are one key here. On shared GPUs its NCCL is not used there either."""
    for name, allowed in (
        ("update_weight_mode", ("full", "delta")),
        ("update_weight_transport", ("nccl", "disk")),
    ):
        if values.get(name, allowed[0]) not in allowed:
            expected = f"{allowed[0]} or {allowed[1]}"
            raise ConfigError(
                "not a value of this flag",
                where=FLAGS[name].spelled,
                found=values[name],
                expected=expected,
            )
    transport = values.get("update_weight_transport")
    if values.get("update_weight_mode") == "delta":
        if transport != "disk":
            do = "give --update-weight-transport disk with it"
            raise ConfigError(
                "changes go through files only", where="--update-weight-mode", found="delta", do=do
            )
        return {"sync.transport": "delta"}
    if transport == "disk":
        return {"sync.transport": "disk"}
    return (
        {"sync.transport": "distributed"}
        if transport == "nccl" and not values.get("colocate")
        else {}
    )


def _store(values: Values) -> Keys:
    save = values.get("save")
    if not save:
        return {}
    return {"store.root": save if "://" in save else str(Path(save).absolute())}


def _critic(values: Values) -> Keys:
    load = values.get("critic_load")
    if (
        not load
        or not (Path(load) / "config.json").is_file()
        or _same_folder(load, values.get("hf_checkpoint"))
    ):
        return {}
    return {"critic.hf_checkpoint": load}


def _checkpoints(values: Values) -> Keys:
    """Refuse every flag that names first weights which this version does not read.

    slime starts from --load, else from --ref-load, and takes the model's shape alone from
    --hf-checkpoint. A run of rlpipe starts from --hf-checkpoint. Starting without a word from other
    weights than slime would is worse than an error.
    """
    reference = values.get("ref_load")
    if reference and not _same_folder(reference, values.get("hf_checkpoint")):
        raise _unread(
            "--ref-load", reference, "the same directory as --hf-checkpoint, or no --ref-load"
        )
    for name, own in (("load", "save"), ("critic_load", "critic_save")):
        _check_load(values, name, own)
    teacher = values.get("opd_teacher_load")
    if teacher and Path(teacher).is_dir() and not (Path(teacher) / "config.json").is_file():
        raise _unread(
            "--opd-teacher-load", teacher, "a Hugging Face directory", give_as="--opd-teacher-load"
        )
    return {}


def _check_load(values: Values, name: str, own: str) -> None:
    """Refuse weights that `--load` or `--critic-load` would bring.

    Launch scripts give the same folder as --load and --save. Before the first start it is absent or
    empty, and later it holds the run's own store, from which a run of the same name continues: both
    are accepted.
    """
    load = values.get(name)
    critic = name == "critic_load"
    if not load or _same_folder(load, values.get("hf_checkpoint")):
        return
    if critic and (Path(load) / "config.json").is_file():
        return
    folder = Path(load)
    is_own = any(_same_folder(load, values.get(flag)) for flag in (own, "save"))
    there = "://" in load or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))
    if not there or (is_own and not _is_checkpoint(folder)):
        return
    if is_own or not _is_store(folder):
        accepted = "a Hugging Face directory" if critic else "--hf-checkpoint"
        expected = f"{accepted}, or the folder of {FLAGS[own].spelled} without another framework's checkpoint"
        raise _unread(
            FLAGS[name].spelled,
            load,
            expected,
            give_as=FLAGS[name].spelled if critic else "--hf-checkpoint",
        )
    raise ConfigError(
        "a run does not continue from another store",
        where=FLAGS[name].spelled,
        found=load,
        expected="the folder of --save",
        do=f"give --save {load} and the run's name to continue it, or --fork RUN for a run of its own",
    )


def _same_folder(path: str, other: str | None) -> bool:
    return other is not None and (path == other or Path(path).resolve() == Path(other).resolve())


def _is_checkpoint(folder: Path) -> bool:
    """True if the folder holds Megatron's or Hugging Face's weights."""
    names = (
        "latest_checkpointed_iteration.txt",
        "metadata.json",
        ".metadata",
        "common.pt",
        "config.json",
    )
    return any((folder / name).exists() for name in names) or any(folder.glob("iter_*"))


def _is_store(folder: Path) -> bool:
    return (folder / "branches").is_dir()


def _unread(
    flag: str, found: str, expected: str, *, give_as: str = "--hf-checkpoint"
) -> ConfigError:
    return ConfigError(
        "a run does not start from these weights",
        where=flag,
        found=found,
        expected=expected,
        do=f"leave {flag} out if the Hugging Face directory holds the same weights; else convert a Megatron checkpoint (python "
        f"tools/convert_torch_dist_to_hf.py --input-dir {found} --output-dir OUT --origin-hf-dir MODEL) and give {give_as} OUT",
    )


def _numbers(values: Values) -> Keys:
    keys: Keys = {}
    if "seed" in values:
        keys["seed"] = values["seed"]
    if values.get("bf16"):
        keys["model.dtype"] = "bfloat16"
    if values.get("recompute_activations"):
        keys["train.megatron.recompute_granularity"] = "selective"
    if (
        values.get("profile") or values.get("use_pytorch_profiler")
    ) and "profile_target" not in values:
        keys["observe.profile_target"] = ["train_overall"]
    return keys
