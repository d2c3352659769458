"""The named, detached actors of a cluster: found, or started in their places.

A dead actor's name is free, so asking again starts a new one; nothing here waits for it to be ready. Classes are imported when
one of them is started: a process that only talks to the conductor needs neither torch nor Megatron.

Not here: what they are set up with (`conductor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from rlpipe.actors.placement import Placement
from rlpipe.config.model import ResourcesConfig

GENERATOR_CALLS = 64
CONDUCTOR_CALLS = 256


def namespace(cluster: str) -> str:
    """The Ray namespace of a cluster's actors."""
    return f"rlpipe-{cluster}"


def conductor(cluster: str, cwd: str) -> ActorHandle:
    """The conductor of a cluster."""

    def kind() -> type:
        from rlpipe.actors.conductor import Conductor

        return Conductor

    options = {"num_cpus": 0, "max_concurrency": CONDUCTOR_CALLS}
    return named(kind, "conductor", namespace(cluster), (cluster, cwd), lambda: options)


class NamedActors:
    """What a conductor starts. `cwd` is the folder they work in: hooks and models are found relative to it."""

    def __init__(self, cluster: str, resources: ResourcesConfig, cwd: str) -> None:
        self.placement = Placement(cluster, resources)
        self._resources, self._namespace, self._cwd = resources, namespace(cluster), cwd

    def trainer(self, rank: int) -> ActorHandle:
        """The rank of this number, the critic's own after the policy's."""
        from rlpipe.actors.ranks import RankActor
        from rlpipe.actors.trainer_group import STATUS

        made = RankActor.of(rank, self._resources, self._cwd)
        options = lambda: {**self.placement.trainer(rank), "concurrency_groups": {STATUS: 1}}  # noqa: E731 - see `engine`
        return named(lambda: made.kind, made.name, self._namespace, made.arguments, options)

    def engine(self, number: int) -> ActorHandle:
        from rlpipe.actors.engine import FILES, EngineActor

        options = lambda: {**self.placement.engine(number), "concurrency_groups": {FILES: 1}}  # noqa: E731 - a thunk: places are taken only for a new actor
        return named(lambda: EngineActor, f"engine-{number}", self._namespace, (number, self._cwd), options)

    def router(self) -> ActorHandle:
        from rlpipe.actors.engine import RouterActor

        return named(lambda: RouterActor, "router", self._namespace, (self._cwd,), lambda: {"num_cpus": 0})

    def generator(self) -> ActorHandle:
        from rlpipe.actors.generator import Generator

        options = {"num_cpus": 0, "max_concurrency": GENERATOR_CALLS}
        return named(lambda: Generator, "generator", self._namespace, (self._cwd,), lambda: options)


def named(
    kind: Callable[[], type], name: str, space: str, arguments: tuple[Any, ...], options: Callable[[], dict[str, Any]]
) -> ActorHandle:
    """The actor of this name, started if it is not there; only then are its class and its options asked for."""
    try:
        return ray.get_actor(name, namespace=space)
    except ValueError:
        placed = dict(options())
    groups = placed.pop("concurrency_groups", None)
    make: Any = ray.remote
    remote = make(concurrency_groups=groups)(kind()) if groups else make(kind())
    unique = {"name": name, "namespace": space, "lifetime": "detached", "get_if_exists": True}
    return remote.options(**unique, **placed).remote(*arguments)
