"""Tests of the reward; run them with `pytest`."""

from types import SimpleNamespace

import pytest
from reward import score


@pytest.mark.parametrize(
    ("response", "expected"), [("5", 1.0), (" 5\n", 1.0), ("7", 0.0), ("57", 0.0), ("five", 0.0)]
)
def test_the_reward_of_a_response(response, expected):
    assert score(SimpleNamespace(response=response, label="5", metadata={})) == expected
