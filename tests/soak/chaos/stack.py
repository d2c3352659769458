"""The run of a soak: the train flow as a separate process, and a supervisor that restarts it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.soak.chaos.drivers import RECIPE, Driver, InProcess, ThroughWorker
from tests.soak.chaos.pairs import TITLES
from tests.soak.chaos.processes import Family, runs, title
from tests.soak.chaos.servers import Servers

FAILED_AT_ONCE_S = 20.0
"""A flow that ends sooner after its start is restarted after growing delays."""
LOOK_INTERVAL_S = 0.4


@dataclass(frozen=True)
class Layout:
    """One run: name, S, numbers of processes, and whether a Prefect worker runs it."""

    run: str
    s: int = 0
    ranks: int = 1
    engines: int = 1
    worker: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Overrides of the recipe."""
        resources = [
            f"resources.actor_num_gpus_per_node={self.ranks}",
            f"resources.rollout_num_gpus={self.engines}",
        ]
        ahead = [f"async_buffer_size={self.s}"] if self.s else []
        return [
            *resources,
            *ahead,
            *(["orchestration.iterations=deployment"] if self.worker else []),
            *self.overrides,
        ]


class Stack:
    """The flow process of one layout and all processes below it."""

    def __init__(self, home: Path, layout: Layout, servers: Servers, family: Family) -> None:
        self.home = home
        self.layout = layout
        self._servers = servers
        self._family = family
        self.root = f"s3://{servers.s3.bucket}/runs"
        self.folder = home / layout.run
        self.log = home / f"{layout.run}.log"
        self.exits: list[tuple[float, str]] = []
        """Time and kind of each end of the flow."""
        self.orphans: list[str] = []
        """Processes of a dead flow that still ran when the next flow was up."""
        self._left: list[psutil.Process] = []
        self.failures = 0
        """Ends in a row soon after the start."""
        self._looked_s = 0.0
        self._driver = self._new_driver()
        self._begin()

    def tick(self) -> None:
        """Restart processes that are due. Call it often."""
        self._servers.tick()
        if time.monotonic() - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = time.monotonic()
        self._family.look()
        self._driver.tick()
        how = self._driver.ended()
        if how is None:
            return
        if not self.exits or self.exits[-1][0] < self._began:
            self.exits.append((time.time(), how))
            self._left = self.processes()
            self.failures = self.failures + 1 if time.time() - self._began < FAILED_AT_ONCE_S else 0
        after_s = self._driver.restart_after_s
        if time.time() - self.exits[-1][0] >= after_s[min(self.failures, len(after_s) - 1)]:
            self._begin()

    def victims(self, name: str) -> list[psutil.Process]:
        """Return the processes of a victim.

        The process of an iteration is known only from its trace.
        """
        if name in ("s3", "prefect"):
            return self._servers.victim(name)
        if name == "flow":
            process = self._driver.process()
            return [] if process is None else [process]
        if name == "worker":
            return self._driver.workers()
        return self._family.named(TITLES[name]) if TITLES[name] else []

    def processes(self) -> list[psutil.Process]:
        """Return all processes but the servers."""
        return [process for process in self._family.look() if not self._outlives_flow(process)]

    @property
    def prefect_url(self) -> str:
        return self._servers.prefect.url

    def count_orphans(self) -> None:
        """Record processes of a dead flow that still run, once the next flow has committed."""
        self.orphans += [title(process)[:100] for process in self._left if runs(process)]
        self._left = []

    def kill_flow(self) -> None:
        """Kill everything of a stuck run, its worker too; `tick` starts it again."""
        self._family.end(kept=self._servers.pids)

    def stop(self) -> None:
        """Send Ctrl-C (or Cancel), then kill all remaining processes."""
        self._driver.interrupt()
        self._family.end(kept=self._servers.pids)

    def _begin(self) -> None:
        self._driver.begin()
        self._began = time.time()

    def _new_driver(self) -> Driver:
        overrides = [f"store.root={self.root}", *self.layout.arguments]
        environment = self._servers.environment
        if self.layout.worker:
            parameters: dict[str, object] = {
                "recipe": RECIPE,
                "overrides": overrides,
                "run": self.layout.run,
            }
            return ThroughWorker(
                parameters, environment, self.log, self.home, self._family, self.prefect_url
            )
        arguments = ["--recipe", RECIPE, "--home", str(self.home), "--run", self.layout.run]
        return InProcess([*arguments, *overrides], environment, self.log)

    def _outlives_flow(self, process: psutil.Process) -> bool:
        """True for the servers, processes below them, and the worker."""
        try:
            family = {known.pid for known in (process, *process.parents())}
        except psutil.Error:
            return True
        return not family.isdisjoint(self._servers.pids) or process.pid in {
            worker.pid for worker in self._driver.workers()
        }
