"""Start the train flow, and start it again: `InProcess` as a child, `ThroughWorker` in Prefect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psutil

from tests.soak.chaos.prefect_api import FINAL, PrefectApi
from tests.soak.chaos.processes import Family

RECIPE = "tests/soak/chaos/recipe.yaml"
INTERRUPT_TIMEOUT_S = 60.0
POOL = "chaos"
POLL_INTERVAL_S = 1.0
REPORTED_AFTER_S = 20.0
"""A worker reports a crash twice, up to 11 s apart. A flow run without process and worker is never
reported."""
RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


class Driver(Protocol):
    """Runs the train flow. `begin` starts it or starts it again."""

    restart_after_s: tuple[float, ...]

    def begin(self) -> None: ...

    def tick(self) -> None:
        """Restart everything but the flow itself."""

    def ended(self) -> str | None:
        """Return how the flow ended; None while it runs."""
        ...

    def process(self) -> psutil.Process | None:
        """Return the process of the train flow."""
        ...

    def workers(self) -> list[psutil.Process]: ...
    def interrupt(self) -> None:
        """Ask the flow to end, and wait for a while."""


class InProcess:
    """`python -m tools.train` as a child process that a supervisor starts again."""

    restart_after_s = (1.0, 2.0, 5.0, 10.0)

    def __init__(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._arguments = arguments
        self._environment = environment
        self._log = log

    def begin(self) -> None:
        """Start the flow."""
        with self._log.open("ab") as log:
            self._flow = subprocess.Popen(
                [sys.executable, "-m", "tools.train", *self._arguments],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def tick(self) -> None:
        """Do nothing: the flow is the only process."""

    def ended(self) -> str | None:
        code = self._flow.poll()
        return None if code is None else f"exit code {code}"

    def process(self) -> psutil.Process | None:
        return psutil.Process(self._flow.pid) if self._flow.poll() is None else None

    def workers(self) -> list[psutil.Process]:
        return []

    def interrupt(self) -> None:
        """Send Ctrl-C."""
        if self._flow.poll() is None:
            os.killpg(self._flow.pid, signal.SIGINT)
            try:
                self._flow.wait(INTERRUPT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._flow.kill()
        self._flow.wait()


class ThroughWorker:
    """A flow run of the deployment `train/train` in a worker.

    A supervisor restarts the worker; a person presses Retry.
    """

    restart_after_s = (REPORTED_AFTER_S,)

    def __init__(
        self,
        parameters: dict[str, object],
        environment: Mapping[str, str],
        log: Path,
        home: Path,
        family: Family,
        url: str,
    ) -> None:
        self._parameters = parameters
        self._environment = {**os.environ, **environment}
        self._log = log
        self._family = family
        self._api = PrefectApi(url)
        self._run: str | None = None
        self._polled_s = 0.0
        self._state = "PENDING"
        self._gone_s = 0.0
        apply = [sys.executable, "-m", "deployments.apply", "--pool", POOL, "--home", str(home)]
        subprocess.run(apply, env=self._environment, check=True, stdout=subprocess.DEVNULL)
        self._worker = self._start_worker()

    def begin(self) -> None:
        """Start a flow run, or retry the existing one.

        If the server does not answer, the next `tick` tries again.
        """
        try:
            if self._run is None:
                self._run = self._api.run_deployment("train/train", self._parameters)
            else:
                self._api.retry(self._run)
            self._state = "SCHEDULED"
            self._gone_s = 0.0
        except OSError:
            self._state = "CRASHED"

    def tick(self) -> None:
        """Start the worker again if it died."""
        if self._worker.poll() is not None:
            self._worker = self._start_worker()

    def ended(self) -> str | None:
        """Return how the flow run ended, also if its process is gone without a report."""
        if self._run is None or time.monotonic() - self._polled_s < POLL_INTERVAL_S:
            return self._state if self._state in FINAL else None
        self._polled_s = time.monotonic()
        try:
            self._state, name = self._api.state(self._run)
        except OSError:
            return None
        if self._state != "RUNNING" or self.process() is not None:
            self._gone_s = 0.0
            return name if self._state in FINAL else None
        self._gone_s = self._gone_s or time.monotonic()
        return (
            f"{name} without a process"
            if time.monotonic() - self._gone_s > REPORTED_AFTER_S
            else None
        )

    def process(self) -> psutil.Process | None:
        """Return the process whose environment names the flow run."""
        for process in self._family.named(("flow-run", "prefect.engine", "prefect.flow_engine")):
            try:
                if process.environ().get(RUN_VARIABLE) == self._run:
                    return process
            except psutil.Error:
                continue
        return None

    def workers(self) -> list[psutil.Process]:
        return [psutil.Process(self._worker.pid)] if self._worker.poll() is None else []

    def interrupt(self) -> None:
        """Cancel the flow run, then end the worker."""
        until = time.monotonic() + INTERRUPT_TIMEOUT_S
        if self._run is not None and self.ended() is None:
            self._api.cancel(self._run)
        while self._run is not None and self.ended() is None and time.monotonic() < until:
            time.sleep(POLL_INTERVAL_S)
        self._worker.kill()
        self._worker.wait()

    def _start_worker(self) -> subprocess.Popen[bytes]:
        command = [
            str(Path(sys.executable).parent / "prefect"),
            "worker",
            "start",
            "--pool",
            POOL,
            "--type",
            "process",
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
