"""`Cluster`: a flow process's handles to a run's actors, the conductor and the generator.

`open_cluster` finds or starts both by name. So a second run of the same cluster, a retry, or an
iteration in another process finds engines and trainer warm; only actors with other specs are set
up again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpipe.actors.drivers import Driver, is_driven
from rlpipe.actors.engines.elastic import requested_engines
from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.engines.fleet import Weights
from rlpipe.actors.gpu_memory import fitted
from rlpipe.actors.ray import named
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray.calls import call, call_or_kill, kill_actors
from rlpipe.actors.ray.cluster_gpus import cluster_gpus
from rlpipe.actors.ray.layout import placed
from rlpipe.actors.ray.local_ray import begun_start, claim_gpus, connect
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.run import RunConfig
from rlpipe.data.hub_commits import as_recorded
from rlpipe.errors import ActorLost, RlpipeError
from rlpipe.lineage.states import Lineage
from rlpipe.model_dir import model_directory_if_present
from rlpipe.observe.terminal import ReportedWaits, waiting_for
from rlpipe.store.epochs import Epoch
from rlpipe.types import DataState

CALL_TIMEOUT_S = 120.0
# The conductor applies the deadlines and reports which call was late. Only if the conductor itself
# does not answer within this time more, the client raises.
GRACE_S = 30.0
SHOW_INTERVAL_S = 0.5
"""Seconds between two questions what the conductor waits for."""


class _DriverHandle:
    """An actor's handle for one driver."""

    def __init__(self, driver: Driver, actor: ActorHandle, name: str = "conductor") -> None:
        self._driver = driver
        self._actor = actor
        self._name = name
        # A handle belongs to the Ray in which it was found, not to the one that replaces it.
        self._ray = ray_watch.current()

    async def _call(self, method: str, deadline_s: float, *arguments: Any, **keywords: Any) -> Any:
        self._require_ray()
        ref = getattr(self._actor, method).remote(self._driver, *arguments, **keywords)
        return await call(ref, where=f"{self._name}.{method}", deadline_s=deadline_s + GRACE_S)

    def _require_ray(self) -> None:
        """Raises: ActorLost if the Ray of this handle has died. Another Ray has other actors."""
        if self._ray is not None and (error := self._ray.lost) is not None:
            raise error


class RemoteTrainer(_DriverHandle):
    """The trainer ranks as a group. Calls of all drivers run one after the other."""

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call a method of `TrainerRank` on all ranks; return their answers in order of rank."""
        # Twice: a call may wait for the call of another driver, and has the deadline for itself.
        return await self._call("collective", 2 * deadline_s, method, deadline_s, arguments)

    async def held(self) -> str | None:
        """Return the state that all ranks hold, as `TrainerGroup.held`."""
        return await self._call("held", 4 * CALL_TIMEOUT_S)

    async def initialise(
        self, key: str, start_from: str | None, adapter: str | None = None, *, deadline_s: float
    ) -> dict[str, str]:
        """Load the first weights of a branch, as `TrainerGroup.initialise`."""
        return await self._call("initialise", 2 * deadline_s, key, start_from, adapter, deadline_s)

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> dict[str, Any] | None:
        """Make the ranks hold the end of a lineage, as `TrainerGroup.ensure`."""
        # Three times: wait for another call, restart the ranks, restore.
        return await self._call("ensure", 3 * deadline_s, lineage, deadline_s)


class RemoteGenerator(_DriverHandle):
    """The generator. Methods do, return and raise as those of `Generator`."""

    async def plan(self, iteration: int, state: DataState, *, deadline_s: float) -> dict[str, Any]:
        return await self._call("plan", deadline_s, iteration, state)

    async def rollout(self, plan: str, *, deadline_s: float) -> dict[str, Any]:
        return await self._call("rollout", deadline_s, plan)

    async def evaluate(
        self, name: str, key: str, version: int, *, deadline_s: float
    ) -> dict[str, Any]:
        return await self._call("evaluate", deadline_s, name, key, version)

    async def overlong(self) -> dict[str, list[dict[str, Any]]]:
        return await self._call("overlong", CALL_TIMEOUT_S)

    async def abandon(self, iteration: int | None, *, deadline_s: float = CALL_TIMEOUT_S) -> None:
        await self._call("abandon", deadline_s, iteration)

    async def progress(self, iteration: int) -> dict[str, Any]:
        # without the driver: anyone may read the progress
        self._require_ray()
        return await call(
            self._actor.progress.remote(iteration),
            where="generator.progress",
            deadline_s=CALL_TIMEOUT_S,
        )


class Cluster(_DriverHandle):
    """A run's actors, for one driver of the run.

    All methods raise Fenced once another driver has the actors; ActorLost; DeadlineExceeded; and
    the errors of the actors.
    """

    def __init__(
        self,
        driver: Driver,
        conductor: ActorHandle,
        generator: ActorHandle,
        config: RunConfig,
        *,
        memory: str | None = None,
    ) -> None:
        """`memory`: the decisions about GPUs and their memory (`Placed.line`, `Fitted.line`)."""
        super().__init__(driver, conductor)
        self.has_engines = config.needs_engines
        self.shares_gpus = config.resources.shares_gpus
        self.config = config
        """The run's configuration with the decisions about GPUs and their memory."""
        self.memory = memory
        # A switch waits for the call that uses the trainer, then releases and allocates memory.
        self._switch_s = config.train.timeout_s + 2 * config.resources.start_timeout_s
        self.trainer = RemoteTrainer(driver, conductor)
        self.generator = RemoteGenerator(driver, generator, "generator")

    async def publish(
        self, weights: Weights, *, everyone: bool, deadline_s: float
    ) -> dict[str, Any]:
        """Publish weights to the engines, as `Fleet.publish`."""
        return await self._call("publish", deadline_s, weights, everyone=everyone)

    async def sample(self) -> None:
        """Give shared GPUs to the engines until the next call of the trainer."""
        if self.shares_gpus and self.has_engines:
            await self._call("sample", self._switch_s)

    async def switches(self) -> list[dict[str, Any]]:
        """Return the phase switches of shared GPUs since the last call (`GpuSharing.take_log`)."""
        return await self._call("switches", CALL_TIMEOUT_S) if self.shares_gpus else []

    async def engines(self) -> list[dict[str, Any]]:
        """Return the status of each engine as last seen, as `Fleet.status`."""
        return await self._call("engines", CALL_TIMEOUT_S) if self.has_engines else []

    async def trouble(self) -> RlpipeError | None:
        """Return an error if no engine can be started, else None."""
        return await self._call("trouble", CALL_TIMEOUT_S)

    async def stop_engines(self) -> None:
        """End all inference servers; others are started in their place."""
        await self._call("stop_engines", CALL_TIMEOUT_S)

    async def close(self) -> None:
        """End every actor with its server, and remove the placement groups."""
        if self._ray is not None and self._ray.lost is not None:
            return  # the watch has killed all processes of a dead Ray
        try:
            await self._call("close", CALL_TIMEOUT_S)
        except ActorLost:
            # A lost rank raises the same error. Without a conductor, nothing else ends the actors.
            if await asyncio.to_thread(_has_conductor, self.config):
                raise
            await asyncio.to_thread(_end_without_conductor, self.config)
        # not in `Conductor.close`: a conductor that ends itself could not answer the call
        kill_actors([self._actor])


def begin_cluster(config: RunConfig, home: Path) -> None:
    """Start actors and engines of a run on CPUs, with a Ray that this process has just started.

    `open_cluster` finds them. So they import their packages, the largest part of a start, while
    this process imports the flow. Engines start if the model directory exists, except for a run
    whose warm start comes first. Another configuration in `open_cluster` restarts them. Nothing
    starts for a fork, or while another process drives the run.
    Raises: as `named.begin_actors`, `is_driven`, `as_recorded` and `model_directory_if_present`.
    """
    # A fork may rebuild its weights first, with a trainer that needs the CPUs of these actors. A
    # second process is refused, and its engines would write to the logs of the first one's.
    store_root = config.store.root or str(home / "store")
    if config.fork_from is not None or is_driven(store_root, config.run):
        return
    config = placed(config, []).config
    cwd = str(Path.cwd())
    number = min(requested_engines(config, store_root), config.resources.num_engines)
    engines = named.begin_actors(config.cluster, config.resources, cwd, engines=number)
    is_simple = not (config.warm_start or config.resources.external_engines)
    if not engines or not is_simple or config.resources.engine_nodes > 1:
        return
    config = placed(as_recorded(config, home), []).config
    model_dir = model_directory_if_present(config.model, home, seed=config.seed)
    if model_dir is None:
        return
    spec = EngineSpec.of(ClusterSpec(config, str(home), model_dir, ""), config.cluster, None)
    for engine in engines:
        engine.start.remote(spec)


async def open_cluster(
    config: RunConfig, *, epoch: Epoch, home: Path, model_dir: str, store_root: str
) -> Cluster:
    """Find or start the actors of a run, and set them up for the driver of this epoch.

    Raises: as `cluster_gpus` and `Conductor.open`.
    """
    namespace = named.namespace(config.cluster)
    # Idempotent: an iteration in a process that already is a driver keeps its connection.
    with waiting_for("Ray"):
        await begun_start()
        connect(config.resources, home, namespace=namespace)
    gpus = await cluster_gpus(epoch.identity, config.resources.start_timeout_s)
    config, placement = placed(config, gpus.of_nodes)
    await claim_gpus(config.resources, owner=f"run {config.run}", engines=config.needs_engines)
    (home / config.cluster / "logs").mkdir(parents=True, exist_ok=True)
    driver = Driver(config.run, epoch.number)
    config, memory = await asyncio.to_thread(fitted, config, model_dir, gpus.smallest_bytes)
    decisions = "; ".join(filter(None, (placement, memory))) or None
    spec = ClusterSpec(config, str(home), model_dir, store_root)
    try:
        conductor = await _open_conductor(driver, spec)
    except ActorLost:  # its idle watch ended it at this moment
        conductor = await _open_conductor(driver, spec)
    generator = ray.get_actor("generator", namespace=namespace)
    return Cluster(driver, conductor, generator, config, memory=decisions)


async def _open_conductor(driver: Driver, spec: ClusterSpec) -> ActorHandle:
    resources = spec.config.resources
    conductor = named.conductor(spec.config.cluster, str(Path.cwd()), resources)
    with ReportedWaits() as waits:
        waits.show(["actors of the run"])
        showing = asyncio.create_task(_show_waits(conductor, waits))
        try:
            await call_or_kill(
                conductor,
                conductor.open.remote(driver, spec),
                where="conductor.open",
                # generator, trainer and engines each have the timeout for themselves
                deadline_s=3 * spec.config.resources.start_timeout_s,
            )
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
    return conductor


async def _show_waits(conductor: ActorHandle, waits: ReportedWaits) -> None:
    """Show on the terminal what the conductor waits for, until this task is cancelled."""
    while True:
        starting = conductor.starting.remote()
        waits.show(await call(starting, where="conductor.starting", deadline_s=CALL_TIMEOUT_S))
        await asyncio.sleep(SHOW_INTERVAL_S)


def _has_conductor(config: RunConfig) -> bool:
    try:
        return bool(ray.get_actor(named.CONDUCTOR, namespace=named.namespace(config.cluster)))
    except ValueError:
        return False


def _end_without_conductor(config: RunConfig) -> None:
    """End the actors of a cluster without a conductor, and remove its placement groups."""
    actors = named.NamedActors(config.cluster, config.resources, str(Path.cwd()))
    kill_actors(actors.all_actors())
    actors.placement.remove()
