"""`Cluster`: what a flow process holds of a run's actors: the conductor, and the generator.

Both are found by name, so a second run of the same cluster, a retry, or an iteration in another
process finds engines and trainer warm. What is rebuilt is only what the new run's specs differ in.

Not here: which weights they hold (the stages), what the actors do (`conductor`, `generator`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpipe.actors.engines.fleet import Weights
from rlpipe.actors.ray import named
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray.calls import call, call_or_end, end
from rlpipe.actors.ray.local_ray import connect, have_gpus
from rlpipe.actors.specs import ClusterSpec, Driver
from rlpipe.config.run import RunConfig
from rlpipe.errors import ActorLost, RlpipeError
from rlpipe.lineage.states import Lineage
from rlpipe.types import DataState

CALL_TIMEOUT_S = 120.0
GRACE_S = 30.0
"""The conductor notices that time is up, and says of what; this much later its silence is an error
of its own."""


class _Asked:
    """An actor that is asked on behalf of one driver."""

    def __init__(self, driver: Driver, actor: ActorHandle, name: str = "conductor") -> None:
        self._driver = driver
        self._actor = actor
        self._name = name
        self._ray = ray_watch.current()

    async def _ask(self, method: str, deadline_s: float, *arguments: Any, **keywords: Any) -> Any:
        self._require_ray()
        ref = getattr(self._actor, method).remote(self._driver, *arguments, **keywords)
        return await call(ref, where=f"{self._name}.{method}", deadline_s=deadline_s + GRACE_S)

    def _require_ray(self) -> None:
        """Raises: ActorLost if the Ray of this actor has died: on the next one its handle means
        nothing."""
        if self._ray is not None and (error := self._ray.lost) is not None:
            raise error


class RemoteTrainer(_Asked):
    """The trainer ranks as a group; a call waits for the calls of others first."""

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        """Call a method of `TrainerRank` on all ranks; their answers in order of rank."""
        return await self._ask("collective", 2 * deadline_s, method, deadline_s, arguments)

    async def holds(self, state: str) -> bool:
        """Does it hold this state? One that does not answer holds nothing."""
        return await self._ask("holds", 4 * CALL_TIMEOUT_S, state)

    async def initialise(
        self, key: str, start_from: str | None, *, deadline_s: float
    ) -> dict[str, str]:
        """Load the first weights of a branch; what `TrainerGroup.initialise` answers."""
        return await self._ask("initialise", 2 * deadline_s, key, start_from, deadline_s)

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> dict[str, Any] | None:
        """Make it hold the end of a lineage. None if it did already, else what
        `TrainerRank.restore` answered."""
        return await self._ask("ensure", 3 * deadline_s, lineage, deadline_s)


class RemoteGenerator(_Asked):
    """The generator: see `Generator` for what its methods do, answer and raise."""

    async def plan(self, iteration: int, state: DataState, *, deadline_s: float) -> dict[str, Any]:
        return await self._ask("plan", deadline_s, iteration, state)

    async def rollout(self, plan: str, *, deadline_s: float) -> dict[str, Any]:
        return await self._ask("rollout", deadline_s, plan)

    async def evaluate(
        self, name: str, key: str, version: int, *, deadline_s: float
    ) -> dict[str, Any]:
        return await self._ask("evaluate", deadline_s, name, key, version)

    async def overlong(self) -> dict[str, list[dict[str, Any]]]:
        return await self._ask("overlong", CALL_TIMEOUT_S)

    async def abandon(self, iteration: int | None, *, deadline_s: float = CALL_TIMEOUT_S) -> None:
        await self._ask("abandon", deadline_s, iteration)

    async def progress(self, iteration: int) -> dict[str, Any]:
        self._require_ray()
        return await call(
            self._actor.progress.remote(iteration),
            where="generator.progress",
            deadline_s=CALL_TIMEOUT_S,
        )


class Cluster(_Asked):
    """A run's actors, for one driver of it. All methods raise Fenced once another driver has the
    actors; ActorLost and DeadlineExceeded; and what an actor raised."""

    def __init__(
        self, driver: Driver, conductor: ActorHandle, generator: ActorHandle, config: RunConfig
    ) -> None:
        super().__init__(driver, conductor)
        self.has_engines = config.needs_engines
        self.shares_gpus = config.resources.colocate
        self._config = config
        self._switch_s = config.train.timeout_s + 2 * config.resources.start_timeout_s
        self.trainer = RemoteTrainer(driver, conductor)
        self.generator = RemoteGenerator(driver, generator, "generator")

    async def publish(
        self, weights: Weights, *, everyone: bool, deadline_s: float
    ) -> dict[str, Any]:
        """Engines are given these weights from now on, all of them now if `everyone`. As
        `Fleet.publish`."""
        return await self._ask("publish", deadline_s, weights, everyone=everyone)

    async def sample(self) -> None:
        """Requests will come: where trainer and engines share GPUs, engines have them until the
        trainer is called next."""
        if self.shares_gpus and self.has_engines:
            await self._ask("sample", self._switch_s)

    async def switches(self) -> list[dict[str, Any]]:
        """The switches of shared GPUs since this was last asked (`Sharing.take_log`)."""
        return await self._ask("switches", CALL_TIMEOUT_S) if self.shares_gpus else []

    async def engines(self) -> list[dict[str, Any]]:
        """`{"number", "url", "alive", "stamp", "pid", "facts"}` of each engine as last seen."""
        return await self._ask("engines", CALL_TIMEOUT_S) if self.has_engines else []

    async def trouble(self) -> RlpipeError | None:
        """Why nothing can be sampled, if no engine can be brought back."""
        return await self._ask("trouble", CALL_TIMEOUT_S)

    async def stop_engines(self) -> None:
        """End all inference servers; others are started in their place."""
        await self._ask("stop_engines", CALL_TIMEOUT_S)

    async def close(self) -> None:
        """End every actor, and with it its server, and give their places back. Of a Ray that has
        died nothing is left."""
        if self._ray is not None and self._ray.lost is not None:
            return
        try:
            await self._ask("close", CALL_TIMEOUT_S)
        except ActorLost:
            if await asyncio.to_thread(_has_conductor, self._config):
                raise
            await asyncio.to_thread(_end_unconducted, self._config)
        end([self._actor])


async def open_cluster(
    config: RunConfig, *, epoch: int, home: Path, model_dir: str, store_root: str
) -> Cluster:
    """Find or start the actors of a run and set them up for it, for the driver of this epoch.

    Raises: as `Conductor.open`.
    """
    space = named.namespace(config.cluster)
    connect(config.resources, home, namespace=space)
    await have_gpus(config.resources, who=f"run {config.run}", engines=config.needs_engines)
    (home / config.cluster / "logs").mkdir(parents=True, exist_ok=True)
    driver = Driver(config.run, epoch)
    spec = ClusterSpec(config, str(home), model_dir, store_root)
    try:
        conductor = await _opened(driver, spec)
    except ActorLost:  # it ended just now, as nobody had driven the run for long
        conductor = await _opened(driver, spec)
    generator = ray.get_actor("generator", namespace=space)
    return Cluster(driver, conductor, generator, config)


async def _opened(driver: Driver, spec: ClusterSpec) -> ActorHandle:
    conductor = named.conductor(spec.config.cluster, str(Path.cwd()))
    deadline_s = 3 * spec.config.resources.start_timeout_s
    await call_or_end(
        conductor,
        conductor.open.remote(driver, spec),
        where="conductor.open",
        deadline_s=deadline_s,
    )
    return conductor


def _has_conductor(config: RunConfig) -> bool:
    try:
        return bool(ray.get_actor(named.CONDUCTOR, namespace=named.namespace(config.cluster)))
    except ValueError:
        return False


def _end_unconducted(config: RunConfig) -> None:
    """End the actors of a cluster whose conductor is gone, and give their places back."""
    actors = named.NamedActors(config.cluster, config.resources, str(Path.cwd()))
    end(actors.everyone())
    actors.placement.remove()
