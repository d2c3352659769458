"""A packed micro-batch on this rank's device: tokens, segments, and the rows whose next token
counts.

Samples stand one after another. A segment is padded only as far as parallelism asks: to a multiple
of 2 × CP with context parallelism, and the last one so that sequence parallel ranks get equal
parts. Response token j of a sample with p prompt tokens is predicted by position p + j - 1; only
such rows ever become logits. With context parallelism a rank holds chunks r and 2c-1-r of every
segment, and the rows that fall into them.

Not here: which samples belong together (`rlpipe.batch.packing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.batch.packing import BatchColumns, gather_index
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.attention import PackedLayout, packed_layout


@dataclass(slots=True, frozen=True)
class Slice:
    """What of a packed sequence is this rank's: its place among context parallel ranks, and
    sequence parallel parts."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_parts: int = 1


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """L local tokens of which n rows predict a response token of the batch. All tensors on the
    device."""

    tokens: torch.Tensor
    """[1, L] int64."""
    positions: torch.Tensor
    """[1, L] int64, within the segment."""
    layout: PackedLayout
    rows: torch.Tensor
    """[n] int64, into L (into all sequence parallel ranks' tokens)."""
    targets: torch.Tensor
    """[n] int64, the token that follows each row."""
    response_index: np.ndarray
    """[n] int64: each row's response token among all of the batch's [R]."""
    sources: np.ndarray
    """[L] int64: each local token among all of the batch's [S]; -1 is padding."""
    samples: np.ndarray
    """[k] int64: the samples, as they stand one after another."""

    def column(self, values: np.ndarray) -> torch.Tensor:
        """[n] of a flat [R] column, on the device."""
        return platform.to_device(torch.from_numpy(values[self.response_index]), self.tokens.device)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


def pack(
    batch: BatchColumns,
    samples: Sequence[int],
    part: Slice,
    *,
    only_masked_in: bool,
    pad_apart: bool = False,
) -> MicroBatch:
    """The micro-batch of those samples; an empty one holds a single segment of padding and no rows.

    `only_masked_in`: rows of tokens with loss mask 0 are left out. `pad_apart`: padding for
    sequence parallel ranks is a segment of its own, and each sample's length in the pack follows
    from its tokens alone.
    """
    chosen = np.asarray(samples, np.int64)
    lengths = batch.lengths[chosen] if len(chosen) else np.ones(1, np.int64)
    padded = _padded(lengths, part, pad_apart)
    starts = (np.cumsum(padded) - padded)[: len(lengths)]
    tokens = np.zeros(padded.sum(), np.int64)
    positions = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
    sources = gather_index(batch.offsets, chosen)
    source_of = np.full(len(tokens), -1)
    if len(chosen):
        source_of[_spread(starts, lengths)] = sources
        tokens[source_of >= 0] = batch.tokens[sources]
    rows = (
        _spread(starts + batch.prompt_lengths[chosen] - 1, batch.response_lengths[chosen])
        if len(chosen)
        else sources
    )
    responses = gather_index(batch.response_offsets, chosen)
    keep = batch.loss_mask[responses] > 0 if only_masked_in else np.ones(len(rows), bool)
    rows = rows[keep]
    responses = responses[keep]
    targets = tokens[rows + 1] if len(rows) else rows
    mine, local = _zigzag(padded, part)
    here = np.isin(rows, mine) if part.cp_size > 1 else np.ones(len(rows), bool)
    device = platform.device()
    moved = (tokens[mine], positions[mine], local[rows[here]], targets[here])
    mine_on_device, places, my_rows, my_targets = (
        platform.to_device(torch.from_numpy(array), device) for array in moved
    )
    return MicroBatch(
        tokens=mine_on_device[None],
        positions=places[None],
        layout=packed_layout(padded, part.cp_size, part.cp_rank, device, places),
        rows=my_rows,
        targets=my_targets,
        response_index=responses[here],
        sources=source_of[mine],
        samples=chosen,
    )


def _padded(lengths: np.ndarray, part: Slice, apart: bool) -> np.ndarray:
    multiple = 2 * part.cp_size if part.cp_size > 1 else 1
    padded = -(-lengths // multiple) * multiple
    whole = math.lcm(multiple, part.cp_size * part.sequence_parts)
    missing = -int(padded.sum()) % whole
    if apart and missing:
        return np.append(padded, missing)
    padded[-1] += missing
    return padded


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every segment, one after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def _zigzag(padded: np.ndarray, part: Slice) -> tuple[np.ndarray, np.ndarray]:
    """Global positions of this rank's tokens in local order, and for every global position its
    local one (-1: elsewhere)."""
    total = int(padded.sum())
    if part.cp_size == 1:
        return np.arange(total), np.arange(total)
    position = np.arange(total) - np.repeat(np.concatenate([[0], np.cumsum(padded)[:-1]]), padded)
    chunk = position // np.repeat(padded // (2 * part.cp_size), padded)
    mine = np.flatnonzero((chunk == part.cp_rank) | (chunk == 2 * part.cp_size - 1 - part.cp_rank))
    local = np.full(total, -1)
    local[mine] = np.arange(len(mine))
    return mine, local
