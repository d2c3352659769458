"""`Cluster`: the actors of a run, found by name or started, and set up for it.

Actors are named and detached, in the namespace `rlpipe-<cluster>`: a second run of the same cluster name, or a retry in
another process, finds them with their engines warm. What is rebuilt is only what the new run's specs differ in.

Not here: which weights they hold (`stages`), starting Ray itself (`local_ray`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpipe.actors.calls import call, end, gather
from rlpipe.actors.engine import EngineActor, EngineSpec, RouterActor
from rlpipe.actors.generator import Generator, GeneratorSpec
from rlpipe.actors.local_ray import connect
from rlpipe.actors.placement import Placement
from rlpipe.actors.trainer import TrainerRank, TrainerSpec
from rlpipe.actors.trainer_group import TrainerGroup
from rlpipe.config.run import RunConfig

ROLLOUT_CALLS = 8


@dataclass
class Cluster:
    """Handles of everything that holds state for a run."""

    trainer: TrainerGroup
    generator: ActorHandle
    logs: Path
    placement: Placement
    engines: list[ActorHandle] = field(default_factory=list)
    router: ActorHandle | None = None

    async def engine_status(self, *, deadline_s: float = 60.0) -> list[dict[str, Any]]:
        """`EngineActor.status` of all engines. Raises: ActorLost, DeadlineExceeded."""
        return await gather([e.status.remote() for e in self.engines], where="engine.status", deadline_s=deadline_s)

    async def serve(self, config: RunConfig, spec: GeneratorSpec) -> None:
        """Bring engines, router and generator up, or up again after one of them died. Raises: as `open_cluster`."""
        deadline_s = config.resources.start_timeout_s
        setup = call(self.generator.setup.remote(spec), where="generator.setup", deadline_s=deadline_s)
        if self.router is None:
            await setup
            return
        engine = EngineSpec(
            model_dir=spec.model_dir,
            engine=config.engine,
            resources=config.resources,
            dtype=config.model.dtype,
            seed=config.train.seed,
            trust_remote_code=getattr(config.model.source, "trust_remote_code", False),
            logs=str(self.logs),
        )
        starts = [actor.start.remote(engine) for actor in self.engines]
        urls, _ = await asyncio.gather(gather(starts, where="engine.start", deadline_s=deadline_s), setup)
        router = self.router.start.remote(config.engine, config.resources, str(self.logs), urls)
        url = await call(router, where="router.start", deadline_s=deadline_s)
        connect_call = self.generator.connect.remote(url, on_gpus=self.placement.on_gpus)
        await call(connect_call, where="generator.connect", deadline_s=deadline_s)

    def kill(self) -> None:
        """End every actor, and with it its server, and give their places back."""
        self.trainer.kill()
        end([actor for actor in (self.generator, self.router, *self.engines) if actor is not None])
        self.placement.remove()


async def open_cluster(config: RunConfig, *, home: Path, model_dir: str, store_root: str) -> Cluster:
    """Find or start the actors of a run, all at once, and set them up for it.

    Raises: ResourceError, EngineUnavailable, DataError, ConfigError, DeadlineExceeded: whatever keeps one from coming up.
    """
    namespace = f"rlpipe-{config.cluster}"
    connect(config.resources, home, namespace=namespace)
    logs = home / config.cluster / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    actors = _Actors(config, namespace)
    cluster = Cluster(
        trainer=TrainerGroup(actors.trainer, config.resources.trainer_ranks, start_timeout_s=config.resources.start_timeout_s),
        generator=actors.generator(),
        logs=logs,
        placement=actors.placement,
        engines=[actors.engine(number) for number in range(config.resources.num_engines)] if config.needs_engines else [],
        router=actors.router() if config.needs_engines else None,
    )
    trainer = TrainerSpec(
        model_dir=model_dir,
        store_root=store_root,
        work_dir=str(home / config.run),
        model=config.model,
        train=config.train,
        advantage=config.advantage,
        rollout_temperature=config.rollout.rollout_temperature,
        total_optimizer_steps=config.total_optimizer_steps,
        engine_tensor_parallel_size=config.resources.rollout_num_gpus_per_engine,
        world_size=config.resources.trainer_ranks,
        num_nodes=config.resources.actor_num_nodes,
        threads=config.resources.threads_per_process,
    )
    await asyncio.gather(
        cluster.trainer.setup(trainer),
        cluster.serve(config, GeneratorSpec(config, model_dir, store_root)),
    )
    return cluster


class _Actors:
    """Makes the actors of one cluster, or finds them."""

    def __init__(self, config: RunConfig, namespace: str) -> None:
        self._config, self._namespace = config, namespace
        self.placement = Placement(config.cluster, config.resources)
        self._cwd = str(Path.cwd())

    def trainer(self, rank: int) -> ActorHandle:
        arguments = (rank, self._config.resources.trainer_ranks, self._cwd)
        return self._named(TrainerRank, f"trainer-{rank}", arguments, lambda: self.placement.trainer(rank))

    def engine(self, number: int) -> ActorHandle:
        return self._named(EngineActor, f"engine-{number}", (number, self._cwd), lambda: self.placement.engine(number))

    def router(self) -> ActorHandle:
        return self._named(RouterActor, "router", (self._cwd,), lambda: {"num_cpus": 0})

    def generator(self) -> ActorHandle:
        options = {"num_cpus": 0, "max_concurrency": ROLLOUT_CALLS}
        return self._named(Generator, "generator", (self._cwd,), lambda: options)

    def _named(self, kind: type, name: str, arguments: tuple, options: Any) -> ActorHandle:
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError:
            placed = options()
        remote: Any = ray.remote(kind)
        named = {"name": name, "namespace": self._namespace, "lifetime": "detached", "get_if_exists": True}
        return remote.options(**named, **placed).remote(*arguments)
