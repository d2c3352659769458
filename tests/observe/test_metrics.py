"""Metrics and how they merge (rlpipe.observe.metrics)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.observe.metrics import Metric, Reduction, distribution, merge, values

NUMBERS = st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 100)), min_size=1, max_size=12)


@given(NUMBERS)
def test_a_merged_mean_is_the_weighted_mean(numbers):
    merged = merge(Metric("loss", value, weight=weight) for value, weight in numbers)["loss"]
    assert merged.value == pytest.approx(sum(v * w for v, w in numbers) / sum(w for _, w in numbers), abs=1e-9)
    assert merged.weight == sum(weight for _, weight in numbers)


@given(NUMBERS, st.sampled_from(list(Reduction)), st.data())
def test_it_does_not_matter_who_merges_first(numbers, reduction, data):
    metrics = [Metric("x", value, reduction, weight) for value, weight in numbers]
    cut = data.draw(st.integers(1, len(metrics)))
    parts = [part for part in (metrics[:cut], metrics[cut:]) if part]
    halves = merge(merge(part)["x"] for part in parts)["x"]
    assert halves.value == pytest.approx(merge(metrics)["x"].value, abs=1e-9)


@pytest.mark.parametrize(
    ("reduction", "value"), [(Reduction.SUM, 6), (Reduction.MIN, 1), (Reduction.MAX, 3), (Reduction.LAST, 2), (Reduction.MEAN, 2)]
)
def test_each_reduction_does_what_it_says(reduction, value):
    assert merge(Metric("x", number, reduction) for number in (1, 3, 2))["x"].value == value


def test_a_value_of_weight_zero_does_not_count_even_if_it_is_nan():
    assert merge([Metric("x", math.nan, weight=0), Metric("x", 2.0, weight=3)])["x"].value == 2.0
    assert math.isnan(merge([Metric("x", 1.0, weight=0), Metric("x", 2.0, weight=0)])["x"].value)


def test_metrics_of_different_reductions_do_not_merge():
    with pytest.raises(ValueError, match="cannot merge tokens"):
        merge([Metric("tokens", 1, Reduction.SUM), Metric("tokens", 1)])


def test_names_keep_their_order():
    assert values(merge([Metric("b", 1), Metric("a", 2), Metric("b", 3)])) == {"b": 2, "a": 2}


def test_a_distribution_has_four_figures_and_none_of_nothing():
    assert distribution("len", [1, 2, 6]) == {"len/mean": 3, "len/median": 2, "len/min": 1, "len/max": 6}
    assert distribution("len", []) == {}
