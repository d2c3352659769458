"""Metrics of an evaluation (rlpipe.observe.evaluation_metrics)."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.observe.evaluation_metrics import evaluation_metrics, pass_at_k
from rlpipe.types import Sample, Status


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_response(total: int, data: st.DataObject):
    correct = data.draw(st.integers(0, total))
    k = data.draw(st.integers(1, total))
    draws = list(combinations([True] * correct + [False] * (total - correct), k))
    assert pass_at_k(correct, total, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("correct", "total", "k"), [(-1, 2, 1), (3, 2, 1), (1, 2, 0), (1, 2, 3)])
def test_pass_at_k_of_impossible_counts_is_refused(correct: int, total: int, k: int):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(correct, total, k)


def sample(group: str, index: int, length: int = 2, status: Status = Status.COMPLETED) -> Sample:
    return Sample(group, index, "", [1], response_ids=[0] * length, status=status)


def test_the_metrics_of_a_held_out_set():
    samples = [sample(group, index) for group in "ab" for index in range(4)]
    samples[3].status = Status.TRUNCATED
    samples[3].response_ids = [0] * 10
    rewards = [1.0, 0.0, 0.0, None, 1.0, 1.0, 1.0, 1.0]
    parts = [{"format": float(index % 2)} for index in range(7)] + [{}]
    metrics = evaluation_metrics("aime", samples, rewards, parts, pass_threshold=1.0)
    assert metrics == pytest.approx(
        {
            "eval/aime/accuracy": 5 / 7,
            "eval/aime/truncated_ratio": 1 / 8,
            "eval/aime/error_ratio": 1 / 8,
            "eval/aime/response_len/mean": 3.0,
            "eval/aime/pass@1": (1 / 3 + 1) / 2,
            "eval/aime/pass@2": (2 / 3 + 1) / 2,
            "eval/aime/pass@4": 1.0,
            "eval/aime/reward_parts/format": 3 / 7,
        }
    )


def test_one_response_per_prompt_has_no_pass_rates():
    metrics = evaluation_metrics(
        "x", [sample("a", 0), sample("b", 0)], [0.0, 1.0], [{}, {}], pass_threshold=1.0
    )
    assert [name for name in metrics if "pass@" in name] == []


def test_a_set_without_scored_responses_has_accuracy_0():
    metrics = evaluation_metrics("x", [sample("a", 0)], [None], [{}], pass_threshold=1.0)
    assert (metrics["eval/x/accuracy"], metrics["eval/x/error_ratio"]) == (0.0, 1.0)
