"""Weights per token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.reduction import token_weights

LOSSES, LENGTHS = np.array([2.0, 1.0, 1.0, 1.0]), np.array([1, 3])
masks = st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=8)


def test_per_sample_and_per_token_means_differ():
    assert token_weights(np.ones(4), LENGTHS, per_token=False) @ LOSSES == pytest.approx(1.5)
    assert token_weights(np.ones(4), LENGTHS, per_token=True) @ LOSSES == pytest.approx(1.25)


def test_a_masked_token_weighs_nothing_and_its_sample_is_averaged_over_the_rest():
    assert token_weights(np.array([1, 1, 0, 1]), LENGTHS, per_token=False).tolist() == pytest.approx([0.5, 0.25, 0, 0.25])


@given(masks)
def test_it_is_what_a_loop_computes(mask):
    lengths = np.array([len(row) for row in mask])
    expected = [m / (len(mask) * max(sum(row), 1)) for row in mask for m in row]
    flat = np.array([m for row in mask for m in row], float)
    assert token_weights(flat, lengths, per_token=False) == pytest.approx(expected)
    total = max(sum(map(sum, mask)), 1)
    assert token_weights(flat, lengths, per_token=True) == pytest.approx([m / total for row in mask for m in row])


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="mask of 3"):
        token_weights(np.ones(3), LENGTHS, per_token=False)
