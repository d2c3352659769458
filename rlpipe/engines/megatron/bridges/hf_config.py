"""A directory's config.json as mbridge reads it, checked for what no bridge would do: it must not be left out in silence.

mbridge was written for transformers 4: it looks for rope's settings in other places than transformers 5 has them, and where it
does not find them trains without.

Not here: what the settings become in Megatron (the bridges).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from rlpipe.errors import ConfigError
from rlpipe.model_dir import check_sizes

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers does not know, and those that they are by another name."""
_ROPES = {"llama": ("default", "linear", "llama3"), "deepseek_v3": ("default", "yarn"), "glm4_moe_lite": ("default", "yarn")}
"""What bridges make of `rope_type`, where it is more than the default."""
_FP8_BLOCK = [128, 128]


def read_config(model_dir: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """The directory's config, of transformers' own class where it has one, with rope's fields where mbridge looks for them.

    Raises: ConfigError for a file that transformers does not take; for a rotation or a quantisation that would be left out.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        check_sizes(raw, str(path))
        kind = str(SAME_AS.get(raw.get("model_type"), raw.get("model_type")))
        if kind in CONFIG_MAPPING:
            config = CONFIG_MAPPING[kind].from_dict({**raw, "model_type": kind})
        else:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, StrictDataclassError) as error:
        raise ConfigError("not a model's configuration", where=str(path), found=f"{type(error).__name__}: {error}") from error
    _check_rope(config, model_dir)
    _check_quantisation(config, model_dir)
    return flat_rope(config)


def rope_of(config: Any) -> dict[str, Any]:
    """Its `rope_parameters`: `rope_type`, `rope_theta`, `factor` …"""
    return getattr(config, "rope_parameters", None) or {}


def _check_rope(config: Any, model_dir: str) -> None:
    found, known = rope_of(config).get("rope_type", "default"), _ROPES.get(config.model_type, ("default",))
    if found not in known:
        raise ConfigError(
            "this model type is not trained with this rotation of positions",
            where=f"{model_dir}/config.json: rope_scaling",
            found=found,
            expected=f"one of {', '.join(known)} for {config.model_type}",
            do="leave it out, if the run stays within the length that the model was trained with",
        )


def _check_quantisation(config: Any, model_dir: str) -> None:
    found = getattr(config, "quantization_config", None)
    if found and (found.get("quant_method") != "fp8" or found.get("weight_block_size") != _FP8_BLOCK):
        raise ConfigError(
            "weights that are quantised like this are not read",
            where=f"{model_dir}/config.json: quantization_config",
            found=f"{found.get('quant_method')}, blocks of {found.get('weight_block_size')}",
            expected=f"none, or fp8 in blocks of {_FP8_BLOCK}",
            do="take the model's bf16 directory",
        )


def flat_rope(config: PretrainedConfig) -> PretrainedConfig:
    """With rope where mbridge looks for it: transformers 5 keeps it under `rope_parameters`, version 4 had flat names."""
    for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", None)):
        value = rope_of(config).get(name, default)
        if value is not None and not hasattr(config, name):
            setattr(config, name, value)
    return config
