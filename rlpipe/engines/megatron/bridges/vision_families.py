"""`VISION_FAMILIES`: the model types that read images, as `supported_families.FAMILIES`.

Each entry was decided by comparing the log-probs of a tiny model in the trainer and in transformers
(`tests/engines/megatron/model/test_vision.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.engines.megatron.bridges.family import (
    MROPE,
    WINDOWS,
    Family,
    Problem,
    check_window_by_layer,
    words,
)

_IMAGE_TOKENS = words("""
    image_token_id video_token_id vision_end_token_id vision_start_token_id vision_token_id
""")
_TOWER = words("""
    depth hidden_act hidden_size in_channels in_chans intermediate_size num_heads out_hidden_size
    patch_size spatial_merge_size spatial_patch_size temporal_patch_size
""")


def _check_sections(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of models that read images: each frequency of a head rotates by one position.

    Only whole heads, of a size that is a power of two, have a fused rotation.
    """
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sections = _rope(config).get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3 or 2 * sum(sections) != size:
        yield "mrope_section", sections, f"mrope_section: three numbers with the sum {size // 2}"
    if size & (size - 1):
        yield "head_dim", size, "head_dim: a power of two"


def _check_interleaved(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Rule of Qwen3-VL: SGLang reads a key that transformers takes for granted."""
    if (found := _rope(config).get("mrope_interleaved")) is not True:
        yield "mrope_interleaved", found, "mrope_interleaved: true, in the rotation"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


VISION_FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        ropes=("default", "mrope"),
        reads=WINDOWS | _IMAGE_TOKENS,
        rope_keys=MROPE,
        rules=(check_window_by_layer, _check_sections),
        defaults={
            "hidden_size": 8192,
            "max_position_embeddings": 32768,
            "max_window_layers": 80,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
        },
        tower=_TOWER | words("fullatt_block_indexes tokens_per_second window_size"),
    ),
    "qwen3_vl": Family(
        ropes=("default", "mrope"),
        reads=_IMAGE_TOKENS,
        only={"attention_bias": (None, False)},
        rope_keys=MROPE,
        rules=(_check_sections, _check_interleaved),
        defaults={"head_dim": 128},
        tower=_TOWER | words("deepstack_visual_indexes num_position_embeddings"),
    ),
}
"""transformers' model type → its support."""
