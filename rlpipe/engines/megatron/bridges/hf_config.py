"""A directory's config.json as mbridge reads it.

mbridge was written for transformers 4: it looks for rope's settings in other places than
transformers 5 has them, and where it does not find them trains without.

Not here: what is refused (`supported`), what the settings become in Megatron (the bridges).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from rlpipe.engines.megatron.bridges.supported import SAME_AS, check_config
from rlpipe.errors import ConfigError
from rlpipe.model_dir import read_object


def read_config(model_dir: str) -> PretrainedConfig:
    """The directory's config, of transformers' own class, with rope's fields where mbridge looks
    for them.

    Raises: ConfigError for a file that transformers does not take, and for what the trainer does
    not compute.
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
    return with_head_size(flat_rope(config))


def rope_of(config: Any) -> dict[str, Any]:
    """Its `rope_parameters`: `rope_type`, `rope_theta`, `factor` …"""
    return getattr(config, "rope_parameters", None) or {}


def flat_rope(config: PretrainedConfig) -> PretrainedConfig:
    """With rope where mbridge looks for it: transformers 5 computes with `rope_parameters`, version
    4 had flat names.

    A flat name may be there too, with the default of transformers' class (GLM's
    `partial_rotary_factor`): it does not count.
    """
    for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", None)):
        value = rope_of(config).get(name, getattr(config, name, default))
        if value is not None:
            setattr(config, name, value)
    return config


def with_head_size(config: PretrainedConfig) -> PretrainedConfig:
    """With a number for `head_dim`: mbridge reckons with it, where transformers (Mixtral) takes
    null for hidden size / heads."""
    known: Any = config
    if getattr(config, "head_dim", 0) is None:
        known.head_dim = known.hidden_size // known.num_attention_heads
    return config
