"""Deployments on a real Prefect server and worker: a failed iteration is retried as Retry in the pages does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rlpipe.store.audit import check_branch
from rlpipe.store.files import Files
from tests.flows.test_train import SAMPLING
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


class Prefect:
    """A server and a worker with the deployments of this checkout, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port(0)
        self.environment = {
            **os.environ,
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
        """A process of this environment for as long as the block takes, and whatever it starts."""
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
        subprocess.run([sys.executable, "-m", module, *arguments], cwd=REPOSITORY, env=self.environment, check=True, timeout=120)

    def start(self, run: str, recipe: Path, *overrides: str) -> None:
        deployment = self._client.get("/deployments/name/train/train").json()["id"]
        parameters = {"recipe": str(recipe), "run": run, "overrides": list(overrides)}
        self._client.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": parameters}).raise_for_status()

    def state(self, name: str) -> str:
        """The state of the flow run of this name; empty if there is none."""
        found = self._client.post("/flow_runs/filter", json={"flow_runs": {"name": {"any_": [name]}}}).json()
        return found[0]["state"]["name"] if found else ""

    def retry(self, name: str) -> None:
        """What the button in the pages sends."""
        found = self._client.post("/flow_runs/filter", json={"flow_runs": {"name": {"any_": [name]}}}).json()
        state = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}, "force": True}
        self._client.post(f"/flow_runs/{found[0]['id']}/set_state", json=state).raise_for_status()

    def tasks(self, name: str) -> dict[str, str]:
        """Task run → state of its last attempt, of the flow run of this name."""
        query = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return {task["name"]: task["state"]["name"] for task in self._client.post("/task_runs/filter", json=query).json()}

    def wait(self, reached: Callable[[], bool], timeout_s: float = 300.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < end_s, (self.folder / "prefect.log").read_text()[-6000:]
            time.sleep(0.5)


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Prefect]:
    """A server with our deployments, and a worker of theirs."""
    made = Prefect(tmp_path)
    with made.running("server", "start", "--host", "127.0.0.1", "--port", str(made.port)):
        made.wait(made.healthy, 120)
        for _ in range(2):
            made.run("deployments.apply", "--home", str(tmp_path / "home"))
        with made.running("worker", "start", "--pool", "rlpipe", "--type", "process"):
            yield made


@pytest.mark.integration
def test_an_iteration_that_failed_is_retried_from_the_run_and_its_rollout_is_reused(prefect: Prefect, tmp_path: Path):
    (tmp_path / "reward.py").write_text(FAILS_ONCE.format(folder=tmp_path))
    (tmp_path / "small.yaml").write_text(SAMPLING % (tmp_path / "reward.py"))
    prefect.start("run", tmp_path / "small.yaml", "num_rollout=2", "orchestration={iterations: deployment, retries: 0}")
    prefect.wait(lambda: prefect.state("run") == "Failed")
    assert (prefect.state("run-0"), prefect.state("run-1")) == ("Completed", "Failed")
    prefect.retry("run")
    prefect.wait(lambda: prefect.state("run") == "Completed")
    assert prefect.state("run-1") == "Completed"
    prefect.wait(lambda: prefect.tasks("run-1").get("rollout-1") == "Reused", 30)
    assert check_branch(Files(tmp_path / "home" / "store"), "run") == []
