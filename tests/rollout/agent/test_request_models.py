"""The limits of numbers in requests of agents (rlpipe.rollout.agent.request_models)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlpipe.rollout.agent.request_models import CompletionRequest


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "step"),
    [
        ("presence_penalty", -2.0, 2.0, 0.1),
        ("frequency_penalty", -2.0, 2.0, 0.1),
        ("temperature", 0.0, 2.0, 0.1),
        ("min_p", 0.0, 1.0, 0.1),
        ("n", 1, 128, 1),
        ("logprobs", 0, 5, 1),
    ],
)
def test_a_number_is_accepted_up_to_its_limits(name: str, lowest: Any, highest: Any, step: Any):
    for accepted in (lowest, highest):
        request = CompletionRequest.model_validate({"prompt": "a", name: accepted})
        assert getattr(request, name) == accepted
    for refused in (lowest - step, highest + step):
        with pytest.raises(ValidationError, match=name):
            CompletionRequest.model_validate({"prompt": "a", name: refused})


def test_a_token_id_is_below_two_to_the_31():
    assert CompletionRequest.model_validate({"prompt": [0, 2**31 - 1]}).prompt == [0, 2**31 - 1]
    for refused in (-1, 2**31):
        with pytest.raises(ValidationError, match="prompt"):
            CompletionRequest.model_validate({"prompt": [refused]})
