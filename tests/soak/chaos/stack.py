"""The run that is soaked: the train flow as a process of its own, and a supervisor that starts it
again when it dies.

Not here: whom to kill when (`soak`), or how the flow is started (`drivers`).
"""

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
"""A flow that ends so soon after its start is started again after longer and longer."""
LOOK_INTERVAL_S = 0.4


@dataclass(frozen=True)
class Layout:
    """One run: its name, S, how many processes, and whether a Prefect worker runs it."""

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
    """The flow process of one layout and everything below it."""

    def __init__(self, home: Path, layout: Layout, servers: Servers, family: Family) -> None:
        self.home = home
        self.layout = layout
        self._servers = servers
        self._family = family
        self.root = f"s3://{servers.s3.bucket}/runs"
        self.folder = home / layout.run
        self.log = home / f"{layout.run}.log"
        self.exits: list[tuple[float, str]] = []
        """When the flow ended, and how."""
        self.orphans: list[str] = []
        """What a dead flow process left running for longer than the one that followed took to come
        up."""
        self._left: list[psutil.Process] = []
        self.failures, self._looked_s = 0, 0.0
        """How often in a row the flow ended soon after its start."""
        self._driver = self._made()
        self._begin()

    def tick(self) -> None:
        """Bring back what is due; call it often."""
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
        """Processes that go by this name now. An iteration's own process is known only by its
        trace."""
        if name in ("s3", "prefect"):
            return self._servers.victim(name)
        if name == "flow":
            process = self._driver.process()
            return [] if process is None else [process]
        if name == "worker":
            return self._driver.workers()
        return self._family.named(TITLES[name]) if TITLES[name] else []

    def processes(self) -> list[psutil.Process]:
        """All of them, without the servers."""
        return [process for process in self._family.look() if not self._is_kept(process)]

    @property
    def prefect_url(self) -> str:
        return self._servers.prefect.url

    def count_orphans(self) -> None:
        """Note what of a flow process that died still runs. Call it once the next one has
        committed."""
        self.orphans += [title(process)[:100] for process in self._left if runs(process)]
        self._left = []

    def kill_flow(self) -> None:
        """What a person does to a run that is stuck: kill -9 everything of it, its worker too;
        `tick` starts it again."""
        self._family.end(spared=self._servers.pids)

    def stop(self) -> None:
        """Ctrl-C (or Cancel), then kill -9 what is left."""
        self._driver.interrupt()
        self._family.end(spared=self._servers.pids)

    def _begin(self) -> None:
        self._driver.begin()
        self._began = time.time()

    def _made(self) -> Driver:
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
        named = ["--recipe", RECIPE, "--home", str(self.home), "--run", self.layout.run]
        return InProcess([*named, *overrides], environment, self.log)

    def _is_kept(self, process: psutil.Process) -> bool:
        """Is it one of the servers, or what they started, or the worker? They outlive a flow."""
        try:
            family = {known.pid for known in (process, *process.parents())}
        except psutil.Error:
            return True
        return not family.isdisjoint(self._servers.pids) or process.pid in {
            worker.pid for worker in self._driver.workers()
        }
