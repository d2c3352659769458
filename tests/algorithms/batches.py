"""Hypothesis strategies for ragged batches: samples with groups, rollouts, masks and columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

number = st.floats(-3, 3, width=32)


@dataclass(frozen=True)
class Ragged:
    """A batch as Python lists: one entry per sample."""

    rewards: list[float]
    groups: list[int]
    rollouts: list[int]
    mask: list[list[float]]
    columns: list[list[list[float]]]
    """Column → sample → token."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row) for row in self.mask], np.int64)

    @staticmethod
    def flat(rows: list[list[float]]) -> np.ndarray:
        return np.array([value for row in rows for value in row], np.float64)


@st.composite
def ragged(draw, columns: int = 0, min_length: int = 0) -> Ragged:
    """Draw a batch of 1 to 7 samples with up to 5 tokens."""
    lengths = draw(st.lists(st.integers(min_length, 5), min_size=1, max_size=7))
    groups = [draw(st.integers(0, 2)) for _ in lengths]
    rollouts = [10 * group + draw(st.integers(0, 2)) for group in groups]

    def rows(values: st.SearchStrategy) -> list[list[float]]:
        return [draw(st.lists(values, min_size=length, max_size=length)) for length in lengths]

    mask = rows(st.sampled_from([0.0, 1.0, 1.0]))
    rewards = [draw(number) for _ in lengths]
    return Ragged(rewards, groups, rollouts, mask, [rows(number) for _ in range(columns)])
