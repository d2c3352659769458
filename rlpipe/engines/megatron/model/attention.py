"""`CoreAttention`: attention over packed segments, for any device and without Transformer Engine.

A micro-batch is one sequence of L tokens: the concatenated segments of its samples. `PackedLayout`
holds their lengths and makes the index tensors of attention at first use.

- CUDA in 16 bit: flash attention over the packed tensors (`varlen`).
- otherwise: segments of similar length are gathered into a padded [n, l] block for one causal SDPA
  call. Padding is on the right, so the causal mask alone excludes it.
- context parallel: zigzag slices (rank r of c holds chunks r and 2c-1-r of every segment). Keys and
  values are gathered over the ranks. For flash attention, each chunk of queries is a separate
  segment with all keys up to the chunk's end, so that only the causal triangle is masked. Blocks
  use an explicit mask.
- sinks (`softmax_type: learnable`) and windows (`window_size`): torch's flash attention, or
  explicit scores [n, heads, l, l'] of blocks.

Legend: L local packed tokens, n segments of a block, l tokens of its longest segment, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlpipe.engines.megatron import platform

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention

from rlpipe.engines.megatron.model.varlen import Segments, attend, attend_with_sinks


@dataclass(slots=True)
class Block:
    """n segments of similar length, as indices into the packed tokens.

    The last position of a shorter segment repeats.
    """

    queries: torch.Tensor
    """[n, l] int64, into this rank's tokens."""
    keys: torch.Tensor
    """[n, l'] int64, into all ranks' tokens. Equal to `queries` without context parallelism."""
    mask: torch.Tensor | None
    """[n, 1, l, l'] bool, True if the query sees the key; None: causal."""
    positions: torch.Tensor
    """[n, l] int64: each query's position in its segment. Keys are in the order of positions."""


@dataclass(slots=True, frozen=True)
class Rotations:
    """Positions in time, height and width, and which of the three rotates each frequency."""

    positions: torch.Tensor
    """[3, L] int64. None exceeds the tokens of its segment."""
    axes: torch.Tensor
    """[D / 2] int64: 0, 1 or 2."""

    def of_frequencies(self) -> torch.Tensor:
        """Return the position of every local token for each frequency: [L, D / 2] int64."""
        return self.positions.index_select(0, self.axes).T


@dataclass
class PackedLayout(PackedSeqParams):
    """The layout of packed segments and the index tensors of attention.

    Megatron's rotary embedding reads the fields of the base class.
    """

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[segments] int64: tokens over all context parallel ranks."""
    cp_size: int = 1
    cp_rank: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[L] int64: each local token's position in its segment."""
    rotations: Rotations | None = None
    """Positions of images and text; None: each token has its position in its segment."""
    deep_features: list[torch.Tensor] = field(default_factory=list)
    """Number of a first layer → [L, 1, H] to add to its output (`vision`)."""
    selections: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Number of a layer with an indexer → masks of the blocks (`sparse`). By layer, because
    recomputation runs layers again in the backward pass."""
    _angles: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @cached_property
    def _blocks_and_order(self) -> tuple[list[Block], torch.Tensor]:
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        blocks = []
        flat = np.empty(offsets[-1] // self.cp_size, np.int64)
        base = 0
        for segments_of_block in _similar(self.lengths):
            queries, keys, mask, real, positions = _block(
                self.lengths, offsets, segments_of_block, self.cp_size, self.cp_rank
            )
            flat[queries[real]] = base + np.flatnonzero(real)
            base += queries.size
            query_index = self._on_device(queries)
            key_index = query_index if self.cp_size == 1 else self._on_device(keys)
            device_mask = None if mask is None else self._on_device(mask[:, None])
            blocks.append(Block(query_index, key_index, device_mask, self._on_device(positions)))
        return blocks, self._on_device(flat)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all segments."""
        return self._blocks_and_order[0]

    @property
    def order(self) -> torch.Tensor:
        """[L] int64: index of every local token in the concatenated, flattened blocks."""
        return self._blocks_and_order[1]

    @cached_property
    def segments(self) -> Segments:
        """Segments for flash attention. With context parallelism, keys are in the order of
        `keys`."""
        longest = int(self.lengths.max())
        if self.cp_size == 1:
            return Segments(self.cu_seqlens_q, self.cu_seqlens_kv, longest, longest)
        chunks, ends = _chunks(self.lengths, self.cp_size, self.cp_rank)
        return Segments(
            self._on_device(_starts(chunks)),
            self._on_device(_starts(ends)),
            int(chunks.max()),
            int(ends.max()),
        )

    @cached_property
    def keys(self) -> torch.Tensor:
        """Indices of the keys of each local chunk of queries, into all ranks' gathered tokens."""
        _, ends = _chunks(self.lengths, self.cp_size, self.cp_rank)
        chunk = np.repeat(self.lengths // (2 * self.cp_size), 2)
        start = np.repeat(_starts(self.lengths)[:-1] // self.cp_size, 2)
        chunk = np.repeat(chunk, ends)
        start = np.repeat(start, ends)
        position = np.arange(ends.sum()) - np.repeat(_starts(ends)[:-1], ends)
        number = position // chunk
        owner = np.minimum(number, 2 * self.cp_size - 1 - number)
        total = self.lengths.sum() // self.cp_size
        return self._on_device(
            owner * total + start + np.where(number == owner, 0, chunk) + position % chunk
        )

    def angles(self, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine [L, D / 2] float32 of every local token's rotation.

        `frequencies`: [positions, 1, 1, D] with equal halves. Layers with the same frequencies
        share the result.
        """
        if self._angles is None or self._angles[0] is not frequencies:
            table = frequencies[:, 0, 0, : frequencies.shape[-1] // 2].float()
            half = (
                table.index_select(0, self.positions)
                if self.rotations is None
                else table.gather(0, self.rotations.of_frequencies())
            )
            self._angles = (frequencies, half.cos(), half.sin())
        return self._angles[1:]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return platform.to_device(torch.from_numpy(array), self.positions.device)


def packed_layout(
    lengths: np.ndarray,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
    positions: torch.Tensor | None = None,
    rotations: Rotations | None = None,
) -> PackedLayout:
    """Return the layout of segments of `lengths` tokens on rank `cp_rank`.

    `lengths`: multiples of 2 × cp_size if cp_size > 1. `positions`: [L] each local token's position
    in its segment; only rotary embeddings need it. `rotations`: positions of images and text.
    """
    lengths = np.asarray(lengths, np.int64)
    cumulative = platform.to_device(torch.from_numpy(_starts(lengths)), device)
    longest = int(lengths.max())
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
        cp_size=cp_size,
        cp_rank=cp_rank,
        positions=torch.empty(0, dtype=torch.int64, device=device)
        if positions is None
        else positions,
        rotations=rotations,
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each segment, and the end of the last: [n + 1] int32."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _chunks(lengths: np.ndarray, cp_size: int, cp_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths and ends of the two chunks of every segment on a rank.

    Both are [2 × segments]. An end counts the tokens of the segment up to the chunk's end.
    """
    chunk = lengths // (2 * cp_size)
    ends = np.stack([(cp_rank + 1) * chunk, (2 * cp_size - cp_rank) * chunk], 1)
    return np.repeat(chunk, 2), ends.ravel()


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Group segments so that the longest is less than twice the shortest of each group.

    So less than half of a block is padding.
    """
    order = np.argsort(-lengths, kind="stable")
    groups = []
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or 2 * lengths[order[i]] <= lengths[order[start]]:
            groups.append(order[start:i])
            start = i
    return groups


def _block(lengths, offsets, segments_of_block, cp_size: int, cp_rank: int):
    """Return query and key indices, the mask, the real query slots and their positions.

    All are [n, ...] NumPy.
    """
    size = lengths[segments_of_block][:, None]
    start = offsets[segments_of_block][:, None] // cp_size
    slot = np.arange(size.max() // cp_size)[None]
    real = slot < size // cp_size
    queries = start + np.minimum(slot, size // cp_size - 1)
    if cp_size == 1:
        return queries, queries, None, real, np.broadcast_to(slot, real.shape).copy()
    chunk = size // (2 * cp_size)
    total = offsets[-1] // cp_size
    slot = np.minimum(slot, size // cp_size - 1)
    seen = np.where(slot < chunk, cp_rank, 2 * cp_size - 2 - cp_rank) * chunk + slot
    position = np.minimum(np.arange(size.max())[None], size - 1)
    owner = np.minimum(position // chunk, 2 * cp_size - 1 - position // chunk)
    keys = owner * total + start + np.where(position // chunk == owner, 0, chunk) + position % chunk
    inside = np.arange(size.max())[None] < size
    mask = (position[:, None, :] <= seen[:, :, None]) & inside[:, None, :]
    return queries, keys, mask, real, seen


class CoreAttention(DotProductAttention):
    """Causal attention in each packed segment: [L, heads, D] → [L, heads × value size]."""

    def __init__(self, config, *args, pg_collection, **keywords) -> None:
        # The base class refuses context parallelism and latent attention's two channel arguments.
        keywords = {
            name: value
            for name, value in keywords.items()
            if name not in ("k_channels", "v_channels")
        }
        context_parallel = config.context_parallel_size
        config.context_parallel_size = 1
        try:
            super().__init__(config, *args, pg_collection=pg_collection, **keywords)
        finally:
            config.context_parallel_size = context_parallel
        self.cp_group = pg_collection.cp
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        )
        sinks: Any = self.softmax_offset
        # Families with windows have sinks. An argument of Megatron alone makes no window here.
        windowed = windowed and sinks is not None
        self._window: int | None = config.window_size[0] if windowed else None
        if sinks is not None:
            sinks.tensor_model_parallel = True
            sinks.partition_dim = 0
            sinks.partition_stride = 1

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        *,
        packed_seq_params,
        attention_bias=None,
        **_unused,
    ) -> torch.Tensor:
        layout = packed_seq_params
        assert isinstance(layout, PackedLayout)
        assert attention_mask is None
        assert attention_bias is None
        if self.cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        masks = self.masks(layout)
        if masks is None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._flash(query, key, value, layout)
        masks = masks or [block.mask for block in layout.blocks]
        parts = [
            self._attend_block(query, key, value, block, mask)
            for block, mask in zip(layout.blocks, masks, strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, layout.order)

    def masks(self, layout: PackedLayout) -> list[torch.Tensor] | None:
        """Return masks of the blocks in place of their own; None: the blocks' own."""
        return None

    def _attend_block(
        self, query, key, value, block: Block, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output of a block: [n × l, heads × value size]."""
        n, queries = block.queries.shape
        keys = block.keys.shape[1]
        q = (
            query.index_select(0, block.queries.flatten())
            .view(n, queries, *query.shape[1:])
            .transpose(1, 2)
        )
        k = key.index_select(0, block.keys.flatten()).view(n, keys, *key.shape[1:]).transpose(1, 2)
        v = (
            value.index_select(0, block.keys.flatten())
            .view(n, keys, *value.shape[1:])
            .transpose(1, 2)
        )
        if self.softmax_offset is not None:
            out = self._explicit(q, k, v, block)
            return out.transpose(1, 2).reshape(n * queries, -1)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self._dropout(),
            scale=self.softmax_scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.transpose(1, 2).reshape(n * queries, -1)

    def _explicit(self, query, key, value, block: Block) -> torch.Tensor:
        """Return [n, heads, l, D] with sinks and this layer's window, by the scores of all keys."""
        assert self._dropout() == 0.0, "attention with sinks has no dropout"
        position = block.positions[:, None, :, None]
        number = torch.arange(key.shape[2], device=key.device)
        seen = number <= position
        if self._window is not None:
            seen &= number >= position - self._window
        groups = query.unflatten(1, (key.shape[1], -1))
        scores = (groups @ key.mT[:, :, None]).flatten(1, 2).float() * self.softmax_scale
        sinks: Any = self.softmax_offset
        scores = scores.masked_fill(~seen, float("-inf"))
        column = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].to(value.dtype)
        return (weights.unflatten(1, groups.shape[1:3]) @ value[:, :, None]).flatten(1, 2)

    def _flash(self, query, key, value, layout: PackedLayout) -> torch.Tensor:
        assert self._dropout() == 0.0, "packed attention on CUDA has no dropout"
        if layout.cp_size > 1:
            key = key.index_select(0, layout.keys)
            value = value.index_select(0, layout.keys)
        assert self.softmax_scale is not None
        inputs = (query, key, value)
        sinks: Any = self.softmax_offset
        if sinks is None:
            return attend(*inputs, layout.segments, self.softmax_scale).flatten(1)
        return attend_with_sinks(
            *inputs, sinks, layout.segments, self.softmax_scale, self._window
        ).flatten(1)

    def _dropout(self) -> float:
        return self.attention_dropout.p if self.training else 0.0
