"""Batched attention against one request at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from rlpipe.engines.sglang import cpu_attention

HEADS = 4
KEY_HEADS = 2
SIZE = 8
SLOTS = 400
OPTIONS = {
    "scaling": 0.3,
    "enable_gqa": True,
    "causal": True,
    "is_cross_attn": False,
    "sliding_window_size": None,
}

requests = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6)


def _cache(batch: list[tuple[int, int]]):
    torch.manual_seed(len(batch))
    k_cache = torch.randn(SLOTS, KEY_HEADS, SIZE)
    v_cache = torch.randn(SLOTS, KEY_HEADS, SIZE)
    table = torch.randint(0, SLOTS, (len(batch) + 2, 64), dtype=torch.int32)
    rows = torch.randperm(len(batch) + 2)[: len(batch)]
    return k_cache, v_cache, table, rows


def _one_by_one(query, k_cache, v_cache, table, rows, totals, news):
    answer = []
    start = 0
    for row, total, new in zip(rows.tolist(), totals.tolist(), news.tolist(), strict=True):
        slots = table[row, :total].long()
        keys, values = (
            cache[slots].transpose(0, 1).repeat_interleave(HEADS // KEY_HEADS, 0)
            for cache in (k_cache, v_cache)
        )
        visible = torch.arange(total) <= torch.arange(total - new, total)[:, None]
        q = query[start : start + new].transpose(0, 1)
        answer.append(
            scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=0.3).transpose(
                0, 1
            )
        )
        start += new
    return torch.cat(answer)


def _never(*_arguments, **_keywords):
    raise AssertionError("SGLang's own function was called")


@given(requests)
def test_extend_equals_one_request_at_a_time(batch):
    k_cache, v_cache, table, rows = _cache(batch)
    prefixes, news = torch.tensor(batch).unbind(1)
    query = torch.randn(int(news.sum()), HEADS, SIZE)
    output = torch.full_like(query, torch.nan)
    totals = prefixes + news
    cpu_attention.extend(
        _never,
        None,
        query,
        output,
        k_cache,
        v_cache,
        table,
        rows,
        totals,
        prefixes,
        news,
        None,
        **OPTIONS,
    )
    torch.testing.assert_close(
        output, _one_by_one(query, k_cache, v_cache, table, rows, totals, news)
    )


@given(requests)
def test_decode_equals_one_request_at_a_time(batch):
    k_cache, v_cache, table, rows = _cache(batch)
    totals = torch.tensor([prefix + 1 for prefix, _ in batch])
    query = torch.randn(len(batch), HEADS, SIZE)
    output = torch.full_like(query, torch.nan)
    cpu_attention.decode(
        _never, None, query, output, k_cache, v_cache, table, rows, totals, None, **OPTIONS
    )
    torch.testing.assert_close(
        output, _one_by_one(query, k_cache, v_cache, table, rows, totals, torch.ones_like(totals))
    )


def test_unsupported_options_call_the_function_of_sglang():
    query = torch.randn(1, HEADS, SIZE)
    tensors = [query, query, *_cache([(3, 1)]), torch.tensor([4]), None]
    for other in (
        {"sliding_window_size": 8},
        {"is_cross_attn": True},
        {"an_option_of_a_later_version": 1},
    ):
        assert (
            cpu_attention.decode(lambda *_, **__: "theirs", None, *tensors, **{**OPTIONS, **other})
            == "theirs"
        )


def test_requests_of_different_lengths_are_not_padded_together():
    parts = list(
        cpu_attention._similar_lengths(
            torch.tensor([5, 2000, 7, 1900]), torch.ones(4, dtype=torch.long)
        )
    )
    assert [sorted(part.tolist()) for part in parts] == [[0, 2], [1, 3]]
