"""Find or start the named, detached actors of a cluster.

The name of a dead actor is free, so the next lookup starts another. Lookups do not wait until an
actor is ready. Classes are imported only when an actor is started: a process that only talks to
the conductor needs neither torch nor Megatron.

Entry points: `conductor`, `NamedActors`, `begin_actors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from rlpipe.actors.ray.calls import kill_actors
from rlpipe.actors.ray.layout import engine_name, engine_names, rank_names
from rlpipe.actors.ray.placement import Placement
from rlpipe.config.model import ResourcesConfig

# These names are the same in every layout.
CONDUCTOR = "conductor"
GENERATOR = "generator"
ROUTER = "router"
GENERATOR_CALLS = 64
"""Calls that the generator serves at once."""
CONDUCTOR_CALLS = 256
"""Calls that the conductor serves at once."""


def namespace(cluster: str) -> str:
    """Return the Ray namespace of a cluster's actors."""
    return f"rlpipe-{cluster}"


def conductor(cluster: str, cwd: str, resources: ResourcesConfig) -> ActorHandle:
    """Find or start the conductor of a cluster."""

    def actor_class() -> type:
        from rlpipe.actors.conductor import Conductor

        return Conductor

    # no CPU: it only waits for other actors, and must start on a full cluster
    options = {**_without_gpu(resources), "max_concurrency": CONDUCTOR_CALLS}
    return find_or_start(
        actor_class, CONDUCTOR, namespace(cluster), (cluster, cwd), lambda: options
    )


class NamedActors:
    """Find or start the ranks, engines, router and generator of a cluster."""

    def __init__(self, cluster: str, resources: ResourcesConfig, cwd: str) -> None:
        """`cwd`: working directory of the actors. Hooks and models are resolved against it."""
        self.placement = Placement(cluster, resources)
        self._resources = resources
        self._namespace = namespace(cluster)
        self._cwd = cwd
        self._rank_names = rank_names(resources)

    def reserve(self, *, engines: int, kept_engines: int = 0) -> None:
        """Reserve bundles for this layout, and kill actors of other layouts to make room.

        `engines`: number of engines that need bundles now. `kept_engines`: number of engines whose
        actors and bundles stay if they exist. Raises: ResourceError if the layout does not fit;
        then the other actors stay.
        """
        kept = engine_names(self._resources, max(engines, kept_engines))
        self.placement.reserve(
            engines=engines,
            kept_engines=kept_engines,
            kill_others=lambda: kill_actors(self._of_other_layouts(kept)),
        )

    def all_actors(self) -> list[ActorHandle]:
        """Return all running actors of the cluster, of any layout, except the conductor."""
        return self._running(lambda name: name != CONDUCTOR)

    def _of_other_layouts(self, engines: Sequence[str]) -> list[ActorHandle]:
        # conductor, generator and router belong to every layout
        own = {CONDUCTOR, GENERATOR, ROUTER, *self._rank_names, *engines}
        return self._running(lambda name: name not in own)

    def _running(self, matches: Callable[[str], bool]) -> list[ActorHandle]:
        actors: list[ActorHandle] = []
        rows: list[Any] = list_named_actors(all_namespaces=True)
        for row in rows:
            if row["namespace"] == self._namespace and matches(row["name"]):
                with suppress(ValueError):  # the actor ended after it was listed
                    actors.append(ray.get_actor(row["name"], namespace=self._namespace))
        return actors

    def trainer(self, rank: int) -> ActorHandle:
        """Find or start a rank. Numbers of the critic's own ranks follow those of the policy."""
        from rlpipe.actors.trainer.group import STATUS
        from rlpipe.actors.trainer.rank_class import rank_actor

        actor_class, arguments = rank_actor(rank, self._resources, self._cwd)
        name = self._rank_names[rank]

        def options() -> dict[str, Any]:
            return {**self.placement.trainer(rank), "concurrency_groups": {STATUS: 1}}

        return find_or_start(lambda: actor_class, name, self._namespace, arguments, options)

    def engine(self, number: int, node: int) -> ActorHandle:
        """Find or start the server of an engine on one of its nodes."""
        from rlpipe.actors.engines.engine import FILES, EngineActor

        name = engine_name(self._resources, number, node)

        def options() -> dict[str, Any]:
            return {**self.placement.engine(number, node), "concurrency_groups": {FILES: 1}}

        arguments = (number, self._cwd, node)
        return find_or_start(lambda: EngineActor, name, self._namespace, arguments, options)

    def router(self) -> ActorHandle:
        from rlpipe.actors.engines.engine import RouterActor

        return find_or_start(
            lambda: RouterActor,
            ROUTER,
            self._namespace,
            (self._cwd,),
            lambda: _without_gpu(self._resources),
        )

    def generator(self) -> ActorHandle:
        from rlpipe.actors.generator import Generator

        options = {**_without_gpu(self._resources), "max_concurrency": GENERATOR_CALLS}
        return find_or_start(
            lambda: Generator, GENERATOR, self._namespace, (self._cwd,), lambda: options
        )


def begin_actors(
    cluster: str, resources: ResourcesConfig, cwd: str, *, engines: int
) -> list[ActorHandle]:
    """Start conductor, ranks and engines of a Ray that this process has just started.

    They import their packages while this process imports the flow. `Conductor.open` finds them by
    name. Nothing starts on GPUs, which the run has not locked yet (`claim_gpus`). `engines`: their
    number now. Return the engines. Raises: as `NamedActors.reserve`.
    """
    actors = NamedActors(cluster, resources, cwd)
    if actors.placement.on_gpus:
        return []
    actors.reserve(engines=engines)
    servers = product(range(engines), range(resources.engine_nodes))
    started = [actors.engine(number, node) for number, node in servers]
    for rank, _ in enumerate(rank_names(resources)):
        actors.trainer(rank)
    conductor(cluster, cwd, resources)
    return started


def _without_gpu(resources: ResourcesConfig) -> dict[str, Any]:
    """Return Ray options of an actor without a GPU. It runs on nodes that stay, as the ranks do."""
    options: dict[str, Any] = {"num_cpus": 0}
    if resources.trainer_labels:
        options["label_selector"] = resources.trainer_labels
    return options


def find_or_start(
    actor_class: Callable[[], type],
    name: str,
    actor_namespace: str,
    arguments: tuple[Any, ...],
    options: Callable[[], dict[str, Any]],
) -> ActorHandle:
    """Return the actor of this name; start it if it does not exist.

    `actor_class` and `options` are called only for an actor that has to be started: the class may
    take seconds to import, and the options may have to look at bundles.
    """
    try:
        return ray.get_actor(name, namespace=actor_namespace)
    except ValueError:
        start_options = dict(options())
    groups = start_options.pop("concurrency_groups", None)
    make: Any = ray.remote
    remote = make(concurrency_groups=groups)(actor_class()) if groups else make(actor_class())
    # `get_if_exists`: another process may have started the actor in the meantime
    identity = {
        "name": name,
        "namespace": actor_namespace,
        "lifetime": "detached",
        "get_if_exists": True,
    }
    return remote.options(**identity, **start_options).remote(*arguments)
