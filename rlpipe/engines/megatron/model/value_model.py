"""`ValueModel`: the critic, the policy's decoder with a value head in place of the output layer.

`RewardModel` is the same for the loss of preference pairs.
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from rlpipe.engines.megatron.model.layers import PolicyModel


class ValueHead(torch.nn.Module):
    """One value per position: w·h + b in float32 for any dtype of the model.

    Equal on all tensor parallel ranks. `biased` False: b = 0.
    """

    def __init__(self, config: TransformerConfig, *, biased: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.bias = (
            torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if biased else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values [n] float32 of hidden states [n, H]."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)[:, 0]


class ValueModel(PolicyModel):
    """A GPT with a value head, initially 0, in place of its output layer."""

    biased = True

    def __init__(self, **keywords: Any) -> None:
        keywords["share_embeddings_and_output_weights"] = False
        super().__init__(**keywords)
        if self.post_process:
            self.output_layer = ValueHead(self.config, biased=self.biased)

    def values(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the values [n] float32 at `rows`, on every tensor parallel rank."""
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            # Every tensor parallel rank computes the same loss. So each sequence parallel rank
            # takes its own part of the gradient, and nothing is summed.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=group
            )
        return self.output_layer(hidden_states[:, 0].index_select(0, rows))


class RewardModel(ValueModel):
    """A value model without bias, as transformers' models for sequence classification.

    Pairs do not determine a bias: its gradient is rounding error, which Adam would scale up.
    """

    biased = False
