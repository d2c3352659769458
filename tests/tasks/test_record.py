"""Stages as tasks: deadlines, retries and waiting for the store (tasks.record)."""

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
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs
from rlpipe.observe.progress import Progress
from rlpipe.types import Node, Stage
from tasks.record import handle, is_transient, reuse_or_run, stage_deadline


async def test_the_deadline_error_names_the_stage():
    with pytest.raises(DeadlineExceeded) as caught:
        async with stage_deadline(0.01, "run: train-3"):
            await asyncio.sleep(10)
    assert caught.value.where == "run: train-3"
    assert "orchestration.timeout_s" in str(caught.value)


async def test_an_inner_deadline_error_is_kept():
    with pytest.raises(DeadlineExceeded, match=r"trainer\.train: did not answer"):
        async with stage_deadline(10, "run: train-3"):
            raise DeadlineExceeded("did not answer in time", where="trainer.train")


def test_only_the_handle_of_an_evaluation_has_metrics():
    outputs = {"seconds": 1.0, "metrics": {"a": 0.5}, "machine": {}}
    nodes = {stage: Inputs(stage, {}, {}).node(outputs=outputs) for stage in Stage}
    handles = {stage: handle(node, reused=False).outputs for stage, node in nodes.items()}
    assert handles.pop(Stage.EVAL) == {"seconds": 1.0, "metrics": {"a": 0.5}}
    assert all(carried == {"seconds": 1.0} for carried in handles.values())


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
def test_only_transient_errors_are_retried(error: Exception, passing: bool):
    assert is_transient(None, None, Failed(data=error)) is passing


class SlowNodes:
    """Nodes of a store that answers only after the event loop has done other work."""

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


async def test_the_event_loop_runs_while_a_stage_waits_for_the_store(tmp_path: Path):
    async def nothing() -> dict[str, Any]:
        return {}

    async def work() -> dict[str, Any]:
        return {"outputs": {"version": 1}}

    nodes = SlowNodes()
    progress = Progress("run", 1)
    run: Any = SimpleNamespace(nodes=nodes, directory=tmp_path, progress=progress, stage_seconds={})
    run.cluster = SimpleNamespace(switches=nothing)
    assert (await reuse_or_run(run, checkpoint_inputs("w"), work)).is_completed()
    assert nodes.heard == [True, True]
