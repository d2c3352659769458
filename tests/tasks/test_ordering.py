"""The order of sampling, training and pushing across iterations (tasks.ordering)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
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
from tasks import ordering
from tasks.context import RunContext
from tasks.ordering import (
    commit_before_sampling,
    evaluates_concurrently,
    evaluation_due,
    most_ahead,
    pushed_at_interval,
    wait_to_push,
    wait_to_sample,
    wait_to_train,
)
from tests.tasks.test_begin import config

Opened = Any


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open the run `run` in this process, without actors, with these configuration sections."""
    files = Files(tmp_path / "store")

    def opening(*, measured: bool = False, **sections: Any) -> RunContext:
        (tmp_path / "b.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
        prompts = {"type": "file", "paths": [str(tmp_path / "b.jsonl")], "label_key": "answer"}
        held = {"eval_interval": 1, "datasets": [{"name": "held", "prompts": prompts}]}
        run = config(evaluation=held if measured else {}, **sections)
        separate: Any = SimpleNamespace(shares_gpus=False)
        epoch = Epochs(files).acquire("run")
        ctx = RunContext(
            run, tmp_path / "home", "/models/m", files, separate, Progress("run", 3), epoch
        )
        ctx.branches.create("run", run.model_dump(mode="json"), "init")
        monkeypatch.setitem(contexts._OPEN, "run", ctx)
        return ctx

    return opening


def commit(ctx: RunContext, k: int) -> None:
    made = Commit(
        branch="run",
        iteration=k,
        parent=ctx.branches.parent_name("run", k),
        plans=("p",),
        nodes={Stage.TRAIN: f"t{k}"},
        data=DataState(),
        config_digest="c",
        epoch=ctx.epoch.number,
    )
    ctx.branches.commit(made)


async def is_waiting(ordering: Any) -> bool:
    """True if the coroutine still waits after a few polls."""
    _, pending = await asyncio.wait({ordering}, timeout=0.25)
    return bool(pending)


async def test_the_first_iteration_does_not_wait(opened: Opened):
    opened()
    await wait_to_sample("run", 0)
    await wait_to_train("run", 0)


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_an_iteration_samples_once_the_iteration_before_the_buffer_is_committed(
    opened: Opened, ahead: int
):
    ctx = opened(async_buffer_size=ahead)
    for k in range(ahead + 1):
        await wait_to_sample("run", k)
    waiting = asyncio.create_task(wait_to_sample("run", ahead + 1))
    assert await is_waiting(waiting)
    commit(ctx, 0)
    await waiting


async def test_an_iteration_trains_as_soon_as_the_iteration_before_is_committed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ordering, "FIRST_POLL_S", 600.0)
    monkeypatch.setattr(ordering, "LAST_POLL_S", 600.0)
    ctx = opened(async_buffer_size=3)
    waiting = asyncio.create_task(wait_to_train("run", 1))
    assert await is_waiting(waiting)
    commit(ctx, 0)
    ctx.notify()
    await asyncio.wait_for(waiting, 30)


def measure(ctx: RunContext, weights: str, **metrics: float) -> None:
    inputs = eval_inputs(ctx.config, ctx.config.evaluation.datasets[0], weights)
    ctx.nodes.commit(inputs.node(files=(), outputs={"metrics": metrics}))


async def test_training_continues_during_an_evaluation_and_the_push_waits_for_it(
    opened: Opened,
):
    ctx = opened(async_buffer_size=3, measured=True)
    commit(ctx, 0)
    await wait_to_train("run", 1)
    waiting = asyncio.create_task(wait_to_push("run", 1))
    assert await is_waiting(waiting)
    measure(ctx, "t0")
    await waiting


async def test_training_waits_for_an_evaluation_of_weights_that_were_not_pushed(opened: Opened):
    ctx = opened(async_buffer_size=3, measured=True, sync={"update_weights_interval": 2})
    commit(ctx, 0)
    waiting = asyncio.create_task(wait_to_train("run", 1))
    assert await is_waiting(waiting)
    measure(ctx, "t0")
    await waiting
    commit(ctx, 1)
    await wait_to_train("run", 2)


async def test_an_evaluation_counts_for_rebuilt_weights(opened: Opened):
    ctx = opened(measured=True)
    commit(ctx, 0)
    measure(ctx, "t0")
    Segments(ctx.files).record("run", 1, ctx.epoch.number, weights="t0", segment="s0")
    assert ctx.weights_before(1) == "s0"
    await wait_to_push("run", 1)


async def test_an_iteration_without_a_driver_does_not_wait_for_evaluations(opened: Opened):
    ctx = opened(measured=True)
    ctx.has_driver = False
    commit(ctx, 0)
    await wait_to_train("run", 1)
    await wait_to_push("run", 1)


async def test_the_timeout_names_the_waiting_iteration_and_the_missing_commit(opened: Opened):
    opened(orchestration={"timeout_s": 0.1})
    with pytest.raises(DeadlineExceeded) as caught:
        await wait_to_sample("run", 2)
    assert caught.value.where == "run, iteration 2"
    assert caught.value.found == "not in the store: the commit of iteration 1"


async def test_a_replaced_driver_stops_waiting(opened: Opened):
    ctx = opened()
    waiting = asyncio.create_task(wait_to_sample("run", 1))
    assert await is_waiting(waiting)
    Epochs(ctx.files).acquire("run", takeover=True)
    start = time.monotonic()
    with pytest.raises(Fenced, match="taken over"):
        await waiting
    assert time.monotonic() - start < 30


@given(st.integers(0, 50), st.integers(0, 6), st.integers(1, 6), st.integers(0, 12))
def test_the_required_commit_pushed_weights_within_the_staleness_bound(
    k: int, buffer_size: int, interval: int, done: int
):
    """The first weights are always pushed; intervals count the iterations that slime has done."""
    assume(buffer_size >= interval - 1)
    run = config(
        start_rollout_id=done,
        async_buffer_size=buffer_size,
        sync={"update_weights_interval": interval},
    )
    before = commit_before_sampling(k, buffer_size, interval, done)
    assert before < max(k, 1), "it does not wait for itself"
    versions = range(1, before + 2)
    pushed = max((version for version in versions if pushed_at_interval(run, version)), default=0)
    assert k - pushed <= buffer_size
    assert before < 0 or pushed == before + 1, "it waits for nothing that is not pushed"


async def test_a_run_that_meets_its_stop_condition_stops_training(opened: Opened):
    ctx = opened(measured=True, stop_when={"metric": "eval/held/accuracy", "at_least": 0.5})
    commit(ctx, 0)
    measure(ctx, "t0", **{"eval/held/accuracy": 0.5})
    waiting = asyncio.create_task(wait_to_train("run", 1))
    assert await is_waiting(waiting)
    waiting.cancel()


def test_evaluations_of_a_run_that_continues_slime_are_due_at_slimes_numbers():
    held = {"name": "held", "prompts": {"type": "file", "paths": ["b.jsonl"]}}
    evaluation = {"eval_interval": 5, "datasets": [held]}
    run = config(num_rollout=9, start_rollout_id=3, evaluation=evaluation)
    assert [version for version in range(1, 10) if evaluation_due(run, version)] == [2, 7, 9]


@pytest.mark.parametrize(
    ("shares_gpus", "concurrent"), [(False, [True, True, False]), (True, [False] * 3)]
)
def test_evaluations_run_during_an_iteration_only_on_gpus_of_their_own(
    opened: Opened, shares_gpus: bool, concurrent: list[bool]
):
    ctx = opened(measured=True, num_rollout=3)
    ctx.cluster.shares_gpus = shares_gpus
    assert [evaluates_concurrently(ctx, version) for version in (1, 2, 3)] == concurrent


@pytest.mark.parametrize(
    ("buffer_size", "interval", "expected"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 3)]
)
def test_rollouts_of_open_groups_run_less_far_ahead_than_their_tokens_may_be_old(
    buffer_size: int, interval: int, expected: int
):
    run = config(
        async_buffer_size=buffer_size,
        sync={"update_weights_interval": interval},
        rollout={
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "selection": "first_finished",
        },
    )
    assert most_ahead(run) == expected
    planned = run.model_copy(
        update={"rollout": run.rollout.model_copy(update={"selection": "planned"})}
    )
    assert most_ahead(planned) == buffer_size
