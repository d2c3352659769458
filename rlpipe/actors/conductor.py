"""`Conductor`: the actor through which flow processes use a cluster's trainer and engines.

Several processes may drive a run at once: an iteration opened ahead, a process that outlived its
worker, an iteration that a person retried. Calls to trainer ranks are collective, so all ranks must
receive them in one order: the conductor runs them one after the other. It refuses calls of an older
epoch, and of a run that has left the cluster. The `Fleet` supervises the engines. On shared GPUs
each call first enters its phase (`GpuSharing`). Drivers call the generator themselves.

The conductor holds no state that matters: after a restart it finds ranks, engines and router by
name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlpipe.actors.drivers import Driver, IdleWatch, is_driven
from rlpipe.actors.engines.elastic import FleetSize, requested_engines
from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.engines.fleet import Fleet, Weights
from rlpipe.actors.engines.supervised import SupervisedEngine
from rlpipe.actors.ray.calls import call, call_or_kill, kill_actors
from rlpipe.actors.ray.layout import engine_names
from rlpipe.actors.ray.named import NamedActors
from rlpipe.actors.sharing import PHASE_OF, GpuSharing
from rlpipe.actors.specs import ClusterSpec, GeneratorSpec
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.actors.weight_sender import ClusterState, WeightSender
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import Fenced, RlpipeError
from rlpipe.lineage.states import Lineage

CALL_TIMEOUT_S = 60.0


class Conductor:
    """See the module.

    Every method except `open` raises Fenced for a driver other than the cluster's. All methods
    raise the errors of the actors.
    """

    def __init__(
        self,
        cluster: str,
        cwd: str,
        actors: Callable[[str, ResourcesConfig, str], NamedActors] = NamedActors,
    ) -> None:
        os.chdir(cwd)  # hooks and models are given relative to the driver's directory
        self._make_actors = actors
        self._cluster = cluster
        self._cwd = cwd
        self._driver: Driver | None = None
        self._actors: NamedActors | None = None
        self._state = ClusterState()
        self._sender = WeightSender(cluster, self._state)
        self._router_url: str | None = None
        self._size: FleetSize | None = None
        self._first_engines = 0
        """Engines that a new fleet starts with. Others join later."""
        self._set_up: TrainerSpec | None = None
        """Spec that all ranks were set up with."""
        self._open_lock = asyncio.Lock()
        self._starting: list[str] = []
        self._idle_watch = IdleWatch(lambda: self.close(None), self._open_lock)

    async def open(self, driver: Driver, spec: ClusterSpec) -> None:
        """Start all missing actors and make this driver the cluster's driver.

        A repeated call restarts actors that died. Raises: Fenced if a newer driver of the run was
        here, or another run is at work on the cluster; ResourceError, EngineUnavailable, DataError,
        ConfigError, DeadlineExceeded if an actor does not start.
        """
        async with self._open_lock:
            await self._take_over(driver, spec)
            known = self._state.spec
            fleet = self._state.fleet
            if fleet is not None and (known is None or known.branch != spec.branch):
                # otherwise a restarted engine would get the weights of the other run
                fleet.forget_weights()
            actors = await self._actors_of(spec.config.resources)
            self._update_sharing(spec)
            self._state.spec = spec
            self._idle_watch.watch(spec, driver.epoch)
            self._state.generator = await asyncio.to_thread(actors.generator)
            await self._find_ranks(actors, spec)
            if self._state.sharing.active and not _start_together(spec.config.resources):
                await self._open_on_shared_gpus(driver, spec)
                return
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._open_trainer(spec))
                    tasks.create_task(self._open_engines(driver, spec))
            except BaseExceptionGroup as group:
                # the caller expects the named error of an actor, not a group
                raise group.exceptions[0] from group

    async def starting(self) -> list[str]:
        """Return what `open` waits for now, in words for the terminal."""
        return list(self._starting)

    @contextmanager
    def _waiting_for(self, name: str) -> Iterator[None]:
        self._starting.append(name)
        try:
            yield
        finally:
            self._starting.remove(name)

    async def collective(
        self, driver: Driver, method: str, deadline_s: float, arguments: dict[str, Any]
    ) -> list[Any]:
        """Call all ranks, as `TrainerGroup.call`, once no other call runs."""
        async with self._trainer_for(driver, method, deadline_s) as trainer:
            # other methods use no GPU memory, and must not interrupt a phase
            if method in PHASE_OF:
                await self._state.enter(PHASE_OF[method])
            return await trainer.call(method, deadline_s=deadline_s, **arguments)

    async def held(self, driver: Driver) -> str | None:
        """Return the state that all ranks hold, as `TrainerGroup.held`."""
        async with self._trainer_for(driver, "held", CALL_TIMEOUT_S) as trainer:
            return await trainer.held()

    async def initialise(
        self,
        driver: Driver,
        key: str,
        start_from: str | None,
        adapter: str | None,
        deadline_s: float,
    ) -> dict[str, str]:
        """Load the first weights, as `TrainerGroup.initialise`."""
        async with self._trainer_for(driver, "initialise", deadline_s) as trainer:
            await self._state.enter("train")
            return await trainer.initialise(key, start_from, adapter, deadline_s=deadline_s)

    async def ensure(
        self, driver: Driver, lineage: Lineage, deadline_s: float
    ) -> dict[str, Any] | None:
        """Make the trainer hold the end of a lineage, as `TrainerGroup.ensure`."""
        async with self._trainer_for(driver, "ensure", deadline_s) as trainer:
            # Enter the phase only for a restore: a held state needs no memory.
            if self._state.sharing.active and await trainer.held() != lineage.target:
                await self._state.enter("train")
            return await trainer.ensure(lineage, deadline_s=deadline_s)

    async def publish(self, driver: Driver, weights: Weights, *, everyone: bool) -> dict[str, Any]:
        """Publish weights, as `Fleet.publish`.

        With shared GPUs all engines get them now: later phases have no memory for a push.
        """
        return await self._state.running_fleet.publish(
            weights,
            everyone=everyone or self._state.sharing.active,
            check=lambda: self._require_driver(driver),
        )

    async def sample(self, driver: Driver) -> None:
        """Give shared GPUs to the engines, because requests follow."""
        self._require_driver(driver)
        state = self._state
        if state.sharing.active and state.fleet is not None:
            async with self._trainer_for(driver, "sample", state.trainer_timeout_s):
                await state.enter("sample")

    async def switches(self, driver: Driver) -> list[dict[str, Any]]:
        """Return the phase switches since the last call, as `GpuSharing.take_log`."""
        self._require_driver(driver)
        return self._state.sharing.take_log()

    async def engines(self, driver: Driver) -> list[dict[str, Any]]:
        """Return the status of each engine, as `Fleet.status`."""
        self._require_driver(driver)
        return self._size.status() if self._size else self._state.running_fleet.status()

    async def trouble(self, driver: Driver) -> RlpipeError | None:
        """Return an error if no engine can be started, as `Fleet.trouble`."""
        self._require_driver(driver)
        return self._state.fleet.trouble() if self._state.fleet else None

    async def stop_engines(self, driver: Driver) -> None:
        """End all servers, as `Fleet.stop_engines`."""
        self._require_driver(driver)
        await self._state.running_fleet.stop_engines()

    async def close(self, driver: Driver | None) -> None:
        """End every other actor with its server, and remove the placement groups.

        `driver` None: the idle watch calls.
        """
        if driver is not None:
            self._require_driver(driver)
        await self._close_fleet()  # first: supervisors would restart the engines
        if self._actors is not None:
            await asyncio.to_thread(kill_actors, await asyncio.to_thread(self._actors.all_actors))
            await asyncio.to_thread(self._actors.placement.remove)
        # Forget handles of killed actors: the next `open` finds or starts others.
        self._driver = None
        self._set_up = None
        self._state.spec = None
        self._state.generator = None
        self._state.trainer.group = None
        self._state.sharing = GpuSharing()

    async def _take_over(self, driver: Driver, spec: ClusterSpec) -> None:
        """Make this the cluster's driver.

        Raises: Fenced if a newer driver of its run has the cluster, or another run is at work.
        """
        current = self._driver
        known = self._state.spec
        if current is not None and known is not None and known.branch != spec.branch:
            if await asyncio.to_thread(
                is_driven, known.store_root, current.run, epoch=current.epoch
            ):
                raise Fenced(
                    "another run uses the cluster's actors",
                    where=f"resources.cluster={self._cluster}",
                    found=f"run {current.run} in epoch {current.epoch}, at work",
                    do="wait until it ends, or use other actors here: resources.cluster=NAME",
                )
            current = None  # epochs of two runs are not comparable
        if current is None or current.epoch <= driver.epoch:
            self._driver = driver
        self._require_driver(driver)

    def _require_driver(self, driver: Driver) -> None:
        driver.require(self._driver, where=f"cluster {self._cluster}")
        self._idle_watch.called()

    @asynccontextmanager
    async def _trainer_for(
        self, driver: Driver, method: str, deadline_s: float
    ) -> AsyncIterator[TrainerGroup]:
        """Yield the trainer for exclusive use.

        Raises: Fenced; DeadlineExceeded with the call that runs.
        """
        self._require_driver(driver)
        async with self._state.trainer.exclusive(method, deadline_s) as trainer:
            self._require_driver(driver)  # a newer driver may have come during the wait
            yield trainer

    async def _actors_of(self, resources: ResourcesConfig) -> NamedActors:
        """Return the named actors of this layout. A change of engines closes the fleet."""
        known = self._state.spec
        if self._actors is None or known is None or known.config.resources != resources:
            if known is not None and engine_names(known.config.resources) != engine_names(
                resources
            ):
                await self._close_fleet()
            self._actors = self._make_actors(self._cluster, resources, self._cwd)
        return self._actors

    def _update_sharing(self, spec: ClusterSpec) -> None:
        """Start or end the sharing of GPUs if this spec differs from the one before."""
        state = self._state
        config = spec.config
        shared = config.resources.shares_gpus and (config.needs_engines or state.fleet is not None)
        if not shared:
            state.sharing = GpuSharing()
        elif not state.sharing.active or state.spec is None or state.spec != spec:
            trace = Path(spec.home) / config.run
            trace.mkdir(parents=True, exist_ok=True)
            sharing = GpuSharing(
                config.resources,
                hold=lambda: state.requests.hold(),
                release=lambda: state.requests.release(),
                trace=trace,
            )
            sharing.now = state.sharing.now  # the memory is still as in that phase
            state.sharing = sharing
            if state.fleet is not None:
                state.fleet.use_sharing(sharing)

    async def _open_on_shared_gpus(self, driver: Driver, spec: ClusterSpec) -> None:
        """Start engines without the trainer's memory, and set up the trainer without theirs."""
        state = self._state
        engines_are_up = self._has_engines_of(spec)
        if not engines_are_up:
            async with state.trainer.exclusive("open", state.trainer_timeout_s):
                await state.enter("start")
        await self._open_engines(driver, spec)
        wanted = TrainerSpec.of_cluster(spec)
        if state.trainer.taken and engines_are_up and self._set_up == wanted:
            return
        async with state.trainer.exclusive("open", state.trainer_timeout_s) as trainer:
            # Engines that have just started use all of their memory.
            if not engines_are_up:
                await state.enter("start")
            if not await trainer.is_up(wanted):
                await state.enter("train")
            await self._set_up_trainer(trainer, wanted)

    async def _open_trainer(self, spec: ClusterSpec) -> None:
        """Set up the ranks, unless a call runs on ranks with this spec.

        If one of those has died, the running call fails and its caller restores the trainer.
        """
        state = self._state
        wanted = TrainerSpec.of_cluster(spec)
        if state.trainer.taken and self._set_up == wanted:
            return
        async with state.trainer.exclusive("open", state.trainer_timeout_s) as trainer:
            await self._set_up_trainer(trainer, wanted)

    async def _set_up_trainer(self, trainer: TrainerGroup, wanted: TrainerSpec) -> None:
        self._set_up = None  # stays None if the set-up fails
        with self._waiting_for("trainer"):
            await trainer.setup(wanted)
        self._set_up = wanted

    async def _find_ranks(self, actors: NamedActors, spec: ClusterSpec) -> None:
        """Reserve bundles for all actors, and find or start the ranks without setting them up."""
        config = spec.config
        kept_engines = await self._decide_engines(spec)
        lock = self._state.trainer
        replace = lock.group is None or not lock.group.is_from(actors.trainer)
        timeout_s = self._state.trainer_timeout_s
        async with lock.locked("open", timeout_s) if replace else nullcontext():
            # Forget the ranks first: `reserve` may kill them and then find that this layout does
            # not fit.
            if replace:
                self._set_up = None
                lock.group = None
            with self._waiting_for("CPUs and GPUs of the run"):
                await asyncio.to_thread(
                    lambda: actors.reserve(engines=self._first_engines, kept_engines=kept_engines)
                )
            if replace:
                lock.group = await asyncio.to_thread(
                    TrainerGroup.of, actors.trainer, config.resources
                )

    async def _decide_engines(self, spec: ClusterSpec) -> int:
        """Decide the number of engines to start with; return the number that may exist already.

        A start waits for room for its engines. It does not wait for more than are configured.
        """
        configured = spec.config.resources.num_engines
        requested = await asyncio.to_thread(requested_engines, spec.config, spec.store_root)
        fleet = self._state.fleet
        self._first_engines = 0 if self._has_engines_of(spec) else min(configured, requested)
        present = [engine.number + 1 for engine in fleet.engines] if fleet else []
        return max(configured, requested, *present)

    async def _close_fleet(self) -> None:
        """Stop supervising engines, so that none is restarted. A new fleet finds running ones."""
        if self._size is not None:
            await self._size.close()
            self._size = None
        if self._state.fleet is not None:
            await self._state.fleet.close()
            self._state.fleet = None

    async def _open_engines(self, driver: Driver, spec: ClusterSpec) -> None:
        """Set up the generator and start the engines at the same time."""
        generator = self._state.generator
        assert generator is not None
        setup = GeneratorSpec(spec.config, spec.model_dir, spec.store_root)
        ready = call_or_kill(
            generator,
            generator.setup.remote(driver, setup),
            where="generator.setup",
            deadline_s=spec.config.resources.start_timeout_s,
        )
        if not spec.config.needs_engines:
            with self._waiting_for("generator"):
                await ready
            return
        with self._waiting_for("engines and router"):
            await asyncio.gather(ready, self._open_fleet(spec))
        await self._connect_generator(str(self._router_url))

    async def _open_fleet(self, spec: ClusterSpec) -> None:
        """Start and supervise the engines of this spec.

        After a failed start the next call opens all engines again.
        """
        if self._has_engines_of(spec):
            return
        await self._close_fleet()
        actors = self._actors
        assert actors is not None
        resources = spec.config.resources
        engines = await asyncio.to_thread(
            SupervisedEngine.all_of, resources, actors.engine, range(self._first_engines)
        )
        # in a thread: the lookup runs tasks in the bundles and waits for them
        devices = await asyncio.to_thread(actors.placement.engine_devices)
        fleet = Fleet(
            engines,
            actors.router,
            EngineSpec.of(spec, self._cluster, devices),
            self._sender.send,
            can_send=self._sender.can_send,
            on_router=self._on_router,
            sharing=self._state.sharing,
            make_room=self._make_room if self._state.sharing.active else None,
        )
        try:
            await fleet.open()
            # Responses in place continue over a push, so each token needs its weight version.
            if spec.config.sync.in_flight == "in_place":
                await fleet.require_spans()
        except BaseException:  # also a cancelled `open` must leave no supervisors
            await fleet.close()
            raise
        self._state.fleet = fleet
        if resources.resizable:
            self._size = FleetSize(fleet, actors, spec.config, spec.store_root, self._on_size)
            self._size.begin()

    def _has_engines_of(self, spec: ClusterSpec) -> bool:
        fleet = self._state.fleet
        return fleet is not None and fleet.spec == EngineSpec.of(
            spec, self._cluster, fleet.spec.devices
        )

    async def _make_room(self) -> None:
        state = self._state
        async with state.trainer.exclusive("make room for engines", state.trainer_timeout_s):
            await state.enter("start")

    async def _on_size(self) -> None:
        await self._connect_generator(str(self._router_url))

    async def _on_router(self, url: str) -> None:
        self._router_url = url
        await self._connect_generator(url)

    async def _connect_generator(self, url: str) -> None:
        """Make the generator send requests to this router."""
        generator = self._state.generator
        assert self._actors is not None and generator is not None
        fleet = self._state.fleet
        engines = len(fleet.engines) if fleet else self._first_engines
        on_gpus = self._actors.placement.on_gpus
        connect = generator.connect.remote(url, on_gpus=on_gpus, engines=engines)
        # At a start the generator still imports its packages: over a minute on a busy machine.
        deadline_s = self._state.config.resources.start_timeout_s
        await call(connect, where="generator.connect", deadline_s=deadline_s)


def _start_together(resources: ResourcesConfig) -> bool:
    """True if engines and trainer on the same GPUs may start at the same time.

    SGLang refuses GPUs of one engine with different free memory, as they are while ranks start.
    """
    stay = not (resources.trainer_sleeps or resources.engines_sleep)
    return stay and resources.rollout_num_gpus_per_engine == 1
