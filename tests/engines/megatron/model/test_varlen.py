"""Packed attention by flash attention: choice of the library, context parallel segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlpipe.engines.megatron.model import varlen
from rlpipe.engines.megatron.model.attention import packed_layout
from rlpipe.engines.megatron.model.varlen import Segments

CPU = torch.device("cpu")


@pytest.fixture
def present(monkeypatch):
    """Make these packages importable, and no other backend's."""

    def make(*packages: str) -> None:
        monkeypatch.setattr(
            varlen.importlib.util,
            "find_spec",
            lambda name: name if name in (*packages, "torch") else None,
        )
        varlen.backend.cache_clear()

    yield make
    varlen.backend.cache_clear()


@pytest.mark.parametrize(
    ("packages", "chosen"),
    [
        ([], "torch"),
        (["flash_attn"], "flash_attention_2"),
        (["flash_attn", "flash_attn_interface"], "flash_attention_3"),
        (["flash_attn", "transformer_engine"], "transformer_engine"),
    ],
)
def test_the_fastest_installed_library_is_chosen_and_logged(present, caplog, packages, chosen):
    present(*packages)
    with caplog.at_level("INFO", varlen.__name__):
        assert varlen.backend() == chosen
    assert chosen in caplog.text


def one_by_one(query, key, value, segments: Segments, scale: float) -> torch.Tensor:
    """Attend as every backend does: with the causal mask from the bottom right of each segment."""
    parts = []
    for (a, b), (c, d) in zip(
        pairwise(segments.queries.tolist()), pairwise(segments.keys.tolist()), strict=True
    ):
        assert b - a <= segments.longest_query
        assert d - c <= segments.longest_key
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[a:b], key[c:d], value[c:d]))
        parts.append(
            scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(parts)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_context_parallel_ranks_equal_one_rank(cp_size):
    lengths = np.array([4, 2, 10]) * cp_size
    starts = np.concatenate([[0], np.cumsum(lengths)])
    query, key, value = (random(int(lengths.sum()), heads, 8) for heads in (4, 2, 2))
    wanted = one_by_one(query, key, value, packed_layout(lengths, 1, 0, CPU).segments, 0.3)
    held = []
    for rank in range(cp_size):
        chunks = [np.split(np.arange(a, b), 2 * cp_size) for a, b in pairwise(starts)]
        held.append(
            np.concatenate([np.concatenate([c[rank], c[2 * cp_size - 1 - rank]]) for c in chunks])
        )
    gathered = torch.from_numpy(np.concatenate(held))
    for rank, mine in enumerate(held):
        layout = packed_layout(lengths, cp_size, rank, CPU)
        theirs = (
            (key, value)
            if cp_size == 1
            else (key[gathered][layout.keys], value[gathered][layout.keys])
        )
        found = one_by_one(query[mine], *theirs, layout.segments, 0.3)
        torch.testing.assert_close(found, wanted[mine])


def test_values_may_be_narrower_than_queries(monkeypatch):
    monkeypatch.setattr(varlen, "_function", lambda _name: one_by_one)
    query = random(7, 4, 8)
    key = random(7, 2, 8)
    value = random(7, 2, 6)
    segments = packed_layout(np.array([3, 4]), 1, 0, CPU).segments
    found = varlen.attend(query, key, value, segments, 0.3)
    torch.testing.assert_close(found, one_by_one(query, key, value, segments, 0.3))
