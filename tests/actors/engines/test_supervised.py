"""An engine that spans nodes starts and ends as a whole (rlpipe.actors.engines.supervised)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rlpipe.actors.engines import fleet as fleet_module
from rlpipe.actors.engines.engine import FILES, EngineSpec
from rlpipe.actors.engines.fleet import Fleet, Receivers, Weights
from rlpipe.actors.engines.supervised import SupervisedEngine
from rlpipe.actors.ray.calls import kill_actors
from rlpipe.actors.ray.local_ray import address
from rlpipe.actors.ray.named import NamedActors
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import EngineUnavailable
from rlpipe.sync.transports.base import Push as PushOfRank
from rlpipe.sync.transports.base import TransportSetup
from rlpipe.sync.transports.distributed import DistributedTransport
from rlpipe.sync.transports.tensor import TensorTransport
from tests.actors.engines.fake_engines import FakeEngine
from tests.actors.engines.through_files import Push, weights
from tests.live_engine import START_S, log_probs, make_model
from tests.soak.spot.nodes import RayNode

pytestmark = pytest.mark.integration

SPANS = {
    "rollout_num_gpus": 2,
    "rollout_num_gpus_per_engine": 2,
    "num_gpus_per_node": 1,
    "start_timeout_s": START_S,
}
SPEC: Any = SimpleNamespace(name="a spec")
NODES = 2


def fake(number: int, node: int) -> Any:
    make: Any = ray.remote
    identity = {
        "name": f"supervised-{number}-{node}",
        "lifetime": "detached",
        "get_if_exists": True,
    }
    return (
        make(concurrency_groups={FILES: 1})(FakeEngine)
        .options(num_cpus=0, **identity)
        .remote(number, node)
    )


@pytest.fixture(scope="module")
def fakes(local_ray: str) -> Iterator[Any]:
    """Find or start fake actors, which end with the last test."""
    yield fake
    kill_actors([fake(0, node) for node in range(NODES)])


@pytest.fixture
async def engine(fakes: Any) -> SupervisedEngine:
    """An engine of fake actors that is up."""
    engine = SupervisedEngine(0, fakes, nodes=NODES)
    for actor in engine.actors:
        await methods(actor).become.remote(alive=False, starts=0, met=None, brought=[])
    await engine.start(SPEC, 60.0)
    assert await engine.check()
    return engine


def methods(actor: Any) -> Any:
    """Return the actor as Any: its methods are looked up when they are called."""
    return actor


async def starts(engine: SupervisedEngine) -> list[tuple[int, str]]:
    """Return (number of starts, rendezvous) of each server."""
    states = [
        (await actor.status.remote(), await actor.rendezvous.remote(SPEC))
        for actor in map(methods, engine.actors)
    ]
    return [(status["facts"]["starts"], met) for status, met in states]


async def test_an_engine_that_is_up_is_used_as_it_is(engine: SupervisedEngine):
    again = SupervisedEngine(0, fake, nodes=NODES)
    await again.start(SPEC, 60.0)
    assert await again.check()
    assert (again.url, await starts(again)) == (engine.url, [(1, "here:0")] * NODES)


@pytest.mark.parametrize("node", range(NODES))
async def test_if_one_server_dies_all_are_ended_and_start_at_another_rendezvous(
    engine: SupervisedEngine, node: int
):
    engine.admitted = True
    await methods(engine.actors[node]).become.remote(alive=False)
    assert not await engine.check()
    assert (engine.url, engine.admitted) == (None, False)
    assert [(await actor.status.remote())["alive"] for actor in map(methods, engine.actors)] == [
        False
    ] * NODES
    await engine.start(SPEC, 60.0)
    assert (engine.url, await starts(engine)) == ("http://engine-0/2", [(2, "here:1")] * NODES)


async def test_if_one_actor_dies_all_servers_are_started_again(engine: SupervisedEngine):
    await asyncio.to_thread(kill_actors, [engine.actors[1]])
    assert not await engine.check()
    await engine.start(SPEC, 60.0)
    assert await engine.check()
    assert await starts(engine) == [(2, "here:1"), (1, "here:1")]


async def test_a_status_from_before_a_stop_does_not_make_the_engine_alive(engine: SupervisedEngine):
    await methods(engine.actors[0]).become.remote(hangs_s=0.5)
    check = asyncio.create_task(engine.check())
    await asyncio.sleep(0.1)
    await engine.stop()
    assert engine.url is None
    await methods(engine.actors[0]).become.remote(hangs_s=0.0)
    assert not await check
    assert engine.url is None


async def test_servers_with_different_rendezvous_are_all_started_again(
    engine: SupervisedEngine,
):
    await methods(engine.actors[1]).become.remote(met="elsewhere")
    await engine.start(SPEC, 60.0)
    assert await starts(engine) == [(2, "here:1")] * NODES


async def test_if_one_server_fails_to_start_its_error_is_raised_without_waiting_for_the_others(
    engine: SupervisedEngine,
):
    first, second = map(methods, engine.actors)
    await engine.stop()
    await first.become.remote(waits_s=600.0)
    await second.become.remote(refuses=True)
    with pytest.raises(EngineUnavailable, match="it ended at once"):
        await asyncio.wait_for(engine.start(SPEC, 600.0), 60)
    await second.become.remote(refuses=False)
    assert not await engine.check()
    await engine.start(SPEC, 60.0)
    assert await engine.check()


async def test_weights_are_fetched_to_each_node(engine: SupervisedEngine):
    assert await engine.fetch_weights("root", "run@1@digest", "folder", 60.0) == "folder"
    assert [await actor.was_brought.remote() for actor in map(methods, engine.actors)] == [
        ["run@1@digest"]
    ] * NODES


@pytest.fixture
def spread(local_ray: str, ray_home: Path) -> Iterator[NamedActors]:
    """Bundles on two nodes: one CPU on the existing Ray node, one on a node that joins for this
    test."""
    resources = ResourcesConfig.model_validate(SPANS)
    actors = NamedActors("spans", resources, str(Path.cwd()))
    actors.reserve(engines=0)  # a rank's bundle, so that no engine gets it
    filled = placement_group([{"CPU": ray.cluster_resources()["CPU"] - 2}])
    assert filled.wait(60)
    node = RayNode(ray_home, {}, 1, address())
    try:
        actors.reserve(engines=1)
        yield actors
    finally:
        kill_actors(actors.all_actors())
        actors.placement.remove()
        remove_placement_group(filled)
        node.end()


def _setup(model_dir: Path) -> TransportSetup:
    sync = SyncConfig(update_weight_buffer_size=1 << 20, timeout_s=120.0)
    return TransportSetup(model_dir=model_dir, sync=sync, engine_tensor_parallel_size=2)


class Pushes:
    """Send the weights of a model by broadcast, as a trainer does."""

    def __init__(self, model_dir: Path, model: Any) -> None:
        self.transport = DistributedTransport(_setup(model_dir))
        self.model = model

    async def __call__(self, weights: Weights, to: Receivers, *, force: bool) -> dict[str, Any]:
        urls = await to.begin_push(to.urls())
        report = await asyncio.to_thread(
            self.transport.send, self.model.state_dict().items(), PushOfRank(weights.stamp, urls)
        )
        await to.end_push(report.unknown)
        return {"bytes": report.size_bytes, "seconds": report.seconds, "unknown": report.unknown}


async def always(_: Any) -> bool:
    return True


async def until(reached: Any) -> None:
    async with asyncio.timeout(START_S):
        while not reached():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.1)


@pytest.fixture
async def spanning(
    spread: NamedActors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Fleet, Pushes]]:
    """One engine on two nodes behind a router, and a sender of the weights of another model."""
    monkeypatch.setattr(fleet_module, "CHECK_INTERVAL_S", 0.5)
    make_model(tmp_path / "model", seed=0)
    resources = ResourcesConfig.model_validate(SPANS)
    spec = EngineSpec(
        str(tmp_path / "model"),
        EngineConfig(),
        resources,
        "float32",
        1,
        False,
        str(tmp_path / "logs"),
    )
    sender = Pushes(tmp_path / "model", make_model(tmp_path / "other", seed=51))
    engines = SupervisedEngine.all_of(resources, spread.engine, [0])
    fleet = Fleet(engines, spread.router, spec, sender, can_send=always, on_router=always)  # type: ignore[arg-type]
    await fleet.open()
    yield fleet, sender
    await fleet.close()
    sender.transport.close()


async def scores(url: str, model: Any) -> bool:
    async with Engine(url) as engine:
        ((*found,),) = await engine.score([[5, 9, 20, 31]])
    return bool(np.allclose(found, log_probs(model, [5], [9, 20, 31]), atol=1e-4))


async def pids(engine: SupervisedEngine) -> list[int]:
    return [(await actor.status.remote())["pid"] for actor in map(methods, engine.actors)]


def computing(pid: int) -> psutil.Process:
    """Return the process below this one that holds the weights."""
    below = psutil.Process(pid).children(recursive=True)
    return next(
        process
        for process in below
        if "sglang::sched" in " ".join([process.name(), *process.cmdline()])
    )


@pytest.mark.long
async def test_an_engine_on_two_nodes_gets_weights_over_each_transport_and_restarts_as_a_whole(
    spanning, spread, tmp_path
):
    fleet, sender = spanning
    (engine,) = fleet.engines
    group = spread.placement._groups["engine-0"]
    assert len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 2
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 1
    url = str(engine.url)
    assert await scores(url, sender.model)

    before = await pids(engine)
    computing(before[1]).kill()
    await until(lambda: engine.url is None and not psutil.pid_exists(before[0]))
    await until(lambda: engine.admitted)
    assert engine.url != url and not set(await pids(engine)) & set(before)
    assert engine.stamp == weights(1).stamp
    url = str(engine.url)
    assert await scores(url, sender.model)

    await fleet.close()  # it would push the published weights again
    live: Any = SimpleNamespace(
        model=sender.model, model_dir=tmp_path / "model", server=SimpleNamespace(url=url)
    )
    push = Push(live, tmp_path, transport="delta")
    push.kept = [engine]
    for version in (2, 3):
        push.step()
        assert (await push(version) or {})["unknown"] == {}
        assert await push.scores()
    over_http = TensorTransport(_setup(tmp_path / "model"))
    push.step()
    await asyncio.to_thread(
        over_http.send, sender.model.state_dict().items(), PushOfRank(weights(4).stamp, [url])
    )
    assert await push.scores()
