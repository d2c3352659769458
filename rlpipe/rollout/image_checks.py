"""`checked_image_reader`: how a run reads images. Refuses what does not read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlpipe.config.data import FilePrompts
from rlpipe.config.run import RunConfig
from rlpipe.data.image_reader import MODEL_TYPES, ImageReader, load_image_reader
from rlpipe.errors import ConfigError

KEY = "data.multimodal_keys"


def checked_image_reader(config: RunConfig, directory: str | Path) -> ImageReader | None:
    """Return the reader of a run with images; None without `data.multimodal_keys`.

    `directory`: of the model. Raises: ConfigError with the key.
    """
    if not config.data.multimodal_keys:
        return None
    reader = load_image_reader(directory)
    if reader is None:
        raise ConfigError(
            "the model reads no images",
            where=KEY,
            found=f"{directory}/config.json",
            expected=f"model_type: {' or '.join(MODEL_TYPES)}",
            do=f"use such a model, or remove {KEY}",
        )
    if (prompts := config.data.prompts) is not None and not isinstance(prompts, FilePrompts):
        raise ConfigError(
            "only prompts of files have images",
            where=KEY,
            found=f"data.prompts.type: {prompts.type}",
            do="use data.prompts.type: file",
        )
    if key := next((key for key, is_set in _refused(config).items() if is_set), None):
        raise ConfigError(
            "a run with images in its prompts does not have this yet",
            where=key,
            found=f"{KEY}: {config.data.multimodal_keys}",
            do=f"remove {key}, or train on prompts of text",
        )
    return reader


def _refused(config: RunConfig) -> dict[str, Any]:
    """Return key → its value, for keys whose code does not read images."""
    rollout = config.rollout
    prompts = config.data.prompts
    return {
        "data.prompts.rejected_key": isinstance(prompts, FilePrompts) and prompts.rejected_key,
        "rollout.environment": rollout.environment,
        "rollout.tools": rollout.tools,
        "rollout.custom_generate_function_path": rollout.custom_generate_function_path,
        "rollout.rollout_function_path": rollout.rollout_function_path,
        "rollout.eval_function_path": rollout.eval_function_path,
        "rollout.data_source_path": rollout.data_source_path,
        "rollout.buffer_filter_path": rollout.buffer_filter_path,
        "evaluation.datasets.custom_generate_function_path": any(
            one.custom_generate_function_path for one in config.evaluation.datasets
        ),
        "advantage.use_opd": config.advantage.use_opd,
        "train.lora": config.train.lora,
        "resources.external_engines": config.resources.external_engines,
    }
