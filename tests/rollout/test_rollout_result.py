"""Counters of a running rollout (rlpipe.rollout.rollout_result)."""

from __future__ import annotations

from rlpipe.rollout.rollout_result import RolloutProgress
from rlpipe.types import Sample


def sample(index: int, tokens: int) -> Sample:
    return Sample(
        group_id="run:00000001",
        index=index,
        prompt="",
        prompt_ids=[1, 2, 3],
        response_ids=[4] * tokens,
    )


def test_the_prompt_of_a_group_is_computed_once():
    progress = RolloutProgress()
    progress.count([sample(0, 5), sample(1, 2), sample(2, 0)])
    assert progress.spans == [(0, 8), (3, 5), (3, 3)]


def test_tokens_of_an_earlier_rollout_are_computed_once_for_its_continuation():
    progress = RolloutProgress()
    progress.count([sample(0, 5), sample(1, 9)], [sample(0, 5), sample(1, 4)])
    assert progress.spans == [(8, 8), (7, 12)]
