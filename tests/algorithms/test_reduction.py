"""Token weights of the reduction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms import reduction
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged
from tests.algorithms.weights import token_weights

LOSSES = np.array([2.0, 1.0, 1.0, 1.0])
LENGTHS = np.array([1, 3])


def test_per_sample_and_per_token_means_differ():
    assert token_weights(np.ones(4), LENGTHS) @ LOSSES == pytest.approx(1.5)
    assert token_weights(np.ones(4), LENGTHS, per_token=True) @ LOSSES == pytest.approx(1.25)


def test_a_constant_length_gives_every_token_the_same_weight():
    assert token_weights(np.ones(4), LENGTHS, constant_length=10).tolist() == pytest.approx(
        [0.05] * 4
    )


def test_samples_of_one_rollout_share_a_denominator():
    assert token_weights(np.ones(4), LENGTHS, rollout=np.array([7, 7])) == pytest.approx([0.25] * 4)


def test_a_masked_token_has_weight_0_and_does_not_count_in_the_denominator():
    assert token_weights(np.array([1, 1, 0, 1]), LENGTHS).tolist() == pytest.approx(
        [0.5, 0.25, 0, 0.25]
    )


def test_a_rejected_token_has_weight_0_and_still_counts_in_the_denominator():
    weights = token_weights(np.ones(4), LENGTHS, kept=np.array([1, 1, 0, 1.0]))
    assert weights.tolist() == pytest.approx([0.5, 1 / 6, 0, 1 / 6])


@given(
    ragged(columns=1),
    st.sampled_from(["rollout", "token", "constant"]),
    st.booleans(),
    st.randoms(),
)
def test_the_reduction_equals_the_reference_loop(batch: Ragged, kind: str, fan_out: bool, random):
    kept = [[float(random.random() < 0.8) for _ in row] for row in batch.mask]
    options = {"per_token": kind == "token", "constant_length": 5 if kind == "constant" else None}
    rollouts = batch.rollouts if fan_out else list(range(len(batch.mask)))
    losses = Ragged.flat(batch.columns[0])
    weights = token_weights(
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
    assert weights.astype(np.float64) @ losses == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(ragged(min_length=1), st.booleans())
def test_the_weights_of_a_step_without_masked_tokens_add_up_to_1(batch: Ragged, per_token: bool):
    mask = np.ones(int(batch.lengths.sum()))
    weights = token_weights(
        mask, batch.lengths, per_token=per_token, rollout=np.array(batch.rollouts)
    )
    assert weights.sum() == pytest.approx(1, rel=1e-5)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="mask of 3"):
        reduction.token_weights(np.ones(3), LENGTHS, np.ones(2))
