"""`read_config`: a directory's config.json in the form that mbridge reads.

mbridge was written for transformers 4. It does not find transformers 5's rope settings, and then
trains without them. So they are copied to the names of transformers 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from rlpipe.engines.megatron.bridges.supported import SAME_AS, VISION, check_config
from rlpipe.errors import ConfigError
from rlpipe.system.model_files import read_object


def read_config(model_dir: str) -> PretrainedConfig:
    """Return the directory's config, with the fields that mbridge reads.

    Raises: ConfigError for a file that transformers or the trainer does not support.
    """
    path = Path(model_dir) / "config.json"
    raw = read_object(path, "model")
    check_config(raw, str(path))
    kind = str(SAME_AS.get(raw["model_type"], raw["model_type"]))
    try:
        config = CONFIG_MAPPING[kind].from_dict({**raw, "model_type": kind})
    except (ValueError, LookupError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(
            "not a model's configuration", where=str(path), found=f"{type(error).__name__}: {error}"
        ) from error
    return with_head_size(flat_rope(with_rotated_share(_language_model(config))))


def _language_model(config: PretrainedConfig) -> PretrainedConfig:
    """Return the text model's config of a model with vision, with the whole config as `whole`."""
    if config.model_type not in VISION:
        return config
    whole: Any = config
    text = whole.text_config
    text.whole = whole
    text.model_type = whole.model_type
    text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def yarn_fields(config: Any) -> dict[str, Any]:
    """Return the attributes of Megatron's configuration for a YaRN rotation of whole heads.

    Empty for other rotations.
    """
    rope = rope_of(config)
    if rope.get("rope_type") != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": rope.get("mscale") or None,
        "yarn_mscale_all_dim": rope.get("mscale_all_dim") or None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def rope_of(config: Any) -> dict[str, Any]:
    """Return a config's `rope_parameters`: `rope_type`, `rope_theta`, `factor` …"""
    return getattr(config, "rope_parameters", None) or {}


def flat_rope(config: PretrainedConfig) -> PretrainedConfig:
    """Copy `rope_parameters` of transformers 5 to the flat names of transformers 4."""
    for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", None)):
        # `rope_parameters` goes first: a flat name may be only the default of transformers' class
        # (GLM's `partial_rotary_factor`).
        value = rope_of(config).get(name, getattr(config, name, default))
        if value is not None:
            setattr(config, name, value)
    return config


def with_rotated_share(config: PretrainedConfig) -> PretrainedConfig:
    """Set `partial_rotary_factor` from `rotary_dim` (MiniMax-M2), which transformers ignores."""
    known: Any = config
    if getattr(config, "rotary_dim", None):
        known.rope_parameters["partial_rotary_factor"] = known.rotary_dim / known.head_dim
    return config


def with_head_size(config: PretrainedConfig) -> PretrainedConfig:
    """Replace a `head_dim` of null by hidden size / heads, as transformers (Mixtral) does.

    mbridge computes with the number.
    """
    known: Any = config
    if getattr(config, "head_dim", 0) is None:
        known.head_dim = known.hidden_size // known.num_attention_heads
    return config
