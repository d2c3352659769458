"""Engines that join and leave a run (rlpipe.actors.engines.elastic)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rlpipe.actors.engines import elastic
from rlpipe.actors.engines.elastic import FleetSize, requested_engines
from rlpipe.actors.engines.engine import EngineActor
from rlpipe.actors.engines.fleet import Fleet
from rlpipe.config.model import ResourcesConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import ResourceError, StoreError
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.store.engine_targets import EngineTargets
from rlpipe.store.objects.files import Files
from tests.actors.engines.fake_engines import FakeEngine, find_or_start
from tests.actors.engines.fake_fleet import Trainer, actor, routed, stamps, until, weights
from tests.live_engine import VOCAB_SIZE, live_engine

pytestmark = pytest.mark.integration

CONFIGURED = 2


class Actors:
    """Actors of fake engines. `room`: number of engines that the Ray cluster has room for."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.reserved: set[int] = set()
        self.placement = self
        self.broken = False

    def engine(self, number: int, node: int) -> Any:
        return find_or_start(FakeEngine, f"fleet-engine-{number}", number)

    def reserve_engine(self, number: int) -> bool:
        if self.broken:
            raise ResourceError("Ray does not answer")
        self.reserved.add(number)
        return number < self.room

    def release_engine(self, number: int) -> None:
        self.reserved.discard(number)


def config(**resources: Any) -> Any:
    values = {"rollout_num_gpus": CONFIGURED, **resources}
    return SimpleNamespace(
        run="run", needs_engines=True, resources=ResourcesConfig.model_validate(values)
    )


@pytest.fixture
def targets(tmp_path: Path) -> EngineTargets:
    return EngineTargets(Files(tmp_path / "store"))


@pytest.fixture
def actors() -> Actors:
    return Actors(room=4)


@pytest.fixture
def changes() -> list[int]:
    return []


@pytest.fixture
def size(fleet: Fleet, actors: Any, changes: list[int], tmp_path: Path) -> FleetSize:
    async def on_change() -> None:
        changes.append(len(fleet.engines))

    return FleetSize(fleet, actors, config(), str(tmp_path / "store"), on_change)


def numbers(fleet: Fleet) -> list[int]:
    return [engine.number for engine in fleet.engines]


def waiting(size: FleetSize) -> list[int]:
    return [status["number"] for status in size.status() if status["waiting"]]


async def test_engines_that_join_get_the_weights_before_requests(
    size: FleetSize, fleet: Fleet, trainer: Trainer, targets: EngineTargets, changes: list[int]
):
    published = weights(3)
    await fleet.publish(published, everyone=True)
    await size.adjust()
    assert numbers(fleet) == [0, 1] and changes == []
    targets.request("run", 4, configured=CONFIGURED)
    await size.adjust()
    assert numbers(fleet) == [0, 1, 2, 3] and changes == [4]

    async def all_sample() -> bool:
        return len(await routed(fleet)) == 4

    await until(all_sample)
    assert stamps(fleet) == [published.stamp] * 4
    joined = [url for _, urls, _ in trainer.sent[1:] for url in urls]
    assert sorted(joined) == ["http://engine-2/1", "http://engine-3/1"]
    await size.adjust()
    assert changes == [4]


async def test_engines_that_leave_hand_their_requests_back_before_they_end(
    size: FleetSize, fleet: Fleet, targets: EngineTargets, actors: Actors, changes: list[int]
):
    await fleet.publish(weights(3), everyone=True)
    leaving = actor(fleet.engines[1].actor)
    router = actor(fleet.router.actor)
    targets.request("run", 1, configured=CONFIGURED)
    await leaving.become.remote(log_to="fleet-router")
    await size.adjust()
    assert numbers(fleet) == [0] and changes == [1] and actors.reserved == set()
    url = "http://engine-1/1"
    assert (await router.history.remote())[-2:] == [("remove", [url]), ("hand back", [url])]
    with pytest.raises(RayActorError):
        await leaving.status.remote()
    assert await routed(fleet) == ["http://engine-0/1"]


async def test_an_engine_without_room_waits_and_joins_later(
    size: FleetSize, fleet: Fleet, targets: EngineTargets, actors: Actors, changes: list[int]
):
    actors.room = 3
    targets.request("run", 5, configured=CONFIGURED)
    await size.adjust()
    assert numbers(fleet) == [0, 1, 2] and changes == [3]
    assert waiting(size) == [3, 4]
    actors.room = 5
    await size.adjust()
    assert numbers(fleet) == [0, 1, 2, 3, 4] and waiting(size) == []
    targets.request("run", 2, configured=CONFIGURED)
    await size.adjust()
    assert numbers(fleet) == [0, 1] and actors.reserved == set()


async def test_an_engine_that_waits_gives_up_its_place_when_it_is_not_wanted_any_more(
    size: FleetSize, fleet: Fleet, targets: EngineTargets, actors: Actors
):
    actors.room = 2
    targets.request("run", 3, configured=CONFIGURED)
    await size.adjust()
    assert actors.reserved == {2}
    targets.request("run", 2, configured=CONFIGURED)
    await size.adjust()
    assert actors.reserved == set() and waiting(size) == [] and numbers(fleet) == [0, 1]


async def test_an_engine_whose_node_vanished_waits_until_ray_has_placed_it_again(
    size: FleetSize, fleet: Fleet, actors: Actors
):
    await size.adjust()
    assert waiting(size) == []
    actors.room = 1
    await fleet.engines[1].stop()
    await size.adjust()
    assert waiting(size) == [1] and numbers(fleet) == [0, 1]
    actors.room = 2
    await size.adjust()
    assert waiting(size) == []


async def test_requests_are_followed_although_the_store_or_ray_fails_for_a_while(
    size: FleetSize,
    fleet: Fleet,
    targets: EngineTargets,
    actors: Actors,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(elastic, "INTERVAL_S", 0.01)
    following = size._targets.following
    failures = iter([StoreError("S3 request failed"), StoreError("S3 request failed")])

    def fails_first(*arguments: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return following(*arguments)

    monkeypatch.setattr(size._targets, "following", fails_first)
    actors.broken = True
    targets.request("run", 3, configured=CONFIGURED)
    size.begin()

    async def waits() -> bool:
        return waiting(size) == [2]

    async def joined() -> bool:
        return numbers(fleet) == [0, 1, 2]

    await until(waits)
    actors.broken = False
    await until(joined)
    await size.close()


async def test_leaving_waits_for_a_push(
    size: FleetSize, fleet: Fleet, trainer: Trainer, targets: EngineTargets
):
    seen: list[list[int]] = []

    async def leave_meanwhile() -> None:
        adjusting.append(asyncio.create_task(size.adjust()))
        await asyncio.sleep(0.2)
        seen.append(numbers(fleet))

    adjusting: list[asyncio.Task[None]] = []
    trainer.meanwhile = leave_meanwhile
    targets.request("run", 1, configured=CONFIGURED)
    report = await fleet.publish(weights(1), everyone=True)
    await adjusting[0]
    assert report["engines"] == 2 and seen == [[0, 1]] and numbers(fleet) == [0]


def test_a_start_has_the_requested_engines_of_a_run(targets: EngineTargets, tmp_path: Path):
    root = str(tmp_path / "store")
    assert requested_engines(config(), root) == 2
    targets.request("run", 5, configured=CONFIGURED)
    assert requested_engines(config(), root) == 5
    assert requested_engines(config(rollout_num_gpus=3), root) == 3
    assert requested_engines(config(colocate=True), root) == 2
    assert requested_engines(config(external_engines=["a:1"]), root) == 1
    without = SimpleNamespace(**{**vars(config()), "needs_engines": False})
    assert requested_engines(without, root) == 0  # type: ignore[arg-type]


async def test_an_engine_that_leaves_returns_the_tokens_of_its_requests(
    request: pytest.FixtureRequest, tmp_path: Path
):
    live = live_engine(request.config)
    leaving = EngineActor(0, str(Path.cwd()))
    leaving._server = live.server
    sampling = {"max_new_tokens": 240, "ignore_eos": True}
    async with (
        Engine(live.server.url) as engine,
        GenerateClient(live.router.url, vocab_size=VOCAB_SIZE, deadline_s=30) as client,
    ):
        # On any machine one of these waits ends in the middle of the sampling.
        for wait_s in (0.3, 0.1, 0.2, 0.05, 0.15, 0.02):
            stop = asyncio.Event()
            running = asyncio.create_task(client.generate([5, 6], sampling, n=2, stop=stop))
            await asyncio.sleep(wait_s)
            stop.set()  # otherwise the client continues the response
            await asyncio.to_thread(leaving.hand_back)
            found = await running
            await engine.continue_()
            if all(each.finish_reason == "abort" and each.response_ids for each in found):
                break
        assert all(0 < len(each.response_ids) < 240 for each in found)
