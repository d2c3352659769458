"""`pack`: a packed micro-batch on this rank's device.

The segments of the samples follow each other. A segment is padded only as far as parallelism
needs: to a multiple of 2 × CP with context parallelism, and the last one so that sequence parallel
ranks get equal parts. Response token j of a sample with p prompt tokens is predicted at position
p + j - 1; only such rows become logits. With context parallelism, rank r of c holds chunks r and
2c-1-r of every segment, and the rows in them. `rlpipe.batch.packing` decides which samples share a
micro-batch.

Legend: S tokens and R response tokens of the batch, L local packed tokens, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns, gather_index
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.attention import PackedLayout, packed_layout
from rlpipe.engines.megatron.model.vision import ImageInputs, ImageLayout
from rlpipe.engines.megatron.train.packed_images import packed_images


@dataclass(slots=True, frozen=True)
class Slice:
    """The part of a packed sequence that a rank holds."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_parts: int = 1
    images: ImageLayout | None = None
    """How the model reads images; None: it reads text alone."""


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """L local tokens; n of them predict a response token. All tensors are on the device."""

    tokens: torch.Tensor
    """[1, L] int64."""
    positions: torch.Tensor
    """[1, L] int64, within the segment."""
    layout: PackedLayout
    rows: torch.Tensor
    """[n] int64, index into L (into the tokens of all sequence parallel ranks)."""
    targets: torch.Tensor
    """[n] int64, the token after each row."""
    response_index: np.ndarray
    """[n] int64: index of each row's response token into the batch's [R]."""
    sources: np.ndarray
    """[L] int64: index of each local token into the batch's [S]; -1 is padding."""
    samples: np.ndarray
    """[k] int64: the samples in the order of their segments."""
    images: ImageInputs | None = None
    """Images of the samples; None: text alone."""

    def column(self, values: np.ndarray) -> torch.Tensor:
        """Return the rows' values [n] of a flat [R] column, on the device."""
        return platform.to_device(torch.from_numpy(values[self.response_index]), self.tokens.device)

    @property
    def length(self) -> int:
        """L."""
        return self.tokens.shape[1]


def pack(
    batch: BatchColumns,
    samples: Sequence[int],
    part: Slice,
    *,
    only_masked_in: bool,
    separate_padding: bool = False,
    ends: bool = False,
) -> MicroBatch:
    """Return the micro-batch of these samples.

    A micro-batch without samples has one segment of padding and no rows. `only_masked_in`: leave
    out the rows of tokens with loss mask 0. `separate_padding`: put the padding for sequence
    parallel ranks in its own segment, so that each sample's segment depends on its tokens alone.
    `ends`: the only row of a sample is its last token, the target too; no sample may be empty.
    """
    chosen = np.asarray(samples, np.int64)
    # A rank without samples still runs its micro-batch, because the passes have collectives.
    lengths = batch.lengths[chosen] if len(chosen) else np.ones(1, np.int64)
    padded = _padded_lengths(lengths, part, separate_padding)
    starts = (np.cumsum(padded) - padded)[: len(lengths)]
    tokens = np.zeros(padded.sum(), np.int64)
    positions = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
    sources = gather_index(batch.offsets, chosen)
    source_of = np.full(len(tokens), -1)
    if len(chosen):
        source_of[_ranges(starts, lengths)] = sources
        tokens[source_of >= 0] = batch.tokens[sources]
    rows = (
        _ranges(starts + batch.prompt_lengths[chosen] - 1, batch.response_lengths[chosen])
        if len(chosen)
        else sources
    )
    responses = gather_index(batch.response_offsets, chosen)
    keep = batch.loss_mask[responses] > 0 if only_masked_in else np.ones(len(rows), bool)
    rows, responses = rows[keep], responses[keep]
    if ends:
        rows = starts[: len(chosen)] + lengths[: len(chosen)] - 1
        responses = batch.response_offsets[chosen + 1] - 1
    targets = tokens[rows + (not ends)] if len(rows) else rows
    local, local_of = _zigzag(padded, part)
    is_local = np.isin(rows, local) if part.cp_size > 1 else np.ones(len(rows), bool)
    device = platform.device()
    images, rotations = packed_images(batch, chosen, part.images, starts, padded, local, local_of)
    local_tokens, local_positions, local_rows, local_targets = (
        platform.to_device(torch.from_numpy(array), device)
        for array in (tokens[local], positions[local], local_of[rows[is_local]], targets[is_local])
    )
    layout = packed_layout(padded, part.cp_size, part.cp_rank, device, local_positions, rotations)
    return MicroBatch(
        tokens=local_tokens[None],
        positions=local_positions[None],
        layout=layout,
        rows=local_rows,
        targets=local_targets,
        response_index=responses[is_local],
        sources=source_of[local],
        samples=chosen,
        images=images,
    )


def _padded_lengths(lengths: np.ndarray, part: Slice, separate_padding: bool) -> np.ndarray:
    multiple = 2 * part.cp_size if part.cp_size > 1 else 1
    padded = -(-lengths // multiple) * multiple
    whole = math.lcm(multiple, part.cp_size * part.sequence_parts)
    missing = -int(padded.sum()) % whole
    if separate_padding and missing:
        return np.append(padded, missing)
    padded[-1] += missing
    return padded


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return start, start + 1, ... of every segment, concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def _zigzag(padded: np.ndarray, part: Slice) -> tuple[np.ndarray, np.ndarray]:
    """Return the global positions of this rank's tokens, and the local position of every token.

    The local position is -1 for tokens of other ranks.
    """
    total = int(padded.sum())
    if part.cp_size == 1:
        return np.arange(total), np.arange(total)
    position = np.arange(total) - np.repeat(np.concatenate([[0], np.cumsum(padded)[:-1]]), padded)
    chunk = position // np.repeat(padded // (2 * part.cp_size), padded)
    mine = np.flatnonzero((chunk == part.cp_rank) | (chunk == 2 * part.cp_size - 1 - part.cp_rank))
    local = np.full(total, -1)
    local[mine] = np.arange(len(mine))
    return mine, local
