"""Engines that are kept alive and at the published weights (rlpipe.actors.fleet).

Engines and router are real actors of small classes that behave as ours do; the trainer's part is a function that notes what it
sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlpipe.actors import fleet as module
from rlpipe.actors import kept_engine
from rlpipe.actors.fleet import Fleet, Receivers, Weights
from rlpipe.actors.kept_engine import KeptEngine
from rlpipe.actors.sharing import OF_ENGINES, Sharing
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import DeadlineExceeded, EngineUnavailable, Fenced, RlpipeError, SyncError
from rlpipe.lineage import Lineage
from rlpipe.types import Stage
from tests.actors.engines import FakeEngine, FakeRouter, find_or_start

pytestmark = pytest.mark.integration

ENGINES = 2
RESOURCES = SimpleNamespace(start_timeout_s=20.0, external_engines=())
CONFIG = SimpleNamespace(rollout_health_check_interval=1000.0, rollout_health_check_timeout=1.0)
SPEC: Any = SimpleNamespace(engine=CONFIG, resources=RESOURCES, logs="logs")


class Trainer:
    """Sends weights: to whom, and whether requests were held."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str], bool]] = []
        self.free, self.ahead = True, False
        self.fails_before: RlpipeError | None = None
        self.fails_after: Exception | None = None
        self.lost: set[str] = set()

    async def send(self, weights: Weights, to: Receivers, *, must: bool) -> dict[str, Any] | None:
        if self.fails_before is not None:
            raise self.fails_before
        if self.ahead and not must:
            return None
        urls = to.urls()
        await to.begin()
        if self.fails_after is not None:
            raise self.fails_after
        self.sent.append((weights.stamp, list(urls), to.idle))
        for url in set(urls) - self.lost:
            number = int(url.split("engine-")[1].split("/")[0])
            await find_or_start(FakeEngine, f"fleet-engine-{number}", number).become.remote(stamp=weights.stamp)
        unknown = {url: "lost on the way" for url in urls if url in self.lost}
        await to.end(unknown)
        return {"bytes": 7, "seconds": 0.1, "unknown": unknown}

    async def can_send(self, weights: Weights) -> bool:
        return self.free


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
async def fleet(local_ray: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Two engines that are up, without weights, looked at twenty times a second."""
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.05)
    engines = [KeptEngine(number, lambda n, _: find_or_start(FakeEngine, f"fleet-engine-{n}", n)) for number in range(ENGINES)]
    urls: list[str] = []

    async def on_router(url: str) -> None:
        urls.append(url)

    made = Fleet(
        engines,
        lambda: find_or_start(FakeRouter, "fleet-router"),
        SPEC,
        trainer.send,
        can_send=trainer.can_send,
        on_router=on_router,
    )
    await made.open()
    assert urls == ["http://router"]
    yield made
    await made.close()
    for actor in (made.router.actor, *(engine.actor for engine in made.engines)):
        ray.kill(actor)


def weights(version: int, name: str = "") -> Weights:
    digest = f"{name}state {version}"
    return Weights(digest, version, f"run@{version}@{digest}", Lineage(Stage.INIT, "init", digest, "init"))


async def until(reached: Any, timeout_s: float = 20.0) -> None:
    """Poll until `reached()` (awaited) is true."""
    async with asyncio.timeout(timeout_s):
        while not await reached():  # noqa: ASYNC110 - what is looked at is in other processes
            await asyncio.sleep(0.02)


def actor(handle: Any) -> Any:
    """Its methods are found when they are called."""
    return handle


async def routed(fleet: Fleet) -> list[str]:
    return await actor(fleet.router.actor).workers.remote() or []


def stamps(fleet: Fleet) -> list[str | None]:
    return [status["stamp"] for status in fleet.status()]


async def test_a_publication_reaches_every_engine_before_it_takes_requests(fleet: Fleet, trainer: Trainer):
    assert await routed(fleet) == []
    sent = await fleet.publish(weights(1), everyone=True)
    assert sent == {"engines": 2, "bytes": 7, "seconds": 0.1}
    assert stamps(fleet) == [weights(1).stamp] * 2
    assert await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]
    assert trainer.sent == [(weights(1).stamp, ["http://engine-0/1", "http://engine-1/1"], True)]


async def test_what_engines_say_of_themselves_is_told(fleet: Fleet):
    assert [status["facts"] for status in fleet.status()] == [{"starts": 1}] * 2


async def test_engines_that_hold_them_are_left_alone_and_later_ones_have_requests_held(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 0
    await fleet.publish(weights(2), everyone=True)
    assert [(stamp, idle) for stamp, _, idle in trainer.sent] == [(weights(1).stamp, True), (weights(2).stamp, False)]


async def test_an_engine_that_died_comes_back_with_the_published_weights(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.engines[1].actor).become.remote(alive=False)
    again = "http://engine-1/2"

    async def back() -> bool:
        return again in await routed(fleet)

    await until(back)
    assert trainer.sent[-1] == (weights(1).stamp, [again], True)
    assert stamps(fleet) == [weights(1).stamp] * 2


async def test_so_does_one_whose_actor_died(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    ray.kill(fleet.engines[0].actor)

    async def sent_again() -> bool:
        return len(trainer.sent) == 2 and fleet.engines[0].admitted

    await until(sent_again)
    assert stamps(fleet) == [weights(1).stamp] * 2


async def test_one_that_hangs_is_ended_and_replaced(fleet: Fleet, trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    await fleet.publish(weights(1), everyone=True)
    monkeypatch.setattr(CONFIG, "rollout_health_check_interval", 0.0)
    await actor(fleet.engines[0].actor).become.remote(generating=False)

    async def replaced() -> bool:
        return "http://engine-0/2" in await routed(fleet)

    await until(replaced)


async def test_no_weights_are_sent_while_the_trainer_is_at_work(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    trainer.free = False
    await actor(fleet.engines[0].actor).become.remote(alive=False)

    async def up_again() -> bool:
        return fleet.engines[0].url == "http://engine-0/2"

    await until(up_again)
    await asyncio.sleep(0.3)
    assert len(trainer.sent) == 1
    assert await routed(fleet) == ["http://engine-1/1"]
    trainer.free = True

    async def back() -> bool:
        return "http://engine-0/2" in await routed(fleet)

    await until(back)


async def test_an_engine_that_the_weights_did_not_reach_is_replaced_while_the_others_go_on(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    trainer.lost = {"http://engine-1/1"}
    await fleet.publish(weights(2), everyone=True)
    assert stamps(fleet)[0] == weights(2).stamp

    async def both() -> bool:
        return stamps(fleet) == [weights(2).stamp] * 2 and "http://engine-1/2" in await routed(fleet)

    await until(both)
    history = await actor(fleet.router.actor).history.remote()
    assert ("remove", ["http://engine-1/1"]) in history


async def test_an_engine_is_left_alone_by_a_push_that_fails_before_its_first_byte(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    trainer.fails_before = DeadlineExceeded("the trainer is busy", where="trainer.push")
    with pytest.raises(DeadlineExceeded):
        await fleet.publish(weights(2), everyone=True)
    assert stamps(fleet) == [weights(1).stamp] * 2
    assert await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]


async def test_engines_that_a_push_left_in_the_middle_get_no_more_requests_whatever_broke_it(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    trainer.fails_after = KeyError("weight_version")
    with pytest.raises(KeyError):
        await fleet.publish(weights(2), everyone=True)
    history = await actor(fleet.router.actor).history.remote()
    assert ("remove", ["http://engine-0/1", "http://engine-1/1"]) in history
    assert not set(stamps(fleet)) & {weights(1).stamp, weights(2).stamp}


async def test_first_weights_wait_for_a_trainer_that_is_ahead_unless_everyone_is_to_have_them(fleet: Fleet, trainer: Trainer):
    trainer.ahead, trainer.free = True, False
    assert (await fleet.publish(weights(1), everyone=False))["engines"] == 0
    assert await routed(fleet) == []
    assert (await fleet.publish(weights(2), everyone=True))["engines"] == 2


async def test_what_is_forgotten_is_given_to_nobody(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(60), everyone=True)
    fleet.forget()
    await asyncio.sleep(0.3)
    assert len(trainer.sent) == 1
    await fleet.publish(weights(0, "another run's "), everyone=False)
    assert stamps(fleet) == [weights(0, "another run's ").stamp] * 2


async def test_weights_that_reach_nobody_are_an_error(fleet: Fleet, trainer: Trainer):
    trainer.lost = {"http://engine-0/1", "http://engine-1/1"}
    with pytest.raises(SyncError, match="arrived nowhere"):
        await fleet.publish(weights(1), everyone=True)


async def test_between_two_pushes_the_older_weights_serve_and_whoever_comes_back_gets_the_newer(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    assert (await fleet.publish(weights(2), everyone=False))["engines"] == 0
    await asyncio.sleep(0.3)
    assert stamps(fleet) == [weights(1).stamp] * 2
    await actor(fleet.engines[0].actor).become.remote(alive=False)

    async def back() -> bool:
        return stamps(fleet)[0] == weights(2).stamp

    await until(back)
    assert stamps(fleet)[1] == weights(1).stamp
    await fleet.publish(weights(3), everyone=True)
    assert stamps(fleet) == [weights(3).stamp] * 2


async def test_older_weights_replace_newer_ones_only_when_everyone_gets_them(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(2), everyone=True)
    await fleet.publish(weights(1), everyone=False)
    assert fleet.weights == weights(2)
    await fleet.publish(weights(1, "other "), everyone=True)
    assert stamps(fleet) == [weights(1, "other ").stamp] * 2


async def test_an_engine_whose_actor_hangs_is_ended_and_comes_back_with_the_weights(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    await fleet.publish(weights(1), everyone=True)
    before = fleet.engines[0].actor
    monkeypatch.setattr(kept_engine, "STATUS_TIMEOUT_S", 0.5)
    await actor(before).become.remote(hangs_s=600.0)

    async def reached() -> bool:
        return fleet.engines[0].actor != before and stamps(fleet) == [weights(1).stamp] * 2

    await until(reached, 60.0)


async def test_a_router_that_runs_but_does_not_answer_is_ended_and_another_knows_the_engines(fleet: Fleet):
    await fleet.publish(weights(1), everyone=True)
    before = fleet.router.actor
    await actor(before).become.remote(silent=True)

    async def reached() -> bool:
        return fleet.router.actor != before and len(await routed(fleet)) == 2

    await until(reached, 60.0)


async def test_a_router_that_died_comes_back_and_knows_the_engines(fleet: Fleet):
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.router.actor).become.remote(alive=False)

    async def back() -> bool:
        return await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]

    await until(back)


async def test_engines_that_cannot_be_brought_back_are_named(fleet: Fleet):
    await fleet.publish(weights(1), everyone=True)
    assert fleet.trouble() is None
    for engine in fleet.engines:
        await actor(engine.actor).become.remote(alive=False, refuses=True)

    async def in_trouble() -> bool:
        return fleet.trouble() is not None

    await until(in_trouble)
    with pytest.raises(EngineUnavailable, match="no engine can be brought back"):
        await fleet.publish(weights(2), everyone=True)
    assert "engine 1: engine/1: it ended at once" in str(fleet.trouble())
    await actor(fleet.engines[0].actor).become.remote(refuses=False)

    async def out_of_trouble() -> bool:
        return fleet.trouble() is None

    await until(out_of_trouble)


async def test_an_engine_that_died_waits_until_the_trainer_has_given_up_the_gpus(fleet: Fleet):
    sharing = Sharing(ResourcesConfig(colocate=True))
    fleet.share(sharing)
    await sharing.enter("train", None, fleet)
    await actor(fleet.engines[0].actor).become.remote(alive=False)

    async def seen_dead() -> bool:
        return fleet.engines[0].url is None

    await until(seen_dead)
    await asyncio.sleep(0.3)
    assert fleet.engines[0].url is None
    await sharing.enter("start", None, fleet)

    async def up_again() -> bool:
        return fleet.engines[0].url == "http://engine-0/2"

    await until(up_again)

    async def gave_up() -> bool:
        return await actor(fleet.engines[0].actor).in_memory.remote() == []

    await until(gave_up)


async def test_engines_that_gave_up_their_weights_are_sent_them_again_and_one_that_does_not_answer_is_ended(
    fleet: Fleet, trainer: Trainer
):
    trainer.free = False
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.engines[1].actor).become.remote(stuck=True)
    await fleet.keep(())
    assert stamps(fleet) == [None, None]
    assert fleet.engines[1].url is None
    assert await actor(fleet.engines[0].actor).in_memory.remote() == []
    await fleet.take(OF_ENGINES)
    assert await actor(fleet.engines[0].actor).in_memory.remote() == sorted(OF_ENGINES)
    await fleet.publish(weights(1), everyone=True)
    assert trainer.sent[-1][1][0] == "http://engine-0/1"
    assert stamps(fleet)[0] == weights(1).stamp


async def test_weights_that_waited_behind_newer_ones_do_not_take_their_place(fleet: Fleet, trainer: Trainer):
    async with fleet._pushing:
        newer = asyncio.create_task(fleet.publish(weights(2), everyone=True))
        await asyncio.sleep(0.2)
        older = asyncio.create_task(fleet.publish(weights(1), everyone=False))
        await asyncio.sleep(0.2)
    await asyncio.gather(newer, older)
    assert fleet.weights == weights(2)
    assert stamps(fleet) == [weights(2).stamp] * 2


async def test_who_lost_the_engines_while_it_waited_publishes_nothing(fleet: Fleet, trainer: Trainer):
    refused: list[Exception] = []

    def check() -> None:
        if refused:
            raise refused[0]

    async with fleet._pushing:
        waiting = asyncio.create_task(fleet.publish(weights(1), everyone=True, check=check))
        await asyncio.sleep(0.2)
        refused.append(Fenced("another driver has them"))
    with pytest.raises(Fenced):
        await waiting
    assert fleet.weights is None
    assert trainer.sent == []
