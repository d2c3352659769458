"""Metrics of a batch before it is trained (rlpipe.batch.metrics)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.batch import metrics as metrics_module
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.metrics import (
    ProximalSums,
    length_metrics,
    proximal_metrics,
    repetition_metrics,
    repetition_ratios,
)

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


def repeated_by_loop(response: list[int]) -> float:
    """Return the share of 4-grams that occurred before, of the last 1024 tokens."""
    tail = response[-1024:]
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    grams = [tuple(tail[start : start + 4]) for start in range(len(tail) - 3)]
    for gram in grams:
        repeated += gram in seen
        seen.add(gram)
    return repeated / len(grams) if grams else 0.0


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 40]), st.integers(1, 3000))
def test_the_repetition_ratio_counts_the_4_grams_that_occurred_before(
    seed: int, vocabulary: int, longest: int
):
    random = np.random.default_rng(seed)
    lengths = [0, 1, 3, 4, 5, *random.integers(0, longest + 1, 4).tolist()]
    responses = [random.integers(0, vocabulary, length).tolist() for length in lengths]
    columns = BatchColumns.from_lists([[7, 8, 9]] * len(responses), responses)
    found = repetition_ratios(columns.tokens, columns.offsets[1:], columns.response_lengths)
    np.testing.assert_allclose(found, [repeated_by_loop(response) for response in responses])


def test_a_response_is_mostly_repeated_if_it_is_long_and_a_loop():
    varied = list(range(300))
    responses = [varied, [1, 2, 3] * 100, [1, 2, 3] * 10, varied + [5, 6] * 512]
    columns = BatchColumns.from_lists([[1]] * 4, responses)
    metrics = repetition_metrics(columns)
    assert metrics["rollout/repetition_frac"] == 0.5
    expected = np.mean([repeated_by_loop(response) for response in responses])
    assert metrics["rollout/repetition_ratio"] == pytest.approx(expected)


def test_repetition_of_a_large_batch_is_that_of_evenly_spread_samples(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(metrics_module, "REPETITION_SAMPLES", 3)
    responses = [list(range(10)), [1] * 20, [1, 2] * 10, [3] * 9, [4] * 7, [5] * 8, [6] * 6]
    columns = BatchColumns.from_lists([[1]] * 7, responses)
    expected = np.mean([repeated_by_loop(response) for response in responses[::3]])
    assert repetition_metrics(columns)["rollout/repetition_ratio"] == pytest.approx(expected)


def test_percentiles_of_lengths_are_numpys():
    lengths = np.array([3, 1, 200, 17, 17, 90])
    assert length_metrics(lengths) == {
        "rollout/response_len/mean": pytest.approx(lengths.mean()),
        "rollout/response_len/max": 200.0,
        "rollout/response_len/p50": pytest.approx(np.median(lengths)),
        "rollout/response_len/p90": pytest.approx(145.0),  # 90 + 0.5 × (200 - 90)
        "rollout/response_len/p99": pytest.approx(194.5),
    }
