"""The decoder in Megatron's local (not Transformer Engine) layers, with our attention and a norm that knows its parallelism.

`PolicyModel` ends before the logits: its last pipeline stage returns the final hidden states, and `vocab` turns only those
rows that a loss or a score asks for into log-probs, a chunk at a time. `ValueModel`, a critic, has one output in their place.

Not here: sizes and names (`bridge`), wrapping and optimizers (`model`).
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from rlpipe.engines.megatron.attention import CoreAttention


class Norm:
    """torch's RMSNorm or LayerNorm, marked so that its gradients are summed over sequence parallel ranks."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_unused) -> torch.nn.Module:
        assert not config.layernorm_zero_centered_gamma
        kind = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def block_spec(config: TransformerConfig) -> Any:
    """This pipeline stage's layers (a TransformerBlockSubmodules, whose own annotations are narrower than its use)."""
    block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        _use_our_norm(layer.submodules)
        _use_our_norm(layer.submodules.self_attention.submodules)
    block.layer_norm = Norm
    return block


def _use_our_norm(submodules) -> None:
    for name, value in vars(submodules).items():
        if value is WrappedTorchNorm:
            setattr(submodules, name, Norm)


class PolicyModel(GPTModel):
    """A GPT whose last stage returns hidden states [L, 1, H] (sharded over L if sequence parallel), not logits."""

    def _postprocess(self, hidden_states, *_args, **_keywords):
        return hidden_states

    def output_rows(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] hidden states of those positions, on every tensor parallel rank, in the weights' dtype."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
            return hidden_states[:, 0].index_select(0, rows).to(self.output_weight().dtype)
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states[:, 0].index_select(0, rows).to(self.output_weight().dtype)

    def output_weight(self) -> torch.Tensor:
        """[V / TP, H] this rank's shard of the output layer (the embedding if they are tied)."""
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        assert weight is not None, "not on the last pipeline stage"
        return weight


class ValueHead(torch.nn.Module):
    """One number per position: w·h + b in float32, whatever the dtype of the model. The same on all tensor parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] → [n] float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


class ValueModel(PolicyModel):
    """A GPT with a value head, which begins at 0, in place of its output layer."""

    def __init__(self, **keywords: Any) -> None:
        keywords["share_embeddings_and_output_weights"] = False
        super().__init__(**keywords)
        if self.post_process:
            self.output_layer = ValueHead(self.config)

    def values(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n] float32 at those positions, on every tensor parallel rank.

        All of them compute the same loss, so a sequence parallel rank takes its own part of the gradient; nothing is summed.
        """
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False, group=group)
        return self.output_layer(hidden_states[:, 0].index_select(0, rows))
