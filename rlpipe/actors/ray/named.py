"""The named, detached actors of a cluster: found, or started in their places.

A dead actor's name is free, so asking again starts a new one; nothing here waits for it to be
ready. Classes are imported when one of them is started: a process that only talks to the conductor
needs neither torch nor Megatron.

Not here: what they are set up with (`conductor`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from rlpipe.actors.ray.calls import end
from rlpipe.actors.ray.layout import engine_names, rank_names
from rlpipe.actors.ray.placement import Placement
from rlpipe.config.model import ResourcesConfig

CONDUCTOR, GENERATOR, ROUTER = "conductor", "generator", "router"
"""The names of those that are the same in every layout."""
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
    return named(kind, CONDUCTOR, namespace(cluster), (cluster, cwd), lambda: options)


class NamedActors:
    """What a conductor starts. `cwd` is the folder they work in: hooks and models are found
    relative to it."""

    def __init__(self, cluster: str, resources: ResourcesConfig, cwd: str) -> None:
        self.placement = Placement(cluster, resources)
        self._resources, self._namespace, self._cwd = resources, namespace(cluster), cwd
        self._ranks, self._engines = rank_names(resources), engine_names(resources)

    def make_way(self, *, engines: bool) -> None:
        """Have places for the ranks, and for `engines` if the run has any; actors of another layout
        are ended for it.

        Raises: ResourceError if it does not fit; the others stay.
        """
        self.placement.claim(engines=engines, leave=lambda: end(self._others()))

    def everyone(self) -> list[ActorHandle]:
        """All that are there but the conductor, of whatever layout."""
        return self._found(lambda name: name != CONDUCTOR)

    def _others(self) -> list[ActorHandle]:
        known = {CONDUCTOR, GENERATOR, ROUTER, *self._ranks, *self._engines}
        return self._found(lambda name: name not in known)

    def _found(self, chosen: Callable[[str], bool]) -> list[ActorHandle]:
        actors: list[ActorHandle] = []
        rows: list[Any] = list_named_actors(all_namespaces=True)
        for row in rows:
            if row["namespace"] == self._namespace and chosen(row["name"]):
                with suppress(ValueError):  # it has ended meanwhile
                    actors.append(ray.get_actor(row["name"], namespace=self._namespace))
        return actors

    def trainer(self, rank: int) -> ActorHandle:
        """The rank of this number, the critic's own after the policy's."""
        from rlpipe.actors.trainer.group import STATUS
        from rlpipe.actors.trainer.ranks import RankActor

        made = RankActor.of(rank, self._resources, self._cwd)
        options = lambda: {**self.placement.trainer(rank), "concurrency_groups": {STATUS: 1}}  # noqa: E731 - see `engine`
        return named(lambda: made.kind, self._ranks[rank], self._namespace, made.arguments, options)

    def engine(self, number: int, node: int) -> ActorHandle:
        """The server of this engine on one of its nodes."""
        from rlpipe.actors.engines.engine import FILES, EngineActor

        options = lambda: {**self.placement.engine(number, node), "concurrency_groups": {FILES: 1}}  # noqa: E731 - a thunk: places are taken only for a new actor
        name = self._engines[number * self._resources.engine_nodes + node]
        return named(lambda: EngineActor, name, self._namespace, (number, self._cwd, node), options)

    def router(self) -> ActorHandle:
        from rlpipe.actors.engines.engine import RouterActor

        return named(
            lambda: RouterActor, ROUTER, self._namespace, (self._cwd,), lambda: {"num_cpus": 0}
        )

    def generator(self) -> ActorHandle:
        from rlpipe.actors.generator import Generator

        options = {"num_cpus": 0, "max_concurrency": GENERATOR_CALLS}
        return named(lambda: Generator, GENERATOR, self._namespace, (self._cwd,), lambda: options)


def named(
    kind: Callable[[], type],
    name: str,
    space: str,
    arguments: tuple[Any, ...],
    options: Callable[[], dict[str, Any]],
) -> ActorHandle:
    """The actor of this name, started if it is not there; only then are its class and its options
    asked for."""
    try:
        return ray.get_actor(name, namespace=space)
    except ValueError:
        placed = dict(options())
    groups = placed.pop("concurrency_groups", None)
    make: Any = ray.remote
    remote = make(concurrency_groups=groups)(kind()) if groups else make(kind())
    unique = {"name": name, "namespace": space, "lifetime": "detached", "get_if_exists": True}
    return remote.options(**unique, **placed).remote(*arguments)
