"""Llama 3, 3.1, 3.2, 3.3: rotation stretched for long contexts, tied embeddings.

mbridge's bridge takes any `rope_scaling` for a linear one, and no model for tied.
"""

from __future__ import annotations

from typing import Any

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge, register_model
from mbridge.models.llama import LLaMABridge

from rlpipe.engines.megatron.bridges.hf_config import rope_of


@register_model("llama")
class Llama(LLaMABridge):
    """mbridge's, mended."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        rope = rope_of(self.hf_config)
        found = LLMBridge._get_gptmodel_args(self)
        if rope.get("rope_type") == "linear":
            found["seq_len_interpolation_factor"] = rope["factor"]
        if rope.get("rope_type") == "llama3":
            found |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        return found

    def _adjust_mapping_for_shared_weights(self) -> None:
        if getattr(self.hf_config, "tie_word_embeddings", False):
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _get_hf_shared_weight_keys(self) -> list[str]:
        return (
            ["model.embed_tokens.weight"]
            if getattr(self.hf_config, "tie_word_embeddings", False)
            else []
        )
