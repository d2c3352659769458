"""Packed micro-batches and their layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.batch.columns import BatchColumns
from rlpipe.engines.megatron.model.attention import packed_layout
from rlpipe.engines.megatron.train.batch import Slice, pack
from tests.engines.megatron.ranks import make_batch

BATCH = BatchColumns.from_lists(
    [[1, 2], [3], [4, 5, 6]], [[7], [8, 9], [10, 11]], loss_mask=[[1], [1, 0], [0, 1]]
)


def test_samples_are_concatenated_and_rows_predict_response_tokens():
    micro = pack(BATCH, [2, 1], Slice(), only_masked_in=False)
    assert micro.tokens.tolist() == [[4, 5, 6, 10, 11, 3, 8, 9]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert micro.layout.cu_seqlens_q.tolist() == [0, 5, 8]
    assert micro.layout.max_seqlen_q == 5
    assert micro.rows.tolist() == [2, 3, 5, 6]
    assert micro.targets.tolist() == [10, 11, 8, 9]
    assert micro.response_index.tolist() == [3, 4, 1, 2]


def test_training_excludes_rows_of_masked_tokens():
    micro = pack(BATCH, [0, 1, 2], Slice(), only_masked_in=True)
    assert micro.targets.tolist() == [7, 8, 11]
    assert micro.column(np.arange(5, dtype=np.float32)).tolist() == [0, 1, 4]


def test_an_empty_micro_batch_has_a_token_and_no_rows():
    micro = pack(BATCH, [], Slice(), only_masked_in=True)
    assert micro.length == 1
    assert micro.rows.tolist() == []


@given(st.lists(st.integers(0, 23), max_size=8, unique=True), st.integers(1, 4), st.integers(1, 2))
def test_every_response_token_is_predicted_on_exactly_one_context_parallel_rank(
    samples, cp_size, sequence_parts
):
    batch = make_batch()
    found = []
    for rank in range(cp_size):
        micro = pack(batch, samples, Slice(cp_size, rank, sequence_parts), only_masked_in=False)
        assert micro.length % sequence_parts == 0
        starts = batch.offsets[:-1] + batch.prompt_lengths - batch.response_offsets[:-1]
        sample = np.searchsorted(batch.response_offsets, micro.response_index, side="right") - 1
        flat = micro.response_index + starts[sample]
        assert micro.targets.tolist() == batch.tokens[flat].tolist()
        assert micro.tokens[0, micro.rows].tolist() == batch.tokens[flat - 1].tolist()
        found.extend(micro.response_index.tolist())
    wanted = [
        j for i in samples for j in range(batch.response_offsets[i], batch.response_offsets[i + 1])
    ]
    assert sorted(found) == sorted(wanted)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_blocks_hold_every_token_once_with_less_than_half_padding(lengths):
    layout = packed_layout(np.array(lengths), 1, 0, torch.device("cpu"))
    slots = torch.cat([block.queries.flatten() for block in layout.blocks])
    assert slots[layout.order].tolist() == list(range(sum(lengths)))
    assert len(slots) <= 2 * sum(lengths)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_a_context_parallel_query_sees_the_earlier_tokens_of_its_segment(cp_size):
    lengths = np.array([4, 2, 6]) * cp_size
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shards = []
    for rank in range(cp_size):
        chunks = [np.split(np.arange(a, b), 2 * cp_size) for a, b in pairwise(offsets)]
        shards.append(
            np.concatenate([np.concatenate([c[rank], c[2 * cp_size - 1 - rank]]) for c in chunks])
        )
    everything = torch.from_numpy(np.concatenate(shards))
    for rank in range(cp_size):
        layout = packed_layout(lengths, cp_size, rank, torch.device("cpu"))
        seen = {}
        for block in layout.blocks:
            assert block.mask is not None
            for queries, keys, mask in zip(
                block.queries, block.keys, block.mask[:, 0], strict=True
            ):
                for query, row in zip(queries.tolist(), mask, strict=True):
                    seen[int(shards[rank][query])] = sorted(everything[keys[row]].tolist())
        assert seen == {
            int(p): list(range(offsets[np.searchsorted(offsets, p, side="right") - 1], p + 1))
            for p in shards[rank]
        }
