"""Several calls of a plain function in one thread (rlpipe.rewards.workers.ThreadWorker)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from rlpipe.errors import DeadlineExceeded
from rlpipe.rewards import workers
from rlpipe.rewards.scorer import Score, Scorer
from rlpipe.rewards.workers import ThreadWorker
from rlpipe.types import Sample

LONG_S = 60.0


class Waiting(Scorer):
    """Gives each sample its index as reward; waits for `release` at the sample `late`."""

    def __init__(self, late: int | None) -> None:
        self.late = late
        self.called: list[int] = []
        self.waits, self.release, self.left = (threading.Event() for _ in range(3))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        index = samples[0].index
        self.called.append(index)
        if index == self.late:
            self.waits.set()
            assert self.release.wait(LONG_S)
            self.left.set()
        return [Score(float(index), {})]


def calls(number: int) -> list[list[Sample]]:
    return [[Sample(group_id="g", index=index)] for index in range(number)]


async def test_one_late_call_of_several_is_an_error_and_the_others_are_scored():
    scorer = Waiting(late=1)
    worker = ThreadWorker(scorer)
    outcomes = await worker.call(calls(4), timeout_s=1.0)
    scorer.release.set()
    assert scorer.left.wait(LONG_S)
    await worker.call(calls(1), LONG_S)
    await worker.stop()
    late = outcomes[1]
    assert isinstance(late, DeadlineExceeded)
    assert "reward/g/1" in str(late)
    scores = [outcome[0].reward for outcome in outcomes if isinstance(outcome, list)]
    assert scores == [0.0, 2.0, 3.0]
    assert scorer.called == [0, 1, 2, 3, 0], "the abandoned thread began no further call"


async def test_a_cancelled_stage_begins_no_further_call():
    scorer = Waiting(late=1)
    worker = ThreadWorker(scorer)
    before = {*threading.enumerate()}
    stage = asyncio.create_task(worker.call(calls(4), LONG_S))
    assert await asyncio.to_thread(scorer.waits.wait, LONG_S)
    new = {*threading.enumerate()} - before
    (thread,) = [thread for thread in new if thread.name == "reward"]
    stage.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage
    scorer.release.set()
    await asyncio.to_thread(thread.join, LONG_S)
    assert not thread.is_alive()
    assert scorer.called == [0, 1]


@pytest.mark.parametrize(("limit_s", "expected"), [(LONG_S, [1, 2, 4, 8, 8]), (0.0, [1] * 5)])
async def test_only_short_calls_are_given_to_the_thread_together(
    limit_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "AT_ONCE_S", limit_s)
    monkeypatch.setattr(workers, "MAX_AT_ONCE", 8)
    worker = ThreadWorker(Waiting(late=None))
    seen = []
    for _ in expected:
        seen.append(worker.at_once)
        await worker.call(calls(worker.at_once), LONG_S)
    await worker.stop()
    assert seen == expected


async def test_calls_become_fewer_when_they_take_longer(monkeypatch: pytest.MonkeyPatch):
    worker = ThreadWorker(Waiting(late=None))
    worker._pace.at_once = 8
    monkeypatch.setattr(workers, "AT_ONCE_S", 0.0)
    await worker.call(calls(8), LONG_S)
    await worker.stop()
    assert worker.at_once == 4
