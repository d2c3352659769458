"""Convert slime's flags for the model and its checkpoints to keys.

    model_source(values)               `--hf-checkpoint`, `--ref-load`, `--load`, `--critic-load`
    prediction_layers(values)          `--enable-mtp-training`
    iterations_done(values)            iterations that were trained before (`--load`)
    continued_folder(values)           the checkpoint in `--load` that the run continues
    check_model(values, directory)     compare Megatron's model flags with config.json

slime reads the architecture from --hf-checkpoint. First weights come from --load if that folder has
a checkpoint or a Hugging Face model, else from --ref-load, else from --hf-checkpoint. The reference
is --ref-load. A Megatron checkpoint in --load continues its optimizer state and its iterations,
unless --finetune or --no-load-optim is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS
from rlpipe.slime.megatron_flags import MODEL
from rlpipe.system.megatron_weights import find_checkpoint, is_megatron_checkpoint

Values = Mapping[str, Any]
Keys = dict[str, Any]


def model_source(values: Values) -> Keys:
    """Return `model.source` and the keys of reference and critic; {} without --hf-checkpoint.

    Raises: ConfigError for flags that name weights which the run would not read, or that contradict
    config.json.
    """
    directory = values.get("hf_checkpoint")
    _check_load(values, "load", "save")
    _check_load(values, "critic_load", "critic_save")
    keys = _critic(values)
    if directory is None:
        return keys
    check_model(values, directory)
    source = {"type": "huggingface", "hf_checkpoint": directory}
    return keys | {"model.source": source | _first_weights(values)} | _reference(values)


def trained_prediction_layers(values: Values) -> int:
    """Return the number of layers for multi-token prediction that --enable-mtp-training trains.

    0 if the model has another number of them, the layout cannot train them, or its config.json
    cannot be read, as of a name on the Hub.
    """
    layout = ("pipeline_model_parallel_size", "context_parallel_size")
    directory = values.get("hf_checkpoint")
    if not values.get("enable_mtp_training") or not directory:
        return 0
    try:
        config = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    found = config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers")
    possible = all((values.get(name) or 1) == 1 for name in layout)
    return found if possible and found and found == values.get("mtp_num_layers") else 0


def prediction_layers(values: Values) -> Keys:
    """Return the keys that train layers for multi-token prediction, with slime's factor."""
    number = trained_prediction_layers(values)
    factor = values.get("mtp_loss_scaling_factor", 0.2)
    return (
        {
            "train.megatron.mtp_num_layers": number,
            "train.megatron.mtp_loss_scaling_factor": factor,
        }
        if number
        else {}
    )


def loads_checkpoint(values: Values) -> bool:
    """True if first weights come from the Megatron checkpoint in --load."""
    load = values.get("load")
    return bool(load) and "://" not in load and is_megatron_checkpoint(Path(load))


def continues_optimizer(values: Values) -> bool:
    """True if the run continues the optimizer state of the checkpoint in --load."""
    fresh = values.get("finetune") or values.get("no_load_optim")
    return not fresh and _loaded_iteration(values) is not None


def iterations_done(values: Values) -> int:
    """Return the iterations of --num-rollout that were trained before, as in slime.

    The first one to train is --start-rollout-id, or follows the checkpoint in --load. With a critic
    it follows that of the critic, which also trains where the policy does not.
    """
    if values.get("start_rollout_id") is not None:
        return values["start_rollout_id"]
    iteration = _loaded_iteration(values)
    if iteration is None or values.get("finetune"):
        return 0
    of_critic = None
    if values.get("advantage_estimator") == "ppo":
        of_critic = _critic_iteration(values)
    return (iteration if of_critic is None else of_critic) + 1


def continued_folder(values: Values) -> Path | None:
    """Return the folder of the checkpoint in --load that the run continues; None without one."""
    if values.get("finetune") or _loaded_iteration(values) is None:
        return None
    return find_checkpoint(Path(values["load"]), values.get("ckpt_step"), key="--load").folder


def _loaded_iteration(values: Values) -> int | None:
    """Return the iteration of the checkpoint in --load; None without one, and for a conversion.

    Raises: ConfigError if the folder has no such checkpoint.
    """
    if not loads_checkpoint(values):
        return None
    return find_checkpoint(Path(values["load"]), values.get("ckpt_step"), key="--load").iteration


def _first_weights(values: Values) -> Keys:
    """Return the keys of `model.source` for weights outside --hf-checkpoint."""
    if loads_checkpoint(values):
        keys = _megatron(values["load"], values.get("ckpt_step"))
        return keys | ({"megatron_optimizer": True} if continues_optimizer(values) else {})
    load = values.get("load")
    if load and _is_model(load):
        return {"hf_checkpoint": load}
    reference = values.get("ref_load")
    if reference is None or same_folder(reference, values.get("hf_checkpoint")):
        return {}
    if _is_model(reference):
        return {"hf_checkpoint": reference}
    return _megatron(reference, values.get("ref_ckpt_step"))


def weight_flags(values: Values) -> dict[str, str]:
    """Return dotted key → name of the flag, for the files of the first weights and the critic's."""
    keys = _first_weights(values)
    load = values.get("load")
    of_load = loads_checkpoint(values) or (load and _is_model(load))
    folder, step = ("load", "ckpt_step") if of_load else ("ref_load", "ref_ckpt_step")
    flags = {f"model.source.{name}": step if name.endswith("_step") else folder for name in keys}
    return flags | {
        key: "ckpt_step" if key.endswith("_step") else "critic_load" for key in _critic(values)
    }


def _reference(values: Values) -> Keys:
    """Return the keys of a reference that is not the first weights. Raises: ConfigError."""
    if not (values.get("use_kl_loss") or values.get("kl_coef")):
        return {}
    load = values.get("load")
    has_own_weights = loads_checkpoint(values) or (load and _is_model(load))
    if not has_own_weights:
        return {}
    reference = values.get("ref_load")
    if reference is None:
        raise ConfigError(
            "a run with a KL needs the weights of its reference",
            where="--ref-load",
            found="none, and first weights from --load",
            do="give --ref-load, or --ref-load with the folder of --load",
        )
    step = values.get("ref_ckpt_step")
    if same_folder(reference, load) and step in (None, values.get("ckpt_step")):
        return {}
    return {"reference.ref_load": str(Path(reference).absolute()), "reference.ref_ckpt_step": step}


def _critic(values: Values) -> Keys:
    load = values.get("critic_load")
    if not load or same_folder(load, values.get("hf_checkpoint")):
        return {}
    if _is_model(load):
        return {"critic.hf_checkpoint": load}
    if "://" not in load and is_megatron_checkpoint(Path(load)):
        keys: Keys = {
            "critic.megatron_checkpoint": str(Path(load).absolute()),
            "critic.megatron_checkpoint_step": values.get("ckpt_step"),
        }
        return keys | ({"critic.megatron_optimizer": True} if continues_critic(values) else {})
    return {}


def continues_critic(values: Values) -> bool:
    """True if the run continues the optimizer state of the checkpoint in --critic-load."""
    fresh = values.get("finetune") or values.get("no_load_optim")
    return not fresh and _critic_iteration(values) is not None


def _critic_iteration(values: Values) -> int | None:
    """Return the iteration of the checkpoint in --critic-load; None without one."""
    load = values.get("critic_load")
    if not load or "://" in load or not is_megatron_checkpoint(Path(load)):
        return None
    step = values.get("ckpt_step")
    return find_checkpoint(Path(load), step, key="--critic-load").iteration


def _is_model(path: str) -> bool:
    """True for a Hugging Face directory."""
    return (Path(path) / "config.json").is_file()


def _megatron(checkpoint: str, step: int | None) -> Keys:
    return {
        "megatron_checkpoint": str(Path(checkpoint).absolute()),
        "megatron_checkpoint_step": step,
    }


def _check_load(values: Values, name: str, save_name: str) -> None:
    """Refuse a folder of `--load` or `--critic-load` that has no weights.

    Launch scripts give one folder as --load and --save. It is absent or empty before the first
    start. Later it has the run's own store, from which a run of the same name continues.
    """
    load = values.get(name)
    if not load or same_folder(load, values.get("hf_checkpoint")):
        return
    folder = Path(load)
    has_content = "://" in load or (
        folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    )
    if not has_content or _is_model(load) or ("://" not in load and is_megatron_checkpoint(folder)):
        return
    if any(same_folder(load, values.get(flag)) for flag in (save_name, "save")):
        return
    option = FLAGS[name].option
    if (folder / "branches").is_dir():
        raise ConfigError(
            "a run does not continue from another store",
            where=option,
            found=load,
            expected="the folder of --save",
            do=f"give --save {load} and the run's name to continue the run, or --fork RUN for a "
            "new run",
        )
    raise ConfigError(
        "a run does not start from these weights",
        where=option,
        found=load,
        expected="a Megatron checkpoint (iter_…, latest_checkpointed_iteration.txt), a Hugging "
        "Face directory, or the folder of --save",
        do=f"check the path of {option}",
    )


def same_folder(path: str | None, other: str | None) -> bool:
    """True if both are the same folder."""
    if path is None or other is None:
        return False
    return path == other or Path(path).resolve() == Path(other).resolve()


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
