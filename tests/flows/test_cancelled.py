"""Cancel a flow run whose subflow trains: the training notices the Cancel.

Flows and Prefect server are real. Endless work replaces the iterations.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import StateType, TaskRun
from prefect.runtime import flow_run
from prefect.states import Cancelling

from flows import in_flight
from flows import train as training
from flows.fork import fork
from flows.in_flight import InProcess
from flows.stopping import Preempted, Stopping, handle_sigterm, result_or_cancelled
from rlpipe.config.run import RunConfig
from rlpipe.store.objects.files import Files
from tasks import record
from tasks.cancellation import FLOW_RUN_ID_VARIABLE
from tests.reprocessed import History, configuration

pytestmark = pytest.mark.integration
GRACE_S = 10.0


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of three iterations. Its fork has a grace period too long for a Cancel."""
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    monkeypatch.setattr(training, "check", lambda config, home: None)
    prompts = {"type": "file", "paths": [f"{tmp_path}/a.jsonl"]}
    config = configuration(
        tmp_path, num_rollout=5, data={"prompts": prompts}, resources={"stop_grace_s": GRACE_S}
    )
    History(Files(tmp_path / "store"), config).iterate(3)
    return "run@1"


class Endless:
    """Replaces `drive`: work that ends only with SIGTERM, which it sends itself, as a worker
    does on a Cancel.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool) -> None:
        self._monkeypatch = monkeypatch
        self._cancelled = cancelled
        self.ended: dict[str, str] = {}

    async def __call__(
        self, config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
    ) -> dict[str, Any]:
        try:
            await stopping.run(self._work())
        except Preempted as error:
            self.ended[config.run] = str(error.found)
            raise
        return {"run": config.run}

    async def _work(self) -> None:
        outer = flow_run.get_parent_flow_run_id()
        assert outer is not None
        self._monkeypatch.setenv(FLOW_RUN_ID_VARIABLE, outer)
        if self._cancelled:
            async with get_client() as client:
                await client.set_flow_run_state(UUID(outer), Cancelling(), force=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600 if self._cancelled else 0.1)


async def test_a_cancelled_fork_ends_its_training_at_once(
    prefect_server: str, parent: str, monkeypatch: pytest.MonkeyPatch
):
    endless = Endless(monkeypatch, cancelled=True)
    monkeypatch.setattr(training, "drive", endless)
    call: Any = fork
    state = await call(parent, run="again", return_state=True)
    assert endless.ended == {"again": "an iteration was abandoned after 0 s"}
    assert state.type is StateType.CANCELLED


async def test_a_terminated_fork_has_its_grace_period(
    prefect_server: str, parent: str, monkeypatch: pytest.MonkeyPatch
):
    endless = Endless(monkeypatch, cancelled=False)
    monkeypatch.setattr(training, "drive", endless)
    assert await fork(parent, run="again") == {"run": "again"}
    assert not endless.ended


@pytest.mark.parametrize("cancelled", [True, False])
async def test_the_iteration_of_a_cancelled_run_and_its_task_are_cancelled_and_not_crashed(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
):
    driver: list[str] = []
    config = configuration(tmp_path, num_rollout=1)

    async def open_run(run: str) -> Any:
        return SimpleNamespace(config=config)

    @record.stage_task("rollout", "rollout-{k}")
    async def endless_stage(run: str, k: int) -> None:
        if cancelled:
            async with get_client() as client:
                await client.set_flow_run_state(UUID(driver[0]), Cancelling(), force=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)

    @flow(name="iteration", on_running=[handle_sigterm])
    async def endless(run: str, k: int) -> None:
        await endless_stage(run, k)

    async def no_requests(run: str) -> None: ...

    monkeypatch.setattr(in_flight, "iteration", endless)
    monkeypatch.setattr(in_flight, "abort_requests", no_requests)
    monkeypatch.setattr(record, "context", open_run)

    @flow(on_running=[handle_sigterm])
    async def drive() -> Any:
        driver.append(str(flow_run.get_id()))
        monkeypatch.setenv(FLOW_RUN_ID_VARIABLE, driver[0])
        with Stopping(0.1) as stopping:
            async with InProcess(config) as iterations:
                return await result_or_cancelled(stopping.run(iterations.finish(0)))

    with_state: Any = drive
    state = await with_state(return_state=True)
    children = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(driver[0])])
    )
    async with get_client() as client:
        (child,) = await client.read_flow_runs(flow_run_filter=children)
        stage = await _ended_task(client, child.id)
    assert state.type is (StateType.CANCELLED if cancelled else StateType.FAILED)
    assert child.state_type is (StateType.CANCELLED if cancelled else StateType.CRASHED)
    assert stage.state_type is child.state_type


async def _ended_task(client: PrefectClient, flow_run_id: UUID) -> TaskRun:
    """Return the only task run of a flow run once the server has recorded its end."""
    of_flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    async with asyncio.timeout(120):
        while True:
            tasks = await client.read_task_runs(flow_run_filter=of_flow_run)
            if tasks and tasks[0].state is not None and tasks[0].state.is_final():
                return tasks[0]
            await asyncio.sleep(0.5)
