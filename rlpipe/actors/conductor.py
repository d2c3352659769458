"""`Conductor`: the one actor through which flow processes use a cluster's trainer and engines.

Several processes may drive a run at once: an iteration that is opened ahead, one that outlived its
worker, one that a person retried. Calls to trainer ranks are collective, so all ranks must get them
in one order: here they wait for each other. What comes from a process of an older epoch, or of a
run that has left the cluster, is refused. Engines are kept by the `Fleet`. Where trainer and
engines share GPUs, each call to either has them first do with memory what its phase asks for
(`Sharing`).

It remembers nothing that matters: killed, it is started again and finds ranks, engines and router
by name.

Not here: what happened (the store), rollouts (drivers call the generator themselves).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.engines.files_sync import FilesSync
from rlpipe.actors.engines.fleet import Fleet, Receivers, Weights
from rlpipe.actors.engines.kept_engine import KeptEngine
from rlpipe.actors.idle import Idle, is_driven
from rlpipe.actors.ray.calls import call_or_end, end
from rlpipe.actors.ray.layout import engine_names
from rlpipe.actors.ray.named import NamedActors
from rlpipe.actors.requests import Requests
from rlpipe.actors.sharing import PHASE_OF, Phase, Sharing
from rlpipe.actors.specs import ClusterSpec, Driver, GeneratorSpec
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.actors.trainer.sending import places, restore
from rlpipe.actors.trainer.spec import TrainerSpec, trainer_spec
from rlpipe.actors.trainer.trainer_turn import TrainerTurn
from rlpipe.config.model import ResourcesConfig
from rlpipe.config.run import RunConfig
from rlpipe.errors import Fenced, RlpipeError
from rlpipe.lineage.states import Lineage

CALL_TIMEOUT_S = 60.0


class Conductor:
    """See the module. Every method but `open` refuses a driver that is not the cluster's; all raise
    what an actor raised."""

    def __init__(
        self,
        cluster: str,
        cwd: str,
        actors: Callable[[str, ResourcesConfig, str], NamedActors] = NamedActors,
    ) -> None:
        os.chdir(cwd)
        self._make_actors = actors
        self._cluster = cluster
        self._cwd = cwd
        self._driver: Driver | None = None
        self._spec: ClusterSpec | None = None
        self._actors: NamedActors | None = None
        self._turn = TrainerTurn()
        self._generator: ActorHandle | None = None
        self._fleet: Fleet | None = None
        self._sharing = Sharing()
        self._router_url: str | None = None
        self._set_up: TrainerSpec | None = None
        self._open_lock = asyncio.Lock()
        self._idle = Idle(lambda: self.close(None), self._open_lock)

    async def open(self, driver: Driver, spec: ClusterSpec) -> None:
        """Bring up what is not up, for this driver from now on. Repeated, it starts again what
        died.

        Raises: Fenced if a newer driver of the run was here, or another run is at work on the
        cluster; ResourceError, EngineUnavailable, DataError, ConfigError, DeadlineExceeded:
        whatever keeps an actor from coming up.
        """
        async with self._open_lock:
            await self._take_over(driver, spec)
            known = self._spec
            if self._fleet is not None and (known is None or known.branch != spec.branch):
                self._fleet.forget()
            if (
                self._actors is None
                or known is None
                or known.config.resources != spec.config.resources
            ):
                if known is not None and engine_names(known.config.resources) != engine_names(
                    spec.config.resources
                ):
                    await self._leave_engines()
                self._actors = self._make_actors(self._cluster, spec.config.resources, self._cwd)
            self._share_gpus_of(spec)
            self._spec = spec
            self._idle.watch(spec, driver.epoch)
            self._generator = await asyncio.to_thread(self._actors.generator)
            await self._find_ranks(self._actors, spec.config)
            if self._sharing.active:
                await self._open_in_turn(driver, spec)
                return
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._open_trainer(spec))
                    tasks.create_task(self._open_engines(driver, spec))
            except BaseExceptionGroup as several:
                raise several.exceptions[0] from several

    async def collective(
        self, driver: Driver, method: str, deadline_s: float, arguments: dict[str, Any]
    ) -> list[Any]:
        """As `TrainerGroup.call`, when no other call runs."""
        async with self._trainer_for(driver, method, deadline_s) as trainer:
            if method in PHASE_OF:
                await self._enter(PHASE_OF[method])
            return await trainer.call(method, deadline_s=deadline_s, **arguments)

    async def holds(self, driver: Driver, state: str) -> bool:
        """Do all ranks hold this state?"""
        async with self._trainer_for(driver, "holds", CALL_TIMEOUT_S) as trainer:
            return await trainer.holds(state)

    async def initialise(
        self, driver: Driver, key: str, start_from: str | None, deadline_s: float
    ) -> dict[str, str]:
        """As `TrainerGroup.initialise`."""
        async with self._trainer_for(driver, "initialise", deadline_s) as trainer:
            await self._enter("train")
            return await trainer.initialise(key, start_from, deadline_s=deadline_s)

    async def ensure(
        self, driver: Driver, lineage: Lineage, deadline_s: float
    ) -> dict[str, Any] | None:
        """As `TrainerGroup.ensure`."""
        async with self._trainer_for(driver, "ensure", deadline_s) as trainer:
            if self._sharing.active and not await trainer.holds(lineage.target):
                await self._enter("train")
            return await trainer.ensure(lineage, deadline_s=deadline_s)

    async def publish(self, driver: Driver, weights: Weights, *, everyone: bool) -> dict[str, Any]:
        """As `Fleet.publish`. Engines that share GPUs are always all given them now: later there is
        no room."""
        return await self._kept().publish(
            weights, everyone=everyone or self._sharing.active, check=lambda: self._refuse(driver)
        )

    async def sample(self, driver: Driver) -> None:
        """Requests will come: where GPUs are shared, engines have them from now on."""
        self._refuse(driver)
        if self._sharing.active and self._fleet is not None:
            async with self._trainer_for(driver, "sample", self._patience_s()):
                await self._enter("sample")

    async def switches(self, driver: Driver) -> list[dict[str, Any]]:
        """As `Sharing.take_log`."""
        self._refuse(driver)
        return self._sharing.take_log()

    async def engines(self, driver: Driver) -> list[dict[str, Any]]:
        """As `Fleet.status`."""
        self._refuse(driver)
        return self._kept().status()

    async def trouble(self, driver: Driver) -> RlpipeError | None:
        """As `Fleet.trouble`."""
        self._refuse(driver)
        return self._fleet.trouble() if self._fleet else None

    async def stop_engines(self, driver: Driver) -> None:
        """As `Fleet.stop_engines`."""
        self._refuse(driver)
        await self._kept().stop_engines()

    async def close(self, driver: Driver | None) -> None:
        """End every other actor, and with it its server, and give their places back. None: nobody
        drives them any more."""
        if driver is not None:
            self._refuse(driver)
        await self._leave_engines()
        if self._actors is not None:
            await asyncio.to_thread(end, await asyncio.to_thread(self._actors.everyone))
            await asyncio.to_thread(self._actors.placement.remove)
        self._turn.group = self._set_up = self._generator = self._spec = self._driver = None
        self._sharing = Sharing()

    async def _take_over(self, driver: Driver, spec: ClusterSpec) -> None:
        """Let this driver have the actors, unless a newer one of its run has them, or another run
        is still at work."""
        now = self._driver
        known = self._spec
        if now is not None and known is not None and known.branch != spec.branch:
            if await asyncio.to_thread(is_driven, known.store_root, now.run, epoch=now.epoch):
                raise Fenced(
                    "another run uses the cluster's actors",
                    where=f"resources.cluster={self._cluster}",
                    found=f"run {now.run} in epoch {now.epoch}, at work",
                    do="wait until it ends, or give this run actors of its own: resources.cluster=NAME",
                )
            now = None
        if now is None or now.epoch <= driver.epoch:
            self._driver = driver
        self._refuse(driver)

    def _refuse(self, driver: Driver) -> None:
        driver.require(self._driver, where=f"cluster {self._cluster}")
        self._idle.called()

    @asynccontextmanager
    async def _trainer_for(
        self, driver: Driver, method: str, deadline_s: float
    ) -> AsyncIterator[TrainerGroup]:
        """The trainer, while nobody else calls it. Raises: Fenced; DeadlineExceeded naming who has
        it."""
        self._refuse(driver)
        async with self._turn.exclusive(method, deadline_s) as trainer:
            self._refuse(driver)
            yield trainer

    def _kept(self) -> Fleet:
        assert self._fleet is not None, "this run has no engines"
        return self._fleet

    def _share_gpus_of(self, spec: ClusterSpec) -> None:
        """Begin with sharing GPUs, or end it, if this spec says other things of it than the one
        before."""
        config = spec.config
        known = self._spec
        shared = config.resources.colocate and (config.needs_engines or self._fleet is not None)
        if not shared:
            self._sharing = Sharing()
        elif not self._sharing.active or known is None or known != spec:
            before = self._sharing.now
            trace = Path(spec.home) / config.run
            trace.mkdir(parents=True, exist_ok=True)
            self._sharing = Sharing(
                config.resources,
                hold=lambda: self._requests(config).hold(),
                release=lambda: self._requests(config).release(),
                trace=trace,
            )
            self._sharing.now = before
            if self._fleet is not None:
                self._fleet.share(self._sharing)

    async def _enter(self, phase: Phase) -> None:
        """The trainer must be ours alone meanwhile."""
        await self._sharing.enter(phase, self._turn.group, self._fleet)

    async def _open_in_turn(self, driver: Driver, spec: ClusterSpec) -> None:
        """Engines come up while the trainer has given up its memory, and it is set up while they
        have given up theirs."""
        engines_are_up = self._has_engines_of(spec)
        if not engines_are_up:
            async with self._turn.exclusive("open", self._patience_s()):
                await self._enter("start")
        await self._open_engines(driver, spec)
        wanted = trainer_spec(spec)
        if self._turn.taken and engines_are_up and self._set_up == wanted:
            return
        async with self._turn.exclusive("open", self._patience_s()) as trainer:
            if not engines_are_up:
                await self._enter("start")
            if not await trainer.is_up(wanted):
                await self._enter("train")
            await self._set_up_trainer(trainer, wanted)

    async def _open_trainer(self, spec: ClusterSpec) -> None:
        """Ranks that somebody calls were set up; who calls them hears of it if one has died, and
        sees to it."""
        wanted = trainer_spec(spec)
        if self._turn.taken and self._set_up == wanted:
            return
        async with self._turn.exclusive("open", self._patience_s()) as trainer:
            await self._set_up_trainer(trainer, wanted)

    async def _set_up_trainer(self, trainer: TrainerGroup, wanted: TrainerSpec) -> None:
        self._set_up = None
        await trainer.setup(wanted)
        self._set_up = wanted

    async def _find_ranks(self, actors: NamedActors, config: RunConfig) -> None:
        """The trainer's ranks, found or started once there is a place for everybody; not set up
        yet."""
        group = self._turn.group
        anew = group is None or not group.is_from(actors.trainer)
        async with self._turn.alone("open", self._patience_s()) if anew else nullcontext():
            # ranks that have to go may be gone when what takes their place does not fit after all
            if anew:
                self._set_up = self._turn.group = None
            await asyncio.to_thread(lambda: actors.make_way(engines=config.needs_engines))
            if anew:
                self._turn.group = await asyncio.to_thread(
                    TrainerGroup.of, actors.trainer, config.resources
                )

    async def _leave_engines(self) -> None:
        """Let go of the engines: their keepers would start those again that are to go. A new fleet
        finds those that stay."""
        if self._fleet is not None:
            await self._fleet.close()
            self._fleet = None

    async def _open_engines(self, driver: Driver, spec: ClusterSpec) -> None:
        setup = GeneratorSpec(spec.config, spec.model_dir, spec.store_root)
        generator = self._generator
        assert generator is not None
        asked = generator.setup.remote(driver, setup)
        timeout_s = spec.config.resources.start_timeout_s
        ready = call_or_end(generator, asked, where="generator.setup", deadline_s=timeout_s)
        if not spec.config.needs_engines:
            await ready
            return
        await asyncio.gather(ready, self._open_fleet(spec))
        await self._connect(str(self._router_url))

    async def _open_fleet(self, spec: ClusterSpec) -> None:
        """Engines of this spec, up and kept. One that did not come up as a whole is opened anew the
        next time."""
        if self._has_engines_of(spec):
            return
        await self._leave_engines()
        actors = self._actors
        assert actors is not None
        engines = await asyncio.to_thread(KeptEngine.all_of, spec.config.resources, actors.engine)
        devices = await asyncio.to_thread(actors.placement.engine_devices)
        fleet = Fleet(
            engines,
            actors.router,
            EngineSpec.of(spec, self._cluster, devices),
            self._send,
            can_send=self._can_send,
            on_router=self._routed,
            sharing=self._sharing,
            make_room=self._make_room if self._sharing.active else None,
        )
        try:
            await fleet.open()
            if spec.config.sync.in_flight == "in_place":
                await fleet.require_spans()
        except BaseException:
            await fleet.close()
            raise
        self._fleet = fleet

    def _has_engines_of(self, spec: ClusterSpec) -> bool:
        fleet = self._fleet
        return fleet is not None and fleet.spec == EngineSpec.of(
            spec, self._cluster, fleet.spec.devices
        )

    async def _make_room(self) -> None:
        async with self._turn.exclusive("make room for engines", self._patience_s()):
            await self._enter("start")

    def _patience_s(self) -> float:
        """How long whoever has the trainer may take."""
        assert self._spec is not None
        return self._spec.config.train.timeout_s + CALL_TIMEOUT_S

    async def _routed(self, url: str) -> None:
        self._router_url = url
        await self._connect(url)

    async def _connect(self, url: str) -> None:
        assert self._actors is not None and self._spec is not None
        await self._requests(self._spec.config).connect(url, on_gpus=self._actors.placement.on_gpus)

    def _requests(self, config: RunConfig) -> Requests:
        assert self._generator is not None
        return Requests(self._generator, config)

    async def _can_send(self, weights: Weights) -> bool:
        spec = self._spec
        if spec is None or not self._sharing.sampling:
            return False
        if spec.config.sync.through_files and await FilesSync(spec, self._cluster).there(weights):
            return True
        if self._turn.group is None or self._turn.taken:
            return False
        async with self._turn.exclusive("can_send", CALL_TIMEOUT_S) as trainer:
            return await trainer.held() in (weights.digest, None)

    async def _send(self, weights: Weights, to: Receivers, *, must: bool) -> dict[str, Any] | None:
        """See `fleet.Send`. A trainer that holds nothing is restored first; requests are held while
        weights are on their way."""
        assert self._spec is not None
        config = self._spec.config
        if config.sync.through_files:
            return await FilesSync(self._spec, self._cluster).send(
                weights,
                to,
                self._kept().engines,
                trainer=lambda: self._trainer_with(weights, config, must=must),
                held=lambda: self._loading(config, idle=to.idle),
            )
        deadline_s = config.sync.timeout_s + CALL_TIMEOUT_S
        async with self._trainer_with(weights, config, must=must) as trainer:
            if trainer is None:
                return None
            async with (
                nullcontext()
                if to.idle or self._sharing.active
                else self._requests(config).held_for_push()
            ):
                urls = await to.begin(to.urls())
                of_push = {"engines": urls, "stamp": weights.stamp, "sync": config.sync}
                shared = places(self._kept().engines, urls, config.resources)
                answers = await trainer.call(
                    "push", held=weights.digest, places=shared, deadline_s=deadline_s, **of_push
                )
                await to.end(answers[0]["unknown"])
        return answers[0]

    @asynccontextmanager
    async def _trainer_with(
        self, weights: Weights, config: RunConfig, *, must: bool
    ) -> AsyncIterator[TrainerGroup | None]:
        """The trainer with these weights, restored if it held nothing; None if it holds others,
        unless it `must` give them up."""
        async with self._turn.exclusive(
            "push", config.sync.timeout_s + CALL_TIMEOUT_S + config.train.timeout_s
        ) as trainer:
            if not must and await trainer.held() not in (weights.digest, None):
                yield None
                return
            async with self._phase_kept_after():
                if self._sharing.active and not await trainer.holds(weights.lineage.target):
                    await self._enter("train")
                await restore(trainer, weights, config)
                await self._enter("push")
                yield trainer

    @asynccontextmanager
    async def _loading(self, config: RunConfig, *, idle: bool) -> AsyncIterator[None]:
        """Engines have room for weights, which come from elsewhere than the trainer, and get no
        requests."""
        if self._sharing.active:
            async with (
                self._turn.exclusive("load weights", self._patience_s()),
                self._phase_kept_after(),
            ):
                await self._enter("push")
                yield
            return
        async with nullcontext() if idle else self._requests(config).held_for_push():
            yield

    @asynccontextmanager
    async def _phase_kept_after(self) -> AsyncIterator[None]:
        """In the middle of a rollout, of which one engine is given weights, it goes on
        afterwards."""
        sampled = self._sharing.active and self._sharing.sampling
        try:
            yield
        finally:
            if sampled:
                await self._enter("sample")
