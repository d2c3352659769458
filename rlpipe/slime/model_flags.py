"""Convert slime's flags for the model and its checkpoints to `model.source`.

    model_source(values)               `--hf-checkpoint`, `--ref-load`, `--load`, `--ckpt-step`
    check_model(values, directory)     compare Megatron's model flags with config.json

slime reads the architecture from --hf-checkpoint. First weights come from --load if that folder has
a checkpoint, else from --ref-load, else from --hf-checkpoint. The reference is --ref-load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError
from rlpipe.slime.args import FLAGS
from rlpipe.slime.megatron_flags import MODEL
from rlpipe.system.megatron_weights import is_megatron_checkpoint

Values = Mapping[str, Any]
Keys = dict[str, Any]


def model_source(values: Values) -> Keys:
    """Return `model.source`; {} without --hf-checkpoint.

    Raises: ConfigError for flags that name weights which the run would not read, or that contradict
    config.json.
    """
    directory = values.get("hf_checkpoint")
    _check_load(values, "load", "save")
    _check_load(values, "critic_load", "critic_save")
    _check_teacher(values)
    if directory is None:
        return {}
    check_model(values, directory)
    source = {"type": "huggingface", "hf_checkpoint": directory}
    return {"model.source": source | _first_weights(values)}


def loads_checkpoint(values: Values) -> bool:
    """True if first weights come from the Megatron checkpoint in --load."""
    load = values.get("load")
    return bool(load) and "://" not in load and is_megatron_checkpoint(Path(load))


def _first_weights(values: Values) -> Keys:
    """Return the keys of `model.source` for weights outside --hf-checkpoint."""
    reference = values.get("ref_load")
    if same_folder(reference, values.get("hf_checkpoint")):
        reference = None
    if loads_checkpoint(values):
        uses_reference = values.get("use_kl_loss") or values.get("kl_coef")
        if uses_reference and not same_folder(reference, values["load"]):
            raise ConfigError(
                "the reference is the run's first weights, which come from --load",
                where="--ref-load",
                found=reference or values.get("hf_checkpoint"),
                expected=values["load"],
                do="start from the reference (without --load), or train without KL",
            )
        return _megatron(values["load"], values.get("ckpt_step"))
    if reference is None:
        return {}
    if (Path(reference) / "config.json").is_file():
        return {"hf_checkpoint": reference}
    return _megatron(reference, values.get("ref_ckpt_step"))


def _megatron(checkpoint: str, step: int | None) -> Keys:
    return {
        "megatron_checkpoint": str(Path(checkpoint).absolute()),
        "megatron_checkpoint_step": step,
    }


def _check_load(values: Values, name: str, save_name: str) -> None:
    """Refuse a folder of `--load` or `--critic-load` that has weights which the run cannot read.

    Launch scripts give one folder as --load and --save. It is absent or empty before the first
    start. Later it has the run's own store, from which a run of the same name continues.
    """
    load = values.get(name)
    is_critic = name == "critic_load"
    if not load or same_folder(load, values.get("hf_checkpoint")):
        return
    folder = Path(load)
    if is_critic and (folder / "config.json").is_file():
        return
    has_content = "://" in load or (
        folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    )
    if not has_content or (not is_critic and loads_checkpoint(values)):
        return
    is_own = any(same_folder(load, values.get(flag)) for flag in (save_name, "save"))
    is_weights = (folder / "config.json").exists() or is_megatron_checkpoint(folder)
    if is_own and not is_weights:
        return
    option = FLAGS[name].option
    if not is_weights and (folder / "branches").is_dir():
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
        expected="a Hugging Face directory"
        if is_critic
        else "a Megatron checkpoint (iter_…, latest_checkpointed_iteration.txt), or the folder of "
        "--save",
        do=_convert_first(load, option) if is_critic else f"give it as --hf-checkpoint {load}",
    )


def _check_teacher(values: Values) -> None:
    teacher = values.get("opd_teacher_load")
    if teacher and Path(teacher).is_dir() and not (Path(teacher) / "config.json").is_file():
        option = "--opd-teacher-load"
        raise ConfigError(
            "a teacher is not read from these weights",
            where=option,
            found=teacher,
            expected="a Hugging Face directory",
            do=_convert_first(teacher, option),
        )


def _convert_first(folder: str, option: str) -> str:
    return (
        "convert the Megatron checkpoint (rlpipe convert dist2hf "
        f"--input-dir {folder} --output-dir OUT --origin-hf-dir MODEL) and give {option} OUT"
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
