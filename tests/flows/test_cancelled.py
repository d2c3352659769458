"""Cancel a flow run whose subflow trains: the training notices the Cancel.

Flows and Prefect server are real. Endless work replaces the iterations.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Cancelling
from prefect.testing.utilities import prefect_test_harness

from flows import train as training
from flows.fork import fork
from flows.output import FLOW_RUN_ID_VARIABLE
from flows.stopping import Preempted, Stopping
from rlpipe.config.run import RunConfig
from rlpipe.store.objects.files import Files
from tests.reprocessed import History, configuration

pytestmark = pytest.mark.integration
GRACE_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A Prefect server for these tests."""
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of three iterations. Its fork has a grace period too long for a Cancel."""
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    monkeypatch.setattr(training, "check", lambda config, home: None)
    config = configuration(tmp_path, num_rollout=5, resources={"stop_grace_s": GRACE_S})
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
    server: None, parent: str, monkeypatch: pytest.MonkeyPatch
):
    endless = Endless(monkeypatch, cancelled=True)
    monkeypatch.setattr(training, "drive", endless)
    call: Any = fork
    state = await call(parent, run="again", return_state=True)
    assert endless.ended == {"again": "an iteration was abandoned after 0 s"}
    assert state.type is StateType.CANCELLED


async def test_a_terminated_fork_has_its_grace_period(
    server: None, parent: str, monkeypatch: pytest.MonkeyPatch
):
    endless = Endless(monkeypatch, cancelled=False)
    monkeypatch.setattr(training, "drive", endless)
    assert await fork(parent, run="again") == {"run": "again"}
    assert not endless.ended
