"""The rule of every stage: what has its deadline, and what may pass (tasks.record)."""

from __future__ import annotations

import asyncio

import pytest
from prefect.states import Failed

from rlpipe.errors import ActorLost, DataError, DeadlineExceeded, Mismatch, ObjectCorrupt, StoreError, Superseded
from tasks.record import may_pass, within


async def test_a_stage_that_hangs_is_named():
    with pytest.raises(DeadlineExceeded) as caught:
        async with within(0.01, "run: train-3"):
            await asyncio.sleep(10)
    assert caught.value.where == "run: train-3"
    assert "orchestration.timeout_s" in str(caught.value)


async def test_a_deadline_inside_it_keeps_its_own_name():
    with pytest.raises(DeadlineExceeded, match=r"trainer\.train: did not answer"):
        async with within(10, "run: train-3"):
            raise DeadlineExceeded("did not answer in time", where="trainer.train")


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ActorLost("gone"), True),
        (StoreError("no"), True),
        (DeadlineExceeded("late"), True),
        (ObjectCorrupt("changed"), False),
        (DataError("row"), False),
        (Mismatch("other bits"), False),
        (Superseded("score again"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, passing: bool):
    assert may_pass(None, None, Failed(data=error)) is passing
