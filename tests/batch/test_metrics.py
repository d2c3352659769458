"""Metrics of a batch from sums of its samples (rlpipe.batch.metrics)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.metrics import ProximalSums, proximal_metrics

MASK = [[1, 1], [0], [1, 0, 1]]


def batch(seed: int, *, reference: bool = True) -> BatchColumns:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 9, 13)
    responses = [[1] * length for length in lengths]
    made = BatchColumns.from_lists(
        [[1]] * 13, responses, loss_mask=[random.integers(0, 2, n).tolist() for n in lengths]
    )
    size = made.num_response_tokens
    proximal, rollout, others = (random.normal(-2, 1, size).astype(np.float32) for _ in range(3))
    return made.with_columns(
        proximal_log_probs=proximal,
        rollout_log_probs=rollout,
        reference_log_probs=others if reference else None,
    )


@given(st.integers(0, 99), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_metrics_are_equal_bit_for_bit_in_every_layout(
    seed: int, ranks: int, reference: bool, stale: bool
):
    whole = batch(seed, reference=reference)
    random = np.random.default_rng(seed)
    staleness = random.integers(0, 2, whole.num_response_tokens) if stale else None
    rank_of = random.integers(0, ranks, len(whole))
    sums = ProximalSums.of(whole, staleness)
    values = np.zeros_like(sums.values, order="C")
    largest = np.zeros_like(sums.largest)
    for rank in range(ranks):
        own = np.flatnonzero(rank_of == rank)
        tokens = np.isin(whole.sample_of, own)
        part = ProximalSums.of(whole.select(own), None if staleness is None else staleness[tokens])
        values[own] = part.values
        largest[own] = part.largest
    assert replace(sums, values=values, largest=largest).metrics() == sums.metrics()
    assert sums.metrics() == proximal_metrics(whole, staleness)


def test_metrics_are_means_over_the_tokens_that_count():
    columns = BatchColumns.from_lists(
        [[1]] * 3,
        [[2] * len(row) for row in MASK],
        loss_mask=MASK,
        proximal_log_probs=[[-1.0, -2.0], [-9.0], [-3.0, -9.0, -4.0]],
        rollout_log_probs=[[-1.5, -2.0], [-1.0], [-3.0, -1.0, -4.5]],
        reference_log_probs=[[-2.0, -2.0], [-1.0], [-3.0, -1.0, -3.0]],
    )
    found = proximal_metrics(columns, np.array([0, 0, 0, 1, 0, 0]))
    k3 = (2 * (np.exp(0.5) - 1.5)) / 4
    assert found == {
        "rollout/kl": pytest.approx(0.0),
        "rollout/mismatch_kl": pytest.approx(-0.25),
        "rollout/mismatch_k3_kl": pytest.approx(k3),
        "rollout/logprob_abs_diff/mean": pytest.approx(1 / 3),
        "rollout/logprob_abs_diff/max": pytest.approx(0.5),
    }
    masked = columns.with_columns(loss_mask=np.zeros(6, np.float32))
    assert proximal_metrics(masked, None) == {}
    assert proximal_metrics(columns.with_columns(proximal_log_probs=None), None) == {}
