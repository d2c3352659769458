"""The reward of the chaos recipe: how many of the letters are vowels, at a leisurely pace, so that
the stage can be hit."""

from __future__ import annotations

import time

from rlpipe.types import Sample

PACE_S = 0.002


def score(sample: Sample) -> float:
    """Share of vowels among the first 12 characters."""
    time.sleep(PACE_S)
    return sum(character in "aeiou" for character in sample.response[:12]) / 12
