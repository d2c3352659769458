"""Weights that a run begins with and that come from files of their own.

    weight_sources(config)           role → path, iteration and configuration key
    local_directory(source, ...)     the weights as a Hugging Face directory on this node
    adam_directory(source, ...)      the optimizer state that a run continues
    source_record(source, ...)       path, iteration and sha256, for the node of the first weights
    prompts_record(config, ...)      the same of slime's position in the prompts

A role is "policy", "adapter", "reference", "critic" or "teacher". A plain Hugging Face directory of
the policy is no source of its own: the node of the first weights has its digest already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.config.model import HuggingFaceModel
from rlpipe.config.peft_directory import CONFIG, KEY, WEIGHTS, adapter_path
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.model_dir import contents_digest, given_directory, model_fingerprint
from rlpipe.system.megatron_weights import (
    converted_adam_state,
    converted_directory,
    find_checkpoint,
    is_megatron_checkpoint,
)
from rlpipe.system.model_files import read_object

FINGERPRINTS = Path("models", "fingerprints.json")
"""Cache of digests of files, below a home."""
MODELS = "models"
"""Folder of converted weights, below a home."""
SHAPES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Keys of config.json that give the shapes of a dense model's weights."""


@dataclass(frozen=True)
class WeightSource:
    """Files with the weights of one model of a run."""

    key: str
    """Configuration key of the path."""
    path: str
    """A Hugging Face directory, a name on the Hub, or a Megatron checkpoint."""
    step: int | None = None
    """Iteration of the Megatron checkpoint; None: the newest."""
    origin: str | None = None
    """Model directory with the architecture of a Megatron checkpoint; None: the policy's."""
    optimizer: bool = False
    """True if the run continues the optimizer state of the Megatron checkpoint."""

    @property
    def checkpoint(self) -> Path | None:
        """The path of a Megatron checkpoint; None for a Hugging Face model."""
        path = _absolute(self.path)
        is_model = (path / "config.json").is_file()
        return None if is_model or not is_megatron_checkpoint(path) else path


def weight_sources(config: RunConfig) -> dict[str, WeightSource]:
    """Return role → source of each model of the run whose weights are in files of their own."""
    sources = {}
    model = config.model.source
    if isinstance(model, HuggingFaceModel) and model.megatron_checkpoint is not None:
        sources["policy"] = WeightSource(
            "model.source.megatron_checkpoint",
            model.megatron_checkpoint,
            model.megatron_checkpoint_step,
            optimizer=model.megatron_optimizer,
        )
    if config.model.adapter is not None:
        sources["adapter"] = WeightSource(KEY, config.model.adapter)
    reference = config.reference
    if config.advantage.reference and reference.ref_load is not None:
        sources["reference"] = WeightSource(
            "reference.ref_load", reference.ref_load, reference.ref_ckpt_step
        )
    critic = config.critic
    if config.uses_critic and critic.megatron_checkpoint is not None:
        sources["critic"] = WeightSource(
            "critic.megatron_checkpoint",
            critic.megatron_checkpoint,
            critic.megatron_checkpoint_step,
            critic.hf_checkpoint,
            critic.megatron_optimizer,
        )
    elif config.uses_critic and critic.hf_checkpoint is not None:
        sources["critic"] = WeightSource("critic.hf_checkpoint", critic.hf_checkpoint)
    teacher = config.teacher
    is_used = config.advantage.use_opd and teacher.opd_type == "megatron"
    if is_used and teacher.opd_teacher_load is not None:
        sources["teacher"] = WeightSource(
            "teacher.opd_teacher_load", teacher.opd_teacher_load, teacher.opd_teacher_ckpt_step
        )
    return sources


def local_directory(source: WeightSource, model_dir: str, home: Path) -> str:
    """Return the Hugging Face directory of a source on this node.

    A model of the Hub is downloaded; a Megatron checkpoint is converted once, into `home`.
    `model_dir`: the policy's directory. Raises: ConfigError, ResourceError; errors of the
    conversion.
    """
    checkpoint = source.checkpoint
    if checkpoint is None and not source.key.endswith("megatron_checkpoint"):
        return str(given_directory(source.path, source.key))
    return str(
        converted_directory(
            checkpoint or _absolute(source.path),
            _origin(source, model_dir),
            home / MODELS,
            step=source.step,
            key=source.key,
        )
    )


def adam_directory(source: WeightSource | None, model_dir: str, home: Path) -> str | None:
    """Return the folder of the optimizer state that a run continues; None if it starts fresh.

    It is converted once, into `home`. Raises: as `local_directory`.
    """
    if source is None or not source.optimizer:
        return None
    return str(
        converted_adam_state(
            _absolute(source.path),
            _origin(source, model_dir),
            home / MODELS,
            step=source.step,
            key=source.key.replace("megatron_checkpoint", "megatron_optimizer"),
        )
    )


def _origin(source: WeightSource, model_dir: str) -> Path:
    """Return the directory with the architecture of a Megatron checkpoint."""
    return Path(model_dir) if source.origin is None else given_directory(source.origin, source.key)


def source_record(source: WeightSource, home: Path) -> dict[str, Any]:
    """Return path, iteration and digest of a source: {"path", "iteration", "sha256"}.

    `iteration` is that of a Megatron checkpoint. Raises: ConfigError if the files are missing.
    """
    cache = home / FINGERPRINTS
    if source.key == KEY:
        directory = adapter_path(source.path)
        digest = contents_digest([directory / CONFIG, directory / WEIGHTS], cache)
        return {"path": source.path, "iteration": None, "sha256": digest}
    checkpoint = source.checkpoint
    if checkpoint is None:
        directory = given_directory(source.path, source.key)
        return {
            "path": source.path,
            "iteration": None,
            "sha256": model_fingerprint(str(directory), cache),
        }
    found = find_checkpoint(checkpoint, source.step, key=source.key)
    return {
        "path": str(found.folder),
        "iteration": found.iteration,
        "sha256": contents_digest([*found.folder.rglob("*")], cache),
    }


def prompts_record(config: RunConfig, home: Path) -> dict[str, dict[str, Any]]:
    """Return {"prompts": record} of slime's position in the prompts; {} for all prompts.

    The configuration has the position itself. `sha256` is None if its file no longer exists.
    """
    position = config.data.slime_position
    if position is None:
        return {}
    path = Path(position.file) if position.file else None
    found = path is not None and path.is_file()
    return {
        "prompts": {
            "path": position.file,
            "epoch": position.epoch,
            "offset": position.offset,
            "sha256": contents_digest([path], home / FINGERPRINTS) if path and found else None,
        }
    }


def decisive_digests(config: RunConfig, records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return role → digest of the sources, other than the model directory, that decide results.

    `records`: role → `source_record`. The critic's weights are part of the recorded state, and the
    teacher's path of the settings.
    """
    digests = {}
    model = config.model.source
    if isinstance(model, HuggingFaceModel) and model.megatron_optimizer:
        digests["optimizer"] = records["policy"]["sha256"]
    if config.uses_critic and config.critic.megatron_optimizer:
        digests["critic's optimizer"] = records["critic"]["sha256"]
    if "adapter" in records:
        digests["adapter"] = records["adapter"]["sha256"]
    if "reference" in records:
        digests["reference"] = records["reference"]["sha256"]
    if (position := config.data.slime_position) is not None:
        # Two runs of the same weights have records of their own positions.
        digests["prompts"] = f"epoch {position.epoch}, offset {position.offset}"
    return digests


def check_shapes(directory: Path, model_dir: Path, key: str) -> None:
    """Check that a reference has the policy's architecture. Raises: ConfigError."""
    policy = read_object(model_dir / "config.json", "model.source")
    other = read_object(directory / "config.json", key)
    differing = [
        f"{name} {other.get(name)}, and {policy.get(name)} in the policy"
        for name in ("model_type", *SHAPES)
        if other.get(name) != policy.get(name)
    ]
    if differing:
        raise ConfigError(
            "the reference has another architecture than the policy",
            where=f"{key}: {directory}",
            found="; ".join(differing),
            expected="a model of the policy's architecture",
            do="for another architecture use a teacher: advantage.use_opd",
        )


def _absolute(path: str) -> Path:
    # pathlib's expanduser raises for "~unknown_user"; this one leaves the text unchanged.
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111
