"""Fixtures: tiny models on disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.megatron.sizes import SIZES

DEEP: dict[str, Any] = {"num_hidden_layers": 4}
"""Layers for two chunks on each of two pipeline stages."""


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Directories of random models by family; weights wide enough that their logits differ."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    }
    made = {
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True, tie_word_embeddings=False)
        ),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
        "qwen3_moe_deep": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SIZES | DEEP, **experts, norm_topk_prob=True, tie_word_embeddings=False
            )
        ),
        "qwen3_deep": Qwen3ForCausalLM(
            Qwen3Config(**SIZES | DEEP, head_dim=16, tie_word_embeddings=True)
        ),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    }
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    for name, model in made.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.12, generator=generator)
        model.save_pretrained(root / name)
    return {name: str(root / name) for name in made}
