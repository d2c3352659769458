"""The actors of a run with simulated engines and ranks, many in one process.

Conductor, fleet, generator, router and their calls are the real ones. Only `SimulatedActors`
differs: it finds an engine or a rank in an `EngineHost` or a `RankHost`, a Ray actor that holds
many of them. Each call to an engine or rank is still a call of Ray. The engines' actors are real
`EngineActor` objects for external servers; the ranks are `SimulatedRank`.

Every process counts its parts (`probes`). Entry point: `start_conductor`, before the run opens its
cluster.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rlpipe.actors.conductor import Conductor
from rlpipe.actors.engines import fleet
from rlpipe.actors.engines.engine import EngineActor
from rlpipe.actors.generator import Generator
from rlpipe.actors.ray import named
from rlpipe.actors.ray.calls import gather
from rlpipe.actors.ray.placement import Placement
from rlpipe.config.model import ResourcesConfig
from rlpipe.config.run import RunConfig
from tools.bench import probes

ENGINES_PER_HOST = 512
RANKS_PER_HOST = 512
CALL_TIMEOUT_S = 60.0
CHECK_INTERVAL = "RLPIPE_BENCH_CHECK_INTERVAL_S"
"""Environment variable: seconds between two checks of an engine, in place of the fleet's."""

CONDUCTOR_PARTS = {
    "rlpipe.actors.engines.fleet:Fleet.publish": "push: all",
    "rlpipe.actors.engines.fleet:Fleet._mark": "push: mark engines",
    "rlpipe.actors.engines.fleet:Fleet._admit": "push: admit engines",
    "rlpipe.actors.engines.supervised:SupervisedEngine.check": "health: check",
    "rlpipe.actors.engines.supervised:SupervisedRouter.check": "health: router",
    "rlpipe.actors.engines.fleet:start_engines": "start: engines",
    "rlpipe.actors.trainer.group:TrainerGroup._call_each": "trainer: calls",
}
GENERATOR_PARTS = {
    "rlpipe.rollout.planner:Planner.part": "plan and draw",
    "rlpipe.rollout.planner:Planner.parts": "plan and draw",
    "rlpipe.rollout.rollout_rows:StoredRows.write": "shards",
    "rlpipe.rollout.rollout_rows:StoredRows.adopt": "shards: adopt",
    "rlpipe.rollout.client.request_pool:read_generations": "client: read answers",
    "rlpipe.rollout.client.request_pool:check_lengths_and_ids": "client: read answers",
    "rlpipe.rollout.client.request_pool:_body": "client: write requests",
}
RANK_PARTS = {
    "rlpipe.actors.trainer.rank:Rank._batch": "batch: choose rows",
    "rlpipe.batch.build:ChosenRows.batch": "batch: read rows",
    "rlpipe.actors.trainer.rank_actors:with_advantages": "batch: advantages",
    "rlpipe.actors.trainer.rank:Rank._plan_packing": "batch: packing plan",
    "rlpipe.actors.trainer.rank_actors:write_batch": "batch: write",
    "rlpipe.actors.trainer.rank_actors:batch_metrics": "batch: metrics",
    "rlpipe.batch.files:StoredBatch.__init__": "rank: open batch",
    "rlpipe.batch.files:StoredBatch.columns": "rank: decode samples",
    "rlpipe.actors.trainer.rank_actors:TrainerRank._metrics_of": "rank: metrics",
    "tools.bench.simulated_trainer:SimulatedRank.push": "push: trainer",
    "tools.bench.simulated_trainer:SimulatedRank.compare": "push: probe",
    "rlpipe.actors.trainer.rank:upload_share": "checkpoint: upload",
}


def counts(name: str) -> dict[str, Any]:
    """Return the name and the process of an actor, and what it has counted so far."""
    return {"name": name, "pid": os.getpid(), "parts": probes.totals()}


class SimulatedConductor(Conductor):
    """The conductor, with `SimulatedActors`."""

    def __init__(self, cluster: str, cwd: str) -> None:
        if interval_s := os.environ.get(CHECK_INTERVAL):
            fleet.CHECK_INTERVAL_S = float(interval_s)
        probes.install(CONDUCTOR_PARTS, elsewhere="conductor: rest")
        super().__init__(cluster, cwd, SimulatedActors)

    async def measured(self) -> dict[str, Any]:
        return counts("conductor")


class MeasuredGenerator(Generator):
    """The generator, with counts."""

    def __init__(self, cwd: str) -> None:
        probes.install(GENERATOR_PARTS, elsewhere="generator: rest")
        super().__init__(cwd)

    async def measured(self) -> dict[str, Any]:
        return counts("generator")


class Host:
    """Objects in one process. `call` is the call of one of them."""

    def __init__(self, name: str, members: dict[int, Any]) -> None:
        self._name = name
        self._members = members

    def measured(self) -> dict[str, Any]:
        return counts(self._name)

    def call(
        self, number: int, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        return getattr(self._members[number], method)(*arguments, **keywords)


class EngineHost(Host):
    """Engine actors for external servers."""

    def __init__(self, first: int, count: int, cwd: str) -> None:
        engines = range(first, first + count)
        super().__init__(f"engines-{first}", {n: EngineActor(n, cwd) for n in engines})


class RankHost(Host):
    """Ranks of the trainer."""

    def __init__(self, first: int, count: int, world_size: int, cwd: str) -> None:
        # Imports torch and Megatron, which the conductor does without.
        from tools.bench.simulated_trainer import SimulatedRank

        probes.install(RANK_PARTS, elsewhere="ranks: rest")
        ranks = range(first, first + count)
        members = {rank: SimulatedRank(rank, world_size, cwd) for rank in ranks}
        super().__init__(f"ranks-{first}", members)


class Member:
    """Handle of one object in a host, called like a handle of a Ray actor."""

    def __init__(self, host: Any, kind: str, number: int) -> None:
        self._host = host
        self._kind = kind
        self._number = number

    def __getattr__(self, method: str) -> Method:
        if method.startswith("__"):
            raise AttributeError(method)
        return Method(self._host, self._kind, self._number, method)


class Method:
    """A method of `Member`, whose calls are counted as `<kind>.<method>`.

    A host has threads for all calls, so options do not matter.
    """

    def __init__(self, host: Any, kind: str, number: int, name: str) -> None:
        self._host = host
        self._kind = kind
        self._number = number
        self._name = name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any, **keywords: Any) -> Any:
        probes.add(f"{probes.CALL}{self._kind}.{self._name}", calls=1)
        return self._host.call.remote(self._number, self._name, arguments, keywords)


class NoBundles(Placement):
    """No placement groups: simulated actors need no GPUs. Requests are those of GPUs."""

    def __init__(self, cluster: str, resources: ResourcesConfig) -> None:
        super().__init__(cluster, resources)
        self.on_gpus = True

    def reserve(self, *, engines: int, kept_engines: int = 0, kill_others: Any = None) -> None:
        """Do nothing."""


class SimulatedActors(named.NamedActors):
    """Find or start the actors of a cluster. Engines and ranks share processes."""

    def __init__(self, cluster: str, resources: ResourcesConfig, cwd: str) -> None:
        super().__init__(cluster, resources, cwd)
        self.placement = NoBundles(cluster, resources)

    def reserve(self, *, engines: int, kept_engines: int = 0) -> None:
        """Do nothing."""

    def trainer(self, rank: int) -> Any:
        world_size = self._resources.trainer_ranks
        first = rank - rank % RANKS_PER_HOST
        count = min(RANKS_PER_HOST, world_size - first)
        return self._member(RankHost, f"ranks-{first}", rank, (first, count, world_size))

    def engine(self, number: int, node: int) -> Any:
        first = number - number % ENGINES_PER_HOST
        count = min(ENGINES_PER_HOST, self._resources.num_engines - first)
        return self._member(EngineHost, f"engines-{first}", number, (first, count))

    def generator(self) -> Any:
        options = {"num_cpus": 0, "max_concurrency": named.GENERATOR_CALLS}
        return named.find_or_start(
            lambda: MeasuredGenerator,
            named.GENERATOR,
            self._namespace,
            (self._cwd,),
            lambda: options,
        )

    def _member(self, kind: type, name: str, number: int, arguments: tuple[int, ...]) -> Any:
        # Two threads for each object: a rank answers `status` while another call runs.
        options = {"num_cpus": 0, "max_concurrency": 2 * arguments[1] + 8}
        host = named.find_or_start(
            lambda: kind, name, self._namespace, (*arguments, self._cwd), lambda: options
        )
        return Member(host, name.partition("s-")[0], number)


def start_conductor(config: RunConfig) -> None:
    """Start the conductor of a run's simulated actors. Ray must be connected."""
    named.find_or_start(
        lambda: SimulatedConductor,
        named.CONDUCTOR,
        named.namespace(config.cluster),
        (config.cluster, str(Path.cwd())),
        lambda: {"num_cpus": 0, "max_concurrency": named.CONDUCTOR_CALLS},
    )


def measured_actors(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return name → `measured` of every counting actor of a run. Not for an event loop's thread."""
    cwd = str(Path.cwd())
    actors = SimulatedActors(config.cluster, config.resources, cwd).all_actors()
    actors.append(named.conductor(config.cluster, cwd, config.resources))
    calls = [actor.measured.remote() for actor in actors if hasattr(actor, "measured")]
    answers = asyncio.run(gather(calls, where="bench scale", deadline_s=CALL_TIMEOUT_S))
    return {answer["name"]: answer for answer in answers}
