"""Ragged batches for hypothesis: samples with groups, rollouts, masks and a few columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

number = st.floats(-3, 3, width=32)


@dataclass(frozen=True)
class Ragged:
    """One list per sample of everything."""

    rewards: list[float]
    groups: list[int]
    rollouts: list[int]
    mask: list[list[float]]
    columns: list[list[list[float]]]
    """Columns, samples, tokens."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row) for row in self.mask], np.int64)

    @staticmethod
    def flat(rows: list[list[float]]) -> np.ndarray:
        return np.array([value for row in rows for value in row], np.float64)


@st.composite
def ragged(draw, columns: int = 0, least: int = 0) -> Ragged:
    lengths = draw(st.lists(st.integers(least, 5), min_size=1, max_size=7))
    groups = [draw(st.integers(0, 2)) for _ in lengths]
    rollouts = [10 * group + draw(st.integers(0, 2)) for group in groups]

    def rows(values: st.SearchStrategy) -> list[list[float]]:
        return [draw(st.lists(values, min_size=length, max_size=length)) for length in lengths]

    mask = rows(st.sampled_from([0.0, 1.0, 1.0]))
    rewards = [draw(number) for _ in lengths]
    return Ragged(rewards, groups, rollouts, mask, [rows(number) for _ in range(columns)])
