"""Iterations in flight: how many are open, their order, and the others after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.runtime import flow_run
from prefect.settings import PREFECT_RESULTS_PERSIST_BY_DEFAULT, temporary_settings

from flows import in_flight, train
from flows.in_flight import InProcess, IterationFailed, numbered
from flows.iteration import iteration
from flows.stopping import Stopping
from rlpipe.config.run import RunConfig
from tasks.observe import Observer
from tests.tasks.test_begin import config


class Stages:
    """Replaces the flow of an iteration: each one ends when the test says."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.begun = asyncio.Event()
        self.committed: set[int] = set()
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __call__(self, run: str, k: int) -> dict[str, Any]:
        self.log.append(f"open {k}")
        self._ends[k] = asyncio.get_running_loop().create_future()
        self.begun.set()
        try:
            return await self._ends[k]
        except asyncio.CancelledError:
            self.log.append(f"cancel {k}")
            raise

    async def abort_requests(self, run: str) -> None:
        self.log.append("abort")

    async def end(self, k: int, error: Exception | None = None, *, committed: bool = True) -> None:
        await asyncio.sleep(0.01)
        if error is not None:
            self._ends[k].set_exception(error)
        else:
            self.committed |= {k} if committed else set()
            self._ends[k].set_result({"k": k})


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    made = Stages()

    async def nothing(_run: str) -> None: ...

    monkeypatch.setattr(in_flight, "numbered", lambda _: made)
    monkeypatch.setattr(in_flight, "abort_requests", made.abort_requests)
    monkeypatch.setattr(in_flight, "context", nothing)
    monkeypatch.setattr(in_flight, "is_committed", lambda _, k: k in made.committed)
    return made


async def test_without_a_buffer_one_iteration_is_open_at_a_time(stages: Stages):
    async with InProcess(config()) as iterations:
        for k in range(3):
            finishing = asyncio.create_task(iterations.finish(k))
            await stages.end(k)
            assert await finishing == {"k": k}
    assert stages.log == ["open 0", "open 1", "open 2"]


async def test_with_a_buffer_of_one_two_are_open_and_they_finish_in_order(stages: Stages):
    async with InProcess(config(async_buffer_size=1)) as iterations:
        finishing = asyncio.create_task(iterations.finish(0))
        await stages.end(1)
        assert not finishing.done()
        await stages.end(0)
        assert await finishing == {"k": 0}
        assert stages.log == ["open 0", "open 1"]
        finishing = asyncio.create_task(iterations.finish(1))
        assert await finishing == {"k": 1}
        finishing = asyncio.create_task(iterations.finish(2))
        await stages.end(2)
        await finishing
    assert stages.log == ["open 0", "open 1", "open 2"]


async def test_an_iteration_without_a_commit_is_a_failure(stages: Stages):
    async with InProcess(config()) as iterations:
        finishing = asyncio.create_task(iterations.finish(0))
        await stages.end(0, committed=False)
        with pytest.raises(IterationFailed, match="without a commit"):
            await finishing


class FakeObserver:
    """Replaces the observer of committed iterations."""

    async def iteration(self, k: int, nodes: dict[str, Any], *, seconds: float) -> None: ...


def open_run(monkeypatch: pytest.MonkeyPatch, run: RunConfig) -> None:
    """Open a run with engines on GPUs of their own, without actors."""

    async def opened(_run: str) -> Any:
        return SimpleNamespace(config=run, cluster=SimpleNamespace(shares_gpus=False))

    monkeypatch.setattr(train, "context", opened)


@pytest.mark.parametrize(("buffer_size", "opened"), [(0, 1), (1, 3), (2, 4)])
async def test_iterations_ahead_sample_during_an_evaluation(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, buffer_size: int, opened: int
):
    async def evaluated(_config: Any, version: int, _observer: Any, **_: Any) -> bool:
        await asyncio.sleep(0.01)
        stages.log.append(f"evaluated {version}")
        return version == 1

    monkeypatch.setattr(train, "evaluate_if_due", evaluated)
    run = config(num_rollout=5, async_buffer_size=buffer_size)
    open_run(monkeypatch, run)
    watching = cast("Observer", FakeObserver())
    with Stopping(0.0) as stopping:
        running = asyncio.create_task(train.run_iterations(run, 0, watching, stopping))
        await stages.begun.wait()
        await stages.end(0)
        await running
    before = stages.log[: stages.log.index("evaluated 1")]
    assert before == ["evaluated 0", *(f"open {k}" for k in range(opened))]


async def test_a_run_that_ends_early_says_why(monkeypatch: pytest.MonkeyPatch):
    printed: list[str] = []
    node = SimpleNamespace(outputs={"metrics": {"eval/held/accuracy": 0.75}})
    ctx = SimpleNamespace(notify=lambda: None, progress=SimpleNamespace(say=printed.append))

    async def evaluated(_run: str, _version: int, _dataset: str) -> Any:
        return node

    async def opened(_run: str) -> Any:
        return ctx

    async def recorded(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(train, "evaluate", evaluated)
    monkeypatch.setattr(train, "context", opened)
    watching = cast("Observer", SimpleNamespace(evaluation=recorded))
    datasets = [{"name": "held", "prompts": {"type": "file", "paths": ["held.jsonl"]}}]
    for bound, printing in ((0.8, False), (0.75, True)):
        run = config(
            num_rollout=3,
            evaluation={"datasets": datasets, "eval_interval": 1},
            stop_when={"metric": "eval/held/accuracy", "at_least": bound},
        )
        assert await train.evaluate_if_due(run, 1, watching) is printing
    assert printed == [
        f"{run.run}: ends after 1 iterations, because stop_when is met: "
        "eval/held/accuracy is 0.750, at least 0.75"
    ]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_iteration_runs_during_a_concurrent_evaluation_and_waits_for_it(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    async def evaluated(
        _config: Any, version: int, _observer: Any, *, concurrent: bool = False
    ) -> bool:
        if concurrent:
            await stages.end(version)
            await asyncio.sleep(0.01)
            if fails:
                raise ZeroDivisionError
        stages.log.append(f"evaluated {version}{' concurrently' * concurrent}")
        return False

    monkeypatch.setattr(train, "evaluate_if_due", evaluated)
    held = {
        "eval_interval": 1,
        "datasets": [
            {"name": "held", "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 4}}
        ],
    }
    run = config(num_rollout=2, evaluation=held)
    open_run(monkeypatch, run)
    watching = cast("Observer", FakeObserver())
    with Stopping(0.0) as stopping:
        running = asyncio.create_task(train.run_iterations(run, 0, watching, stopping))
        await stages.begun.wait()
        await stages.end(0)
        await asyncio.gather(running, return_exceptions=True)
    after = ["evaluated 1 concurrently", "evaluated 2"] if not fails else []
    assert stages.log == ["evaluated 0", "open 0", "open 1", *after]
    assert (type(running.exception()) is ZeroDivisionError) == fails


async def test_a_failure_cancels_later_iterations_and_aborts_their_requests(stages: Stages):
    async def run() -> None:
        async with InProcess(config(async_buffer_size=2)) as iterations:
            finishing = asyncio.create_task(iterations.finish(0))
            await stages.end(0, ZeroDivisionError())
            await finishing

    with pytest.raises(ZeroDivisionError):
        await run()
    assert stages.log == ["open 0", "open 1", "open 2", "cancel 1", "cancel 2", "abort"]


async def test_cancelling_the_wait_cancels_the_iteration_and_later_ones(stages: Stages):
    async with InProcess(config(async_buffer_size=1)) as iterations:
        finishing = asyncio.create_task(iterations.finish(0))
        await asyncio.sleep(0.01)
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
    assert sorted(stages.log) == ["abort", "cancel 0", "cancel 1", "open 0", "open 1"]


@pytest.fixture
def server(prefect_server: str) -> Iterator[None]:
    """A Prefect server that keeps results."""
    with temporary_settings({PREFECT_RESULTS_PERSIST_BY_DEFAULT: True}):
        yield


@pytest.mark.integration
async def test_a_restarted_flow_run_mixes_up_no_iterations_and_no_results(
    server: None, monkeypatch: pytest.MonkeyPatch
):
    begun = []

    async def stages(run: str, k: int) -> dict[str, Any]:
        begun.append(k)
        return {"k": k}

    monkeypatch.setattr(iteration, "fn", stages)

    @flow(retries=1)
    async def run() -> tuple[str, list[dict[str, Any]]]:
        first = flow_run.run_count == 1
        found = [await numbered(k)("run", k) for k in ((0, 1) if first else (2, 1))]
        if first:
            raise ZeroDivisionError
        return flow_run.id, found

    number, found = await run()
    assert found == [{"k": 2}, {"k": 1}] and begun == [0, 1, 2, 1]
    of_run = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(number)]))
    async with get_client() as client:
        made = await client.read_flow_runs(flow_run_filter=of_run)
    assert sorted(one.name for one in made) == ["run-0", "run-1", "run-1", "run-2"]
    places = {(one.parent_task_run_id, one.parameters["k"]) for one in made}
    assert len(places) == len({place for place, _ in places}) == 3, (
        "each iteration has one of its own"
    )
