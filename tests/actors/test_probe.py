"""Who scores when, after a push (rlpipe.actors.probe). What the scores are: tests/tasks, with real engines."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlpipe.actors import probe
from rlpipe.errors import DeadlineExceeded
from rlpipe.packing import BatchColumns

SAMPLES = BatchColumns.from_lists([[1, 2]], [[3, 4]])
TRAINER = np.array([-1.0, -2.0], np.float32)
ENGINES = ["http://a", "http://b", "http://c"]


class Scorer:
    """Scores for all engines; `most` of them at a time. One may hang."""

    def __init__(self, hangs: str | None = None) -> None:
        self.hangs, self.now, self.most = hangs, 0, 0

    async def __call__(self, url: str, sequences: list[list[int]], deadline_s: float) -> list[list[float]]:
        assert sequences == [[1, 2, 3, 4]]
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(600 if url == self.hangs else 0.01)
        self.now -= 1
        return [[-9.0, -1.0, -2.5 if url == "http://b" else -2.0]]


@pytest.mark.parametrize(("at_once", "most"), [(True, 3), (False, 1)])
def test_engines_score_at_the_same_time_unless_they_share_cores(monkeypatch: pytest.MonkeyPatch, at_once: bool, most: int):
    scorer = Scorer()
    monkeypatch.setattr(probe, "_score", scorer)
    assert probe.largest_difference(SAMPLES, TRAINER, ENGINES, 60.0, at_once=at_once) == 0.5
    assert scorer.most == most


def test_who_has_not_scored_in_time_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "_score", Scorer("http://b"))
    with pytest.raises(DeadlineExceeded) as caught:
        probe.largest_difference(SAMPLES, TRAINER, ENGINES, 0.2, at_once=True)
    assert caught.value.where == "http://b"
