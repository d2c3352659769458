"""Figures of an evaluation: pass@k against counting, and what counts where."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.observe.evaluation import evaluation_metrics, pass_at_k
from rlpipe.types import Sample, Status


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_response(
    total: int, data: st.DataObject
):
    right = data.draw(st.integers(0, total))
    k = data.draw(st.integers(1, total))
    draws = list(combinations([True] * right + [False] * (total - right), k))
    assert pass_at_k(right, total, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("right", "total", "k"), [(-1, 2, 1), (3, 2, 1), (1, 2, 0), (1, 2, 3)])
def test_pass_at_k_of_what_cannot_be_is_refused(right: int, total: int, k: int):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(right, total, k)


def sample(group: str, index: int, length: int = 2, status: Status = Status.COMPLETED) -> Sample:
    return Sample(group, index, "", [1], response_ids=[0] * length, status=status)


def test_the_figures_of_a_held_out_set():
    samples = [sample(group, index) for group in "ab" for index in range(4)]
    samples[3].status = Status.TRUNCATED
    samples[3].response_ids = [0] * 10
    rewards = [1.0, 0.0, 0.0, None, 1.0, 1.0, 1.0, 1.0]
    parts = [{"format": float(index % 2)} for index in range(7)] + [{}]
    found = evaluation_metrics("aime", samples, rewards, parts, pass_threshold=1.0)
    assert found == pytest.approx(
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
    found = evaluation_metrics(
        "x", [sample("a", 0), sample("b", 0)], [0.0, 1.0], [{}, {}], pass_threshold=1.0
    )
    assert [name for name in found if "pass@" in name] == []


def test_nothing_scored_is_no_accuracy_and_no_crash():
    found = evaluation_metrics("x", [sample("a", 0)], [None], [{}], pass_threshold=1.0)
    assert (found["eval/x/accuracy"], found["eval/x/error_ratio"]) == (0.0, 1.0)
