"""The rule of every stage: what has its deadline, and what may pass (tasks.record)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from rlpipe.errors import (
    ActorLost,
    DataError,
    DeadlineExceeded,
    Mismatch,
    ObjectCorrupt,
    StoreError,
    Superseded,
)
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.types import Node
from tasks.record import may_pass, once, within


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


class Away:
    """Nodes of a store that answers when the loop has done something else meanwhile."""

    def __init__(self) -> None:
        self.loop, self.heard = asyncio.get_running_loop(), list[bool]()

    def find(self, *_: Any) -> None:
        self._answer()

    def commit(self, node: Node) -> Node:
        self._answer()
        return node

    def _answer(self) -> None:
        back = threading.Event()
        self.loop.call_soon_threadsafe(back.set)
        self.heard.append(back.wait(5.0))


async def test_while_a_stage_waits_for_the_store_its_process_hears_everything_else(tmp_path: Path):
    async def nothing() -> dict[str, Any]:
        return {}

    async def work() -> dict[str, Any]:
        return {"outputs": {"version": 1}}

    nodes = Away()
    said = SimpleNamespace(stage=lambda _: None)
    run: Any = SimpleNamespace(nodes=nodes, directory=tmp_path, progress=said, stage_seconds={})
    run.cluster = SimpleNamespace(switches=nothing)
    assert (await once(run, checkpoint_inputs("w"), work)).is_completed()
    assert nodes.heard == [True, True]
