"""Rows of routed experts: read, joined, cut, padded."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.errors import ConfigError
from rlpipe.store.routed_experts import (
    NOT_ROUTED,
    appended,
    num_rows,
    one_per_token,
    read_rows,
    routed_width,
    rows_of,
    within,
    write_rows,
)

WIDTH = 3


def some(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 128, (rows, WIDTH)).astype(np.uint16)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 12))
def test_rows_survive_the_wire_format_and_a_padded_column(first, second, tokens):
    held = some(first)
    more = some(second, 1)
    both = appended(read_rows(write_rows(held), first, WIDTH), more)
    assert (
        both is not None
        and both.dtype == np.uint16
        and both.tolist() == [*held.tolist(), *more.tolist()]
    )
    kept = within(both, tokens)
    assert kept is not None and len(kept) == max(0, min(first + second, tokens - 1))
    every = one_per_token(kept, tokens)
    assert every.shape == (tokens, WIDTH) and (every[len(kept) :] == NOT_ROUTED).all()
    assert rows_of(every).tolist() == kept.tolist()


def test_unknown_experts_stay_unknown():
    rows = some(2)
    assert appended(None, None) is None and within(None, 4) is None and num_rows(None) == 0
    assert appended(rows, None) is rows and appended(None, rows) is rows


@pytest.mark.parametrize(
    ("numbers", "rows"), [([0] * 6, 3), ([0] * 5, 2), ([-1] * 6, 2), ([NOT_ROUTED] * 6, 2)]
)
def test_an_answer_of_another_length_or_with_invalid_experts_is_refused(numbers, rows):
    with pytest.raises(ValueError, match="routed_experts are"):
        read_rows(base64.b64encode(np.array(numbers, np.int32).tobytes()).decode(), rows, WIDTH)


def test_a_row_has_k_numbers_for_every_layer():
    model = {"num_hidden_layers": 48, "num_experts_per_tok": 8}
    assert routed_width(model) == routed_width({"text_config": model}) == 384
    with pytest.raises(ConfigError, match="no experts"):
        routed_width({"num_hidden_layers": 48})
