"""Adapters to train, and the directory of PEFT with the first ones: `train.lora`, `model.adapter`.

    adapter_conflict(config)         keys of a run that contradict each other
    check_adapter(directory, lora)   adapter_config.json has the run's rank, scale and layers
    other_base(config)               a remark if the adapters were trained on another model

The tensors are checked by `rlpipe.engines.megatron.checkpoint.first_adapters`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.train import LORA_TARGETS, LoraConfig
from rlpipe.errors import ConfigError
from rlpipe.system.model_files import read_object

if TYPE_CHECKING:
    from rlpipe.config.run import RunConfig

KEY = "model.adapter"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "alora_invocation_tokens",
    "use_qalora",
)
"""Settings of PEFT that change the adapters' shapes or sums, if they are set."""


def adapter_conflict(config: RunConfig) -> str | None:
    """Return keys of a run that cannot be used with adapters, as a sentence; None if all can be."""
    model = config.model
    if config.train.lora is None:
        if config.sync.transport == "adapter":
            return "sync.transport: adapter needs train.lora, whose adapters it pushes"
        needed = "model.adapter needs train.lora, whose first adapters it has"
        return needed if model.adapter is not None else None
    if config.sync.transport == "adapter" and (other := _push_conflict(config)):
        return f"sync.transport: adapter cannot be used with {other}; set sync.transport: tensor"
    conflicts = {
        "advantage.advantage_estimator: ppo, whose critic trains all weights": config.uses_critic,
        "reference.ref_load: the reference has the policy's frozen weights": (
            config.reference.ref_load is not None
        ),
        "model.adapter and a warm start: both give first weights": (
            model.adapter is not None and config.start_from is not None
        ),
        "model.source.megatron_optimizer, whose state is of all weights": (
            isinstance(model.source, HuggingFaceModel) and model.source.megatron_optimizer
        ),
    }
    found = next((text for text, conflict in conflicts.items() if conflict), None)
    return found and f"train.lora cannot be used with {found}"


def _push_conflict(config: RunConfig) -> str | None:
    """Return keys that cannot be used with pushes of adapters, as a sentence; None if all can."""
    resources = config.resources
    conflicts = {
        "engine.quantization: the frozen weights of trainer and engines would differ": (
            config.engine.quantization is not None
        ),
        "sync.in_flight: in_place, whose requests keep the adapter that they began with": (
            config.sync.in_flight == "in_place"
        ),
        "sync.check_weight_update_equal, which compares all weights": (
            config.sync.check_weight_update_equal
        ),
        "resources.external_engines: it needs servers that the run starts": bool(
            resources.external_engines
        ),
        "resources.offload_rollout: engines keep the frozen weights": resources.engines_sleep,
    }
    return next((text for text, conflict in conflicts.items() if conflict), None)


def adapter_path(path: str) -> Path:
    """Return the absolute path of `model.adapter`."""
    return Path(path).expanduser().absolute()


def check_adapter(directory: Path, lora: LoraConfig) -> None:
    """Check a directory's files and configuration. Raises: ConfigError with the values to set."""
    where = f"{KEY}: {directory}"
    missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            "not a directory of PEFT",
            where=where,
            found=f"no {' and no '.join(missing)}",
            expected=f"{CONFIG} and {WEIGHTS}",
            do="save the adapters with `model.save_pretrained(DIRECTORY)` of PEFT",
        )
    settings = read_object(directory / CONFIG, KEY)
    used = [name for name in _UNSUPPORTED if settings.get(name)]
    used += ["bias"] if settings.get("bias", "none") != "none" else []
    if settings.get("peft_type") != "LORA" or used:
        raise ConfigError(
            "these adapters cannot be trained",
            where=f"{where}/{CONFIG}",
            found=", ".join(f"{name}: {settings[name]}" for name in used)
            or f"peft_type: {settings.get('peft_type')}",
            expected="plain LoRA with one rank and one scale for all layers",
        )
    _check_values(settings, lora, f"{where}/{CONFIG}")


def _check_values(settings: dict[str, Any], lora: LoraConfig, where: str) -> None:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise ConfigError("not a configuration of LoRA", where=where, found=f"r: {rank}")
    if settings.get("use_rslora"):
        # Its scale is alpha / sqrt(rank).
        alpha *= math.sqrt(rank)
    targets = settings.get("target_modules")
    names = set(targets) if isinstance(targets, list) else None
    unknown = sorted((names or set()) - {*LORA_TARGETS})
    if names is None or unknown:
        raise ConfigError(
            "these adapters are on layers that cannot be trained",
            where=f"{where}: target_modules",
            found=", ".join(unknown) or targets,
            expected=f"a list of {', '.join(LORA_TARGETS)}",
        )
    found = LoraConfig(
        rank=rank,
        alpha=float(alpha),
        target_modules=tuple(name for name in LORA_TARGETS if name in names),
    )
    if found != lora:
        raise ConfigError(
            "these adapters are not those of train.lora",
            where=where,
            found=_text(found),
            expected=_text(lora),
            do=f"set train.lora={{rank: {found.rank}, alpha: {found.alpha:.12g}, "
            f"target_modules: [{', '.join(found.target_modules)}]}}",
        )


def _text(lora: LoraConfig) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha:g}, {', '.join(lora.target_modules)}"


def other_base(config: RunConfig) -> list[str]:
    """Return a remark if adapter_config.json names another base model than the run's."""
    source = config.model.source
    if config.model.adapter is None or not isinstance(source, HuggingFaceModel):
        return []
    settings = read_object(adapter_path(config.model.adapter) / CONFIG, KEY)
    base = settings.get("base_model_name_or_path")
    own = source.hf_checkpoint.partition("@")[0]
    # A copy of a model keeps the last part of its name.
    if not base or Path(base).name == Path(own).name:
        return []
    return [f"{KEY}: its {CONFIG} names the base model {base}, and the run has {own}"]


def adapter_config(lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """Return the content of PEFT's configuration. `base`: the model's name or directory."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def with_resident_engines(values: dict[str, Any]) -> dict[str, Any]:
    """Return plain values with which the engines of a run that pushes adapters keep their weights.

    Without `resources.offload_rollout`, engines on shared GPUs might release them.
    """
    sync = values.get("sync")
    resources = values.get("resources", {})
    if not (isinstance(sync, dict) and sync.get("transport") == "adapter"):
        return values
    if not isinstance(resources, dict):
        return values  # the field's error names it
    return {**values, "resources": {"offload_rollout": False, **resources}}
