"""Mathematical comparison of answers."""

import threading

import pytest

from rlpipe.errors import DataError
from rlpipe.rewards.math import reward
from rlpipe.types import Sample


def sample(response, label):
    return Sample("g", 0, "", [1], label=label, response=response)


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("The answer is 0.5", "1/2", 1),
        ("so it is $\\frac12$.", "\\frac{1}{2}", 1),
        ("\\boxed{2/4}", "$\\frac{1}{2}$", 1),
        ("\\boxed{1 + x}", "x+1", 1),
        ("1,000", "1000", 1),
        ("\\boxed{(1,2)}", "(1,2)", 1),
        ("It is 7.", "1/2", 0),
        ("\\boxed{1000}", "100", 0),
    ],
)
def test_equal_expressions_have_reward_1_and_others_0(response, label, right):
    assert reward(sample(response, label)) == {"reward": float(right), "format": 1.0}


@pytest.mark.parametrize("response", ["", "no idea", "\\boxed{"])
def test_a_response_without_an_answer_has_reward_0_and_format_0(response):
    assert reward(sample(response, "3")) == {"reward": 0.0, "format": 0.0}


@pytest.mark.parametrize("label", [None, "", " ", "$$"])
def test_an_empty_label_is_an_error(label):
    with pytest.raises(DataError, match="the label has no content to compare with"):
        reward(sample("3", label))


def test_comparison_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(reward(sample("it is 3", "3"))))
    thread.start()
    thread.join()
    assert results == [{"reward": 1.0, "format": 1.0}]
