"""Sizes that the tiny models of these tests have, as transformers names them."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
