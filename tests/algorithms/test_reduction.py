"""Weights per token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.reduction import token_weights
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged

LOSSES = np.array([2.0, 1.0, 1.0, 1.0])
LENGTHS = np.array([1, 3])


def test_per_sample_and_per_token_means_differ():
    assert token_weights(np.ones(4), LENGTHS) @ LOSSES == pytest.approx(1.5)
    assert token_weights(np.ones(4), LENGTHS, per_token=True) @ LOSSES == pytest.approx(1.25)


def test_a_constant_length_weighs_tokens_alike_whatever_their_number():
    assert token_weights(np.ones(4), LENGTHS, constant_length=10).tolist() == pytest.approx(
        [0.05] * 4
    )


def test_samples_of_one_rollout_share_a_denominator():
    assert token_weights(np.ones(4), LENGTHS, rollout=np.array([7, 7])) == pytest.approx([0.25] * 4)


def test_a_masked_token_weighs_nothing_and_its_sample_is_averaged_over_the_rest():
    assert token_weights(np.array([1, 1, 0, 1]), LENGTHS).tolist() == pytest.approx(
        [0.5, 0.25, 0, 0.25]
    )


def test_a_rejected_token_weighs_nothing_and_leaves_the_others_as_they_are():
    found = token_weights(np.ones(4), LENGTHS, kept=np.array([1, 1, 0, 1.0]))
    assert found.tolist() == pytest.approx([0.5, 1 / 6, 0, 1 / 6])


@given(
    ragged(columns=1),
    st.sampled_from(["rollout", "token", "constant"]),
    st.booleans(),
    st.randoms(),
)
def test_it_is_what_a_loop_computes(batch: Ragged, kind: str, fan_out: bool, random):
    kept = [[float(random.random() < 0.8) for _ in row] for row in batch.mask]
    options = {"per_token": kind == "token", "constant_length": 5 if kind == "constant" else None}
    rollouts = batch.rollouts if fan_out else list(range(len(batch.mask)))
    losses = Ragged.flat(batch.columns[0])
    found = token_weights(
        Ragged.flat(batch.mask),
        batch.lengths,
        **options,
        rollout=np.array(batch.rollouts) if fan_out else None,
        kept=Ragged.flat(kept),
    )
    expected = loops.reduced(
        batch.columns[0],
        batch.mask,
        rollouts,
        kept,
        per_token=kind == "token",
        constant=options["constant_length"],
    )
    assert found.astype(np.float64) @ losses == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(ragged(least=1), st.booleans())
def test_the_weights_of_a_step_add_up_to_1_unless_a_rollout_is_wholly_masked(
    batch: Ragged, per_token: bool
):
    mask = np.ones(int(batch.lengths.sum()))
    found = token_weights(
        mask, batch.lengths, per_token=per_token, rollout=np.array(batch.rollouts)
    )
    assert found.sum() == pytest.approx(1, rel=1e-5)


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="mask of 3"):
        token_weights(np.ones(3), LENGTHS)
