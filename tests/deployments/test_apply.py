"""Deployments on a real Prefect server and worker: a scheduled run, a failed iteration, its
retry.

With PostgreSQL on the machine, the server uses it, else SQLite.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.apply import add_recipe_choice
from flows.train import train
from rlpipe.config.load import recipes
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.objects.files import Files
from tests.flows.test_train import SAMPLING
from tests.postgres import binaries, postgresql
from tools.local_prefect import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
FAILS_ONCE = """
from pathlib import Path

SCORED, RAISED = Path("{folder}/scored"), Path("{folder}/raised")
if SCORED.exists() and not RAISED.exists():
    RAISED.touch()
    raise RuntimeError("raised once, on purpose")


def score(sample):
    SCORED.touch()
    return sum(c in "aeiou" for c in sample.response) / 6
"""
SITE = """
overrides: ["orchestration={{iterations: deployment, retries: 0}}"]
deployments:
  - flow: train
    name: once
    parameters: {{recipe: {recipe}, run: run-on, overrides: [num_rollout=2]}}
    schedules: [{{rrule: "DTSTART:{at:%Y%m%dT%H%M%SZ}\\nRRULE:FREQ=DAILY;COUNT=1"}}]
"""


class Prefect:
    """A server and a worker with the deployments of this checkout, in child processes."""

    def __init__(self, folder: Path, database: dict[str, str]) -> None:
        self.folder, self.port = folder, free_port(0)
        self.environment = {
            **os.environ,
            **database,
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "5",
            "OMP_NUM_THREADS": "1",
        }
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/api", timeout=60)

    @contextmanager
    def running(self, *arguments: str, module: str = "prefect") -> Iterator[None]:
        """Run a process with this environment during the block; end its children too."""
        with (self.folder / "prefect.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPOSITORY,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def healthy(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def run(self, module: str, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            check=True,
            timeout=120,
        )

    def made_by(self, deployment: str) -> list[dict[str, Any]]:
        """Return the flow runs of a deployment, scheduled ones included."""
        number = self._client.get(f"/deployments/name/{deployment}").json()["id"]
        return self._client.post(
            "/flow_runs/filter", json={"deployments": {"id": {"any_": [number]}}}
        ).json()

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the flow runs of this name."""
        return self._client.post(
            "/flow_runs/filter", json={"flow_runs": {"name": {"any_": [name]}}}
        ).json()

    def state(self, name: str) -> str:
        """Return the state of the flow run of this name; empty if it does not exist."""
        found = self.named(name)
        return found[0]["state"]["name"] if found else ""

    def artifact(self, key: str) -> str:
        """Return the text of the newest artifact of this key."""
        return self._client.get(f"/artifacts/{key}/latest").json()["data"]

    def automations(self) -> list[str]:
        return [one["name"] for one in self._client.post("/automations/filter", json={}).json()]

    def retry(self, name: str) -> None:
        """Send the request of the Retry button."""
        found = self.named(name)
        state = {
            "state": {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"},
            "force": True,
        }
        self._client.post(f"/flow_runs/{found[0]['id']}/set_state", json=state).raise_for_status()

    def tasks(self, name: str) -> dict[str, str]:
        """Return task run → state of its last attempt, of the flow run of this name."""
        query = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return {
            task["name"]: task["state"]["name"]
            for task in self._client.post("/task_runs/filter", json=query).json()
        }

    def wait(self, reached: Callable[[], bool], timeout_s: float = 300.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < end_s, (self.folder / "prefect.log").read_text()[-6000:]
            time.sleep(0.5)


@pytest.fixture(params=["postgresql"] if binaries() else ["sqlite"])
def database(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Settings of the Prefect server's database."""
    folder = binaries()
    if request.param == "sqlite" or folder is None:
        yield {}
        return
    with postgresql(folder) as url:
        yield {"PREFECT_API_DATABASE_CONNECTION_URL": url}


@pytest.fixture
def prefect(tmp_path: Path, database: dict[str, str]) -> Iterator[Prefect]:
    """A server with our deployments and those of a site, and a worker."""
    (tmp_path / "reward.py").write_text(FAILS_ONCE.format(folder=tmp_path))
    (tmp_path / "small.yaml").write_text(SAMPLING % (tmp_path / "reward.py"))
    made = Prefect(tmp_path, database)
    with made.running("server", "start", "--host", "127.0.0.1", "--port", str(made.port)):
        made.wait(made.healthy, 120)
        made.run("deployments.apply", "--home", str(tmp_path / "home"))
        schedule_once(made, tmp_path)
        with made.running("worker", "start", "--pool", "rlpipe", "--type", "process"):
            yield made


def schedule_once(prefect: Prefect, folder: Path) -> None:
    """Schedule a run some seconds ahead; later if the machine was too slow to declare it in
    time.
    """
    for ahead_s in (20, 90, 300):
        at = datetime.now(UTC) + timedelta(seconds=ahead_s)
        (folder / "site.yaml").write_text(SITE.format(recipe=folder / "small.yaml", at=at))
        prefect.run(
            "deployments.apply", "--home", str(folder / "home"), "--site", str(folder / "site.yaml")
        )
        while not prefect.made_by("train/once") and datetime.now(UTC) < at:
            time.sleep(0.5)
        if prefect.made_by("train/once"):
            return
    raise AssertionError((folder / "prefect.log").read_text()[-6000:])


@pytest.mark.long
@pytest.mark.integration
def test_a_retried_iteration_of_a_scheduled_run_reuses_its_rollout(
    prefect: Prefect, tmp_path: Path
):
    prefect.wait(lambda: prefect.state("run-on") == "Failed")
    assert (prefect.state("run-on-0"), prefect.state("run-on-1")) == ("Completed", "Failed")
    prefect.retry("run-on")
    prefect.wait(lambda: prefect.state("run-on") == "Completed")
    assert prefect.state("run-on-1") == "Completed"
    prefect.wait(lambda: prefect.tasks("run-on-1").get("rollout-1") == "Reused", 30)
    assert check_branch(Files(tmp_path / "home" / "store"), "run-on") == []
    assert [(run["name"], run["auto_scheduled"]) for run in prefect.made_by("train/once")] == [
        ("run-on", True)
    ]
    assert "num_rollout: 2" in prefect.artifact("run-on-configuration")
    assert prefect.automations() == ["rlpipe/rlpipe: a silent run is crashed"]


async def test_a_recipe_file_is_a_choice_of_its_own_form_only():
    own, other = [await train.ato_deployment(name) for name in ("own", "other")]
    add_recipe_choice(own, "/mine.yaml")
    add_recipe_choice(other, "spell_backward")
    names = [
        one._parameter_openapi_schema.properties["recipe"]["anyOf"][0]["enum"]
        for one in (own, other)
    ]
    assert names == [[*recipes(), "/mine.yaml"], recipes()]
