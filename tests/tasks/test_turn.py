"""The gates of an iteration: whose turn it is, by what the store says (tasks.turn)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlpipe.errors import DeadlineExceeded, Fenced
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments
from rlpipe.types import Commit, DataState, Stage
from tasks import context as contexts
from tasks import turn
from tasks.context import RunContext
from tasks.turn import sampled_after, turn_to_push, turn_to_sample, turn_to_train
from tests.tasks.test_begin import config

Opened = Any


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens the run `run` in this process, without actors and with these sections in its
    configuration."""
    files = Files(tmp_path / "store")

    def opening(*, measured: bool = False, **sections: Any) -> RunContext:
        (tmp_path / "b.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
        prompts = {"type": "file", "paths": [str(tmp_path / "b.jsonl")], "label_key": "answer"}
        held = {"eval_interval": 1, "datasets": [{"name": "held", "prompts": prompts}]}
        run = config(evaluation=held if measured else {}, **sections)
        no_actors: Any = None
        epoch = Epochs(files).acquire("run")
        it = RunContext(
            run, tmp_path / "home", "/models/m", files, no_actors, Progress("run", 3), epoch
        )
        it.branches.create("run", run.model_dump(mode="json"), "init")
        monkeypatch.setitem(contexts._OPEN, "run", it)
        return it

    return opening


def commit(it: RunContext, k: int) -> None:
    made = Commit(
        branch="run",
        iteration=k,
        parent=it.branches.parent_name("run", k),
        plans=("p",),
        nodes={Stage.TRAIN: f"t{k}"},
        data=DataState(),
        config_digest="c",
        epoch=it.epoch.number,
    )
    it.branches.commit(made)


async def waits(turn: Any) -> bool:
    """Has it not come within the time of a few looks?"""
    _, pending = await asyncio.wait({turn}, timeout=0.25)
    return bool(pending)


async def test_the_first_iteration_need_not_wait(opened: Opened):
    opened()
    await turn_to_sample("run", 0)
    await turn_to_train("run", 0)


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_an_iteration_samples_once_the_one_so_many_before_is_committed(
    opened: Opened, ahead: int
):
    it = opened(async_buffer_size=ahead)
    for k in range(ahead + 1):
        await turn_to_sample("run", k)
    waiting = asyncio.create_task(turn_to_sample("run", ahead + 1))
    assert await waits(waiting)
    commit(it, 0)
    await waiting


async def test_an_iteration_trains_once_the_one_before_is_committed_and_hears_of_it_at_once(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(turn, "FIRST_LOOK_S", 600.0)
    monkeypatch.setattr(turn, "LAST_LOOK_S", 600.0)
    it = opened(async_buffer_size=3)
    waiting = asyncio.create_task(turn_to_train("run", 1))
    assert await waits(waiting)
    commit(it, 0)
    it.tell()
    await asyncio.wait_for(waiting, 30)


def measure(it: RunContext, weights: str, **metrics: float) -> None:
    inputs = eval_inputs(it.config, it.config.evaluation.datasets[0], weights)
    it.nodes.commit(inputs.node(files=(), outputs={"metrics": metrics}))


async def test_weights_are_trained_on_while_they_are_measured_and_engines_keep_them_until_then(
    opened: Opened,
):
    it = opened(async_buffer_size=3, measured=True)
    commit(it, 0)
    await turn_to_train("run", 1)
    waiting = asyncio.create_task(turn_to_push("run", 1))
    assert await waits(waiting)
    measure(it, "t0")
    await waiting


async def test_weights_that_were_not_pushed_are_measured_before_they_are_trained_on(opened: Opened):
    it = opened(async_buffer_size=3, measured=True, sync={"update_weights_interval": 2})
    commit(it, 0)
    waiting = asyncio.create_task(turn_to_train("run", 1))
    assert await waits(waiting)
    measure(it, "t0")
    await waiting
    commit(it, 1)
    await turn_to_train("run", 2)


async def test_what_was_measured_counts_for_weights_that_have_been_rebuilt_since(opened: Opened):
    it = opened(measured=True)
    commit(it, 0)
    measure(it, "t0")
    Segments(it.files).record("run", 1, it.epoch.number, weights="t0", segment="s0")
    assert it.weights_before(1) == "s0"
    await turn_to_push("run", 1)


async def test_an_iteration_that_nobody_drives_does_not_wait_for_measurements(opened: Opened):
    it = opened(measured=True)
    it.driven = False
    commit(it, 0)
    await turn_to_train("run", 1)
    await turn_to_push("run", 1)


async def test_a_turn_that_does_not_come_in_time_says_who_waited_for_what(opened: Opened):
    opened(orchestration={"timeout_s": 0.1})
    with pytest.raises(DeadlineExceeded) as caught:
        await turn_to_sample("run", 2)
    assert caught.value.where == "run, iteration 2"
    assert caught.value.found == "not there: the commit of iteration 1"


async def test_who_was_replaced_stops_waiting(opened: Opened):
    it = opened()
    waiting = asyncio.create_task(turn_to_sample("run", 1))
    assert await waits(waiting)
    Epochs(it.files).acquire("run", takeover=True)
    start = time.monotonic()
    with pytest.raises(Fenced, match="taken over"):
        await waiting
    assert time.monotonic() - start < 30


@given(st.integers(0, 50), st.integers(0, 6), st.integers(1, 6))
def test_what_is_sampled_from_is_pushed_by_then_and_no_older_than_the_buffer(
    k: int, buffer_size: int, interval: int
):
    assume(buffer_size >= interval - 1)
    before = sampled_after(k, buffer_size, interval)
    assert before < max(k, 1), "it does not wait for itself"
    pushed = max((version for version in range(before + 2) if version % interval == 0), default=0)
    assert k - pushed <= buffer_size
    assert before < 0 or (before + 1) % interval == 0, "it waits for nothing that is not pushed"


async def test_a_run_that_is_good_enough_trains_no_further(opened: Opened):
    it = opened(measured=True, stop_when={"metric": "eval/held/accuracy", "at_least": 0.5})
    commit(it, 0)
    measure(it, "t0", **{"eval/held/accuracy": 0.5})
    waiting = asyncio.create_task(turn_to_train("run", 1))
    assert await waits(waiting)
    waiting.cancel()
