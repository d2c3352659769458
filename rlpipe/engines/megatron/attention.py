"""Attention over packed segments, for any device and without Transformer Engine.

A micro-batch is one sequence of L tokens: its samples' segments, one after another. `PackedLayout` says where they are and
holds the index tensors that attention needs, made once per micro-batch. `CoreAttention` reads it:

- CUDA in 16 bit: torch's varlen (flash) attention on the packed tensors.
- otherwise: segments of similar length are gathered into a padded [n, l] block for one causal SDPA call. Padding stands on
  the right, so the causal rule alone keeps it out.
- context parallel: zigzag slices (rank r of c holds chunks r and 2c-1-r of every segment); keys and values are gathered
  over the ranks and masked by position.

Not here: which samples share a micro-batch (`rlpipe.packing`), how their tokens are laid out (`batch`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention

_VARLEN = inspect.signature(varlen_attn).parameters
_VARLEN_CAUSAL: dict[str, Any] = {"is_causal": True} if "is_causal" in _VARLEN else {"window_size": (-1, 0)}


@dataclass(slots=True)
class Block:
    """n segments of similar length. Indices into the packed tokens; where a segment is shorter, its last position repeats."""

    queries: torch.Tensor
    """[n, l] int64, into this rank's tokens."""
    keys: torch.Tensor
    """[n, l'] int64, into all ranks' tokens; the same tensor as `queries` without context parallelism."""
    mask: torch.Tensor | None
    """[n, 1, l, l'] bool, True where a query may look; None: causal."""


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's own description of packed segments (its rotary embedding reads it), and the blocks of them."""

    blocks: list[Block] = field(default_factory=list)
    order: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[L] int64: for every local token its place in the concatenated, flattened blocks."""


def packed_layout(lengths: np.ndarray, cp_size: int, cp_rank: int, device: torch.device) -> PackedLayout:
    """The layout of segments of `lengths` tokens (multiples of 2 × cp_size if cp_size > 1), as rank `cp_rank` sees it."""
    lengths = np.asarray(lengths, np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    blocks, flat, base = [], np.empty(offsets[-1] // cp_size, np.int64), 0
    for members in _similar(lengths):
        queries, keys, mask, real = _block(lengths, offsets, members, cp_size, cp_rank)
        flat[queries[real]] = base + np.flatnonzero(real)
        base += queries.size
        on_device = torch.from_numpy(queries).to(device)
        blocks.append(
            Block(
                on_device,
                on_device if cp_size == 1 else torch.from_numpy(keys).to(device),
                None if mask is None else torch.from_numpy(mask[:, None]).to(device),
            )
        )
    cumulative, longest = torch.from_numpy(offsets.astype(np.int32)).to(device), int(lengths.max())
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=blocks,
        order=torch.from_numpy(flat).to(device),
    )


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of segments, in groups whose longest is less than twice its shortest."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or 2 * lengths[order[i]] <= lengths[order[start]]:
            groups.append(order[start:i])
            start = i
    return groups


def _block(lengths, offsets, members, cp_size: int, cp_rank: int):
    """Query and key indices, mask, and which query slots are real: all [n, ...] NumPy."""
    size, start = lengths[members][:, None], offsets[members][:, None] // cp_size
    slot = np.arange(size.max() // cp_size)[None]
    real = slot < size // cp_size
    queries = start + np.minimum(slot, size // cp_size - 1)
    if cp_size == 1:
        return queries, queries, None, real
    chunk, total = size // (2 * cp_size), offsets[-1] // cp_size
    slot = np.minimum(slot, size // cp_size - 1)
    seen = np.where(slot < chunk, cp_rank, 2 * cp_size - 2 - cp_rank) * chunk + slot
    position = np.minimum(np.arange(size.max())[None], size - 1)
    owner = np.minimum(position // chunk, 2 * cp_size - 1 - position // chunk)
    keys = owner * total + start + np.where(position // chunk == owner, 0, chunk) + position % chunk
    inside = np.arange(size.max())[None] < size
    mask = (position[:, None, :] <= seen[:, :, None]) & inside[:, None, :]
    return queries, keys, mask, real


class CoreAttention(DotProductAttention):
    """Causal attention inside each packed segment: [L, heads, head size] → [L, heads × value size]."""

    def __init__(self, config, *args, pg_collection, **keywords) -> None:
        """The base class refuses context parallelism, and latent attention's `k_channels` and `v_channels`."""
        keywords = {name: value for name, value in keywords.items() if name not in ("k_channels", "v_channels")}
        context_parallel, config.context_parallel_size = config.context_parallel_size, 1
        try:
            super().__init__(config, *args, pg_collection=pg_collection, **keywords)
        finally:
            config.context_parallel_size = context_parallel
        self.cp_group = pg_collection.cp

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, attention_bias=None, **_unused) -> torch.Tensor:
        layout = packed_seq_params
        assert isinstance(layout, PackedLayout)
        assert attention_mask is None
        assert attention_bias is None
        parallel = self.cp_group.size() > 1
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not parallel:
            return self._varlen(query, key, value, layout)
        if parallel:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        parts = [self._padded(query, key, value, block) for block in layout.blocks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, layout.order)

    def _padded(self, query, key, value, block: Block) -> torch.Tensor:
        """[n × l, heads × value size]."""
        (n, queries), keys = block.queries.shape, block.keys.shape[1]
        q = query.index_select(0, block.queries.flatten()).view(n, queries, *query.shape[1:]).transpose(1, 2)
        k = key.index_select(0, block.keys.flatten()).view(n, keys, *key.shape[1:]).transpose(1, 2)
        v = value.index_select(0, block.keys.flatten()).view(n, keys, *value.shape[1:]).transpose(1, 2)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            dropout_p=self._dropout(),
            scale=self.softmax_scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.transpose(1, 2).reshape(n * queries, -1)

    def _varlen(self, query, key, value, layout: PackedLayout) -> torch.Tensor:
        assert self._dropout() == 0.0, "torch's varlen attention has no dropout"
        if groups := query.size(1) // key.size(1) - 1:
            key, value = key.repeat_interleave(groups + 1, 1), value.repeat_interleave(groups + 1, 1)
        options: dict[str, Any] = _VARLEN_CAUSAL | ({"scale": self.softmax_scale} if "scale" in _VARLEN else {})
        segments, longest = layout.cu_seqlens_q, layout.max_seqlen_q
        out: Any = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            segments,
            segments,
            longest,
            longest,
            **options,
        )
        return out.flatten(1)

    def _dropout(self) -> float:
        return self.attention_dropout.p if self.training else 0.0
