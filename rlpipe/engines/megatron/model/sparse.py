"""Sparse attention of GLM-5: each query sees the keys that an indexer selects.

An indexer scores every earlier key, and the query sees the `index_topk` best:

    score(s, t) = Σ_h w_h(s) · relu(q_h(s) · k(t)) / sqrt(D) / sqrt(heads),   t ≤ s

A layer has an indexer of its own, or uses the selection of the last layer with one. Selections have
no gradient, so indexers are not trained. Samples of at most `index_topk` tokens see all keys and
need no selection. For longer ones, attention is computed with masks of [n, l, l].

Legend: L packed tokens, D size of an indexer's head, n segments of a block, l tokens of its longest
segment.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, relu

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlpipe.engines.megatron.model.attention import Block, CoreAttention, PackedLayout
from rlpipe.errors import ConfigError

# DeepSeek's and GLM's code uses this value, whatever rms_norm_eps is.
_KEY_NORM_EPS = 1e-6


class SparseCoreAttention(CoreAttention):
    """Attention of each query to the keys that the indexer of layer `source` selected."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self._source = source_layer(config, self.layer_number)

    def masks(self, layout: PackedLayout) -> list[torch.Tensor] | None:
        """Return the mask of each block; None if no sample is long enough to select keys."""
        return layout.selections.get(self._source)


class Indexer(torch.nn.Module):
    """The projections of an indexer. They are not trained, and equal on tensor parallel ranks."""

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__()
        settings: Any = config
        self._heads: int = settings.dsa_indexer_n_heads
        self._size: int = settings.dsa_indexer_head_dim
        self._rotated = config.qk_pos_emb_head_dim
        self._top_k: int = settings.dsa_indexer_topk
        self._interleaved: bool = settings.indexer_rope_interleave
        shapes = {
            "wq_b": (self._heads * self._size, config.q_lora_rank),
            "wk": (self._size, config.hidden_size),
            "weights_proj": (self._heads, config.hidden_size),
            "k_norm": (self._size,),
            "k_norm_bias": (self._size,),
        }
        for name, shape in shapes.items():
            weight = torch.empty(shape, dtype=config.params_dtype)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    def selects(self, layout: PackedLayout) -> bool:
        """True if a sample has more tokens than a query may see."""
        return int(layout.lengths.max()) > self._top_k

    @torch.no_grad()
    def masks(
        self,
        hidden: torch.Tensor,
        latents: torch.Tensor,
        layout: PackedLayout,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the mask [n, 1, l, l] of each block, True if the query sees the key.

        Shapes: hidden [L, H]; latents [L, q_lora_rank], normalised; angles [L, rotated / 2] each.
        """
        weights: Any = self
        query = linear(latents, weights.wq_b).unflatten(-1, (self._heads, self._size))
        key = layer_norm(
            linear(hidden, weights.wk),
            (self._size,),
            weights.k_norm,
            weights.k_norm_bias,
            _KEY_NORM_EPS,
        )
        query = self._rotate(query, angles).float()
        key = self._rotate(key[:, None], angles)[:, 0].float()
        scale = (self._size * self._heads) ** -0.5
        factors = linear(hidden, weights.weights_proj).float() * scale
        return [self._mask(query, key, factors, block) for block in layout.blocks]

    def _mask(
        self, query: torch.Tensor, key: torch.Tensor, factors: torch.Tensor, block: Block
    ) -> torch.Tensor:
        rows = block.queries.flatten()
        shape = block.queries.shape
        queries = query.index_select(0, rows).unflatten(0, shape)
        keys = key.index_select(0, rows).unflatten(0, shape).transpose(1, 2)
        of_heads = factors.index_select(0, rows).unflatten(0, shape)
        scores = torch.zeros(*shape, shape[1], device=query.device)
        # One head at a time: [n, l, l] of all heads together would not fit on a GPU.
        for head in range(self._heads):
            scores += of_heads[..., head, None] * relu(queries[:, :, head] @ keys)
        causal = torch.ones_like(scores, dtype=torch.bool).tril_()
        scores.masked_fill_(~causal, float("-inf"))
        best = scores.topk(min(self._top_k, shape[1]), -1).indices
        return (torch.zeros_like(causal).scatter_(-1, best, True) & causal)[:, None]

    def _rotate(
        self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Rotate the first features of [L, heads, D].

        The order of the rotated features does not matter: only products of q and k are used.
        """
        turned, kept = heads.split((self._rotated, self._size - self._rotated), -1)
        cosine, sine = (angle[:, None].to(heads.dtype) for angle in angles)
        first, second = (
            (turned[..., ::2], turned[..., 1::2]) if self._interleaved else turned.chunk(2, -1)
        )
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine, kept], -1)


def source_layer(config: MLATransformerConfig, layer_number: int) -> int:
    """Return the number (from 1) of the layer that selects the keys of `layer_number`."""
    settings: Any = config
    kinds: list[str] = settings.indexer_types[:layer_number]
    return layer_number - kinds[::-1].index("full")


def check_layout(config: MLATransformerConfig) -> None:
    """Raises: ConfigError for context parallelism, or if a layer would use a selection of another
    pipeline stage."""
    if config.context_parallel_size > 1:
        raise ConfigError(
            "sparse attention is not split over context parallel ranks",
            where="train.parallel.context_parallel_size",
            found=config.context_parallel_size,
            expected=1,
        )
    settings: Any = config
    stages = range(config.pipeline_model_parallel_size)
    chunks = range(config.virtual_pipeline_model_parallel_size or 1)
    for stage, chunk in product(stages, chunks):
        first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage) + 1
        if settings.indexer_types[first - 1] != "full":
            raise ConfigError(
                "a layer uses the selection of a layer on another pipeline stage",
                where="train.parallel.pipeline_model_parallel_size",
                found=f"layer {first} begins a stage and uses layer {source_layer(config, first)}",
                expected="a layer with an indexer at the beginning of every stage",
                do="set the layers of each stage with train.megatron."
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
            )


def gathered_sequence(local: torch.Tensor, config: MLATransformerConfig) -> torch.Tensor:
    """Return [L, size] of [L / TP, 1, size] with sequence parallelism."""
    if config.sequence_parallel:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        local = gather_from_sequence_parallel_region(local, group=group)
    return local[:, 0]
