"""Iterations as flow runs: rescheduling, retries, and cancelling at the end of the run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Pending,
    Running,
)

from flows import deployed_iterations
from flows.deployed_iterations import DeployedIterations, IterationFailed
from rlpipe.config.load import home as default_home
from rlpipe.errors import ConfigError, DeadlineExceeded
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, Stage
from tasks import context as contexts
from tasks.context import RunContext
from tests.tasks.test_begin import config


class Server:
    """Replaces Prefect's server and worker: a flow run goes through the states that the test
    gives.
    """

    def __init__(self, ctx: RunContext) -> None:
        self.it, self.log = ctx, list[str]()
        self.scripts: dict[int, list[State | str]] = {}
        self.deployed = True
        self.variables: dict[str, str] = {}
        self._runs: dict[UUID, FlowRun] = {}
        self._keys: dict[str, UUID] = {}
        self._numbers: dict[UUID, int] = {}

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.log.append("closed")

    def add(self, k: int, key: str, state: State) -> FlowRun:
        run = FlowRun(
            id=uuid4(), name=f"run-{k}", flow_id=uuid4(), idempotency_key=key, state=state
        )
        self._runs[run.id], self._keys[key], self._numbers[run.id] = run, run.id, k
        return run

    async def run_deployment(
        self,
        name: str,
        *,
        parameters: dict[str, Any],
        idempotency_key: str,
        job_variables: dict[str, str],
        **_: Any,
    ) -> FlowRun:
        if not self.deployed:
            raise ObjectNotFound(Exception())
        self.variables = job_variables
        self.log.append(f"open {parameters['k']}")
        return self.add(parameters["k"], idempotency_key, Pending())

    async def read_flow_runs(self, *, flow_run_filter: Any, limit: int) -> list[FlowRun]:
        return [
            self._runs[self._keys[key]]
            for key in flow_run_filter.idempotency_key.any_
            if key in self._keys
        ]

    async def read_flow_run(self, number: UUID) -> FlowRun:
        k = self._numbers[number]
        if script := self.scripts.get(k):
            step = script.pop(0)
            if step == "commit":
                commit(self.it, k)
                step = Completed()
            self._runs[number].state = step  # type: ignore[assignment]
        return self._runs[number].model_copy()

    async def set_flow_run_state(self, number: UUID, state: State, *, force: bool = False) -> None:
        self.log.append(f"{state.name} {self._numbers[number]}")
        self._runs[number].state = Cancelled() if state.is_cancelling() else state


def commit(ctx: RunContext, k: int) -> None:
    node = ctx.nodes.commit(
        Inputs(stage=Stage.TRAIN, parents={"k": str(k)}, config={}).node(files=(), outputs={})
    )
    made = Commit(
        branch="run",
        iteration=k,
        parent=f"run/{k - 1:08d}" if k else None,
        plans=("p",),
        nodes={Stage.TRAIN: node.digest},
        data=DataState(),
        config_digest="c",
        epoch=1,
    )
    ctx.branches.commit(made)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The run `run` of three iterations, open in this process without actors, and a fake server."""
    policy = {"iterations": "deployment", "retries": 2, "retry_delay_s": 0.01}
    run = config(orchestration=policy)
    files = Files(tmp_path / "store")
    no_actors: Any = None
    epoch = Epochs(files).acquire("run")
    ctx = RunContext(
        run, tmp_path / "home", "/models/m", files, no_actors, Progress("run", 3), epoch
    )
    ctx.branches.create("run", run.model_dump(mode="json"), "init")
    monkeypatch.setitem(contexts._OPEN, "run", ctx)
    made = Server(ctx)
    monkeypatch.setattr(deployed_iterations, "get_client", lambda: made)
    monkeypatch.setattr(deployed_iterations, "arun_deployment", made.run_deployment)
    monkeypatch.setattr(deployed_iterations, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(deployed_iterations, "CRASH_REPORTS_S", 0.2)
    return made


@pytest.mark.parametrize("gpus", [None, "2,3"])
async def test_the_process_of_an_iteration_gets_home_and_gpus_of_the_run(
    server: Server, gpus: str | None, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.open(0)
    seen = {name: value for name, value in server.variables.items() if value != str(default_home())}
    assert seen == ({"env.CUDA_VISIBLE_DEVICES": gpus} if gpus else {})


async def test_one_more_iteration_is_open_and_open_ones_are_cancelled_at_the_end(server: Server):
    server.scripts = {0: [Running(), Running(), "commit"]}
    async with DeployedIterations(server.it.config) as iterations:
        nodes = await iterations.finish(0)
    assert list(nodes) == ["train"]
    assert server.log == ["open 0", "open 1", "Cancelling 1", "closed"]


async def test_a_failed_flow_run_is_rescheduled_and_its_commit_counts(server: Server):
    server.scripts = {
        0: [Failed(message="no"), Failed(message="no"), Running(), "commit"],
        1: [],
        2: [],
    }
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
    assert server.log == ["open 0", "open 1", "AwaitingRetry 0", "Cancelling 1", "closed"]


async def test_a_flow_run_without_retries_left_ends_the_run_with_advice(server: Server):
    server.scripts = {0: [Failed(message="no")]}
    server.set_flow_run_state = fails_again(server)  # type: ignore[method-assign]
    with pytest.raises(IterationFailed, match="after at most 2 retries") as caught:
        async with DeployedIterations(server.it.config) as iterations:
            await iterations.finish(0)
    assert server.log.count("AwaitingRetry 0") == 2
    assert "press Retry" in str(caught.value)
    assert "again\n      do: x\n  expected:" in str(caught.value), "its lines are indented"


async def test_a_flow_run_that_ended_with_wrong_input_is_not_rescheduled(server: Server):
    message = "Flow run encountered an exception: DataError: advantage: no group is left"
    server.scripts = {0: [Failed(message=message)]}
    with pytest.raises(IterationFailed, match="wrong input is not retried"):
        async with DeployedIterations(server.it.config) as iterations:
            await iterations.finish(0)
    assert "AwaitingRetry 0" not in server.log


def fails_again(server: Server) -> Any:
    put = server.set_flow_run_state

    async def putting(number: UUID, state: State, *, force: bool = False) -> None:
        await put(
            number,
            Failed(message="again\n  do: x", name=state.name)
            if not state.is_cancelling()
            else state,
            force=force,
        )

    return putting


async def test_a_flow_run_that_a_person_cancelled_is_not_rescheduled(server: Server):
    server.scripts = {0: [Cancelled()]}
    with pytest.raises(IterationFailed, match="Cancelled"):
        async with DeployedIterations(server.it.config) as iterations:
            await iterations.finish(0)
    assert "AwaitingRetry 0" not in server.log


async def test_a_flow_run_that_a_person_retried_is_left_alone(server: Server):
    server.scripts = {0: [Failed(), AwaitingRetry(), "commit"]}
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
    assert "AwaitingRetry 0" not in server.log


async def test_a_crash_is_rescheduled_only_after_the_workers_second_report(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deployed_iterations, "CRASH_REPORTS_S", 3600.0)
    long_ago = datetime.now(UTC) - timedelta(hours=2)
    fresh = Crashed(message="killed")
    server.scripts = {
        0: [
            fresh,
            fresh,
            AwaitingRetry(),
            Crashed(message="killed", timestamp=long_ago),
            Running(),
            "commit",
        ]
    }
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
    assert "AwaitingRetry 0" not in server.log
    server.scripts = {1: [Crashed(message="killed", timestamp=long_ago)] * 2 + ["commit"]}
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(1)
    assert "AwaitingRetry 1" in server.log


async def test_a_restarted_run_finds_its_flow_runs_and_reschedules_ended_ones(
    server: Server,
):
    key = f"{server.it.files.root}#run#init#{{}}"
    server.add(0, key.format(0), Failed())
    server.add(1, key.format(1), Running())
    server.scripts = {0: [Failed(), Failed(), "commit"]}
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
        server.scripts = {1: [Failed(), Failed(), Failed(), "commit"]}
        await iterations.finish(1)
    assert [line for line in server.log if line.startswith("open")] == ["open 2"]
    assert "AwaitingRetry 0" in server.log


async def test_a_flow_run_that_the_previous_driver_cancelled_is_rescheduled_once_ended(
    server: Server,
):
    server.add(0, f"{server.it.files.root}#run#init#0", Cancelling())
    server.scripts = {
        0: [Cancelling(), Cancelling(), Cancelled(), Cancelled(), Running(), "commit"]
    }
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
    assert server.log[:2] == ["open 1", "AwaitingRetry 0"]


async def test_a_cancelling_flow_run_without_a_worker_is_ended_and_rescheduled(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deployed_iterations, "CANCELLED_WITHIN_S", 0.03)
    server.add(0, f"{server.it.files.root}#run#init#0", Cancelling())
    server.scripts = {0: [*[Cancelling()] * 20, Cancelled(), Cancelled(), Running(), "commit"]}
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
    assert list(dict.fromkeys(server.log))[:3] == ["open 1", "Cancelled 0", "AwaitingRetry 0"]


async def test_a_completed_flow_run_without_a_commit_is_a_failure(server: Server):
    server.scripts = {0: [Completed(), Completed(), "commit"]}
    async with DeployedIterations(server.it.config) as iterations:
        await iterations.finish(0)
    assert "AwaitingRetry 0" in server.log


async def test_the_error_names_a_missing_deployment_with_advice(server: Server):
    server.deployed = False
    with pytest.raises(ConfigError, match=r"deployments\.apply"):
        async with DeployedIterations(server.it.config) as iterations:
            await iterations.finish(0)


async def test_a_flow_run_that_no_worker_starts_reaches_the_deadline(server: Server):
    orchestration = server.it.config.orchestration.model_copy(update={"timeout_s": 0.05})
    with pytest.raises(DeadlineExceeded, match="check that a worker runs"):
        async with DeployedIterations(
            server.it.config.model_copy(update={"orchestration": orchestration})
        ) as iterations:
            await iterations.finish(0)
