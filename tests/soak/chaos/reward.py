"""The reward of the chaos recipe: the share of vowels, delayed so that kills hit the stage."""

from __future__ import annotations

import time

from rlpipe.types import Sample

DELAY_S = 0.002


def score(sample: Sample) -> float:
    """Return the share of vowels among the first 12 characters."""
    time.sleep(DELAY_S)
    return sum(character in "aeiou" for character in sample.response[:12]) / 12
