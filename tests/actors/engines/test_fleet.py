"""Supervision of engines and router (rlpipe.actors.engines.fleet).

Engines and router are real actors of fake classes; the trainer records its pushes.
"""

from __future__ import annotations

import asyncio

import pytest
import ray

from rlpipe.actors.engines import supervised
from rlpipe.actors.engines.fleet import Fleet
from rlpipe.actors.sharing import ENGINE_PARTS, GpuSharing
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import EngineUnavailable
from tests.actors.engines.fake_fleet import CONFIG, Trainer, actor, routed, stamps, until, weights

pytestmark = pytest.mark.integration


async def test_the_status_has_the_facts_of_each_engine(fleet: Fleet):
    assert [status["facts"] for status in fleet.status()] == [{"starts": 1}] * 2


async def test_an_engine_that_died_is_restarted_with_the_published_weights(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.engines[1].actor).become.remote(alive=False)
    again = "http://engine-1/2"

    async def back() -> bool:
        return again in await routed(fleet)

    await until(back)
    assert trainer.sent[-1] == (weights(1).stamp, [again], True)
    assert stamps(fleet) == [weights(1).stamp] * 2


async def test_an_engine_with_a_dead_actor_is_restarted_with_the_published_weights(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    ray.kill(fleet.engines[0].actor)

    async def sent_again() -> bool:
        return len(trainer.sent) == 2 and fleet.engines[0].admitted

    await until(sent_again)
    assert stamps(fleet) == [weights(1).stamp] * 2


async def test_an_engine_that_hangs_is_ended_and_replaced(
    fleet: Fleet, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
):
    await fleet.publish(weights(1), everyone=True)
    monkeypatch.setattr(CONFIG, "rollout_health_check_interval", 0.0)
    await actor(fleet.engines[0].actor).become.remote(generating=False)

    async def replaced() -> bool:
        return "http://engine-0/2" in await routed(fleet)

    await until(replaced)


async def test_an_engine_with_a_hanging_actor_is_restarted_with_the_published_weights(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    await fleet.publish(weights(1), everyone=True)
    before = fleet.engines[0].actor
    monkeypatch.setattr(supervised, "STATUS_TIMEOUT_S", 0.5)
    await actor(before).become.remote(hangs_s=600.0)

    async def reached() -> bool:
        return fleet.engines[0].actor != before and stamps(fleet) == [weights(1).stamp] * 2

    await until(reached, 60.0)


async def test_a_router_that_does_not_answer_is_replaced_and_gets_the_engines(
    fleet: Fleet,
):
    await fleet.publish(weights(1), everyone=True)
    before = fleet.router.actor
    await actor(before).become.remote(silent=True)

    async def reached() -> bool:
        return fleet.router.actor != before and len(await routed(fleet)) == 2

    await until(reached, 60.0)


async def test_a_router_that_died_is_restarted_and_gets_the_engines(fleet: Fleet):
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.router.actor).become.remote(alive=False)

    async def back() -> bool:
        return await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]

    await until(back)


async def test_engines_that_cannot_be_restarted_are_reported(fleet: Fleet):
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


async def test_an_engine_that_died_restarts_only_after_the_trainer_has_released_the_gpus(
    fleet: Fleet,
):
    sharing = GpuSharing(ResourcesConfig(colocate=True))
    fleet.use_sharing(sharing)
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


async def test_engines_that_released_weights_get_them_again_and_a_failed_release_ends_the_engine(
    fleet: Fleet, trainer: Trainer
):
    trainer.free = False
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.engines[1].actor).become.remote(stuck=True)
    await fleet.release_memory(())
    assert stamps(fleet) == [None, None]
    assert fleet.engines[1].url is None
    assert await actor(fleet.engines[0].actor).in_memory.remote() == []
    await fleet.resume_memory(ENGINE_PARTS)
    assert await actor(fleet.engines[0].actor).in_memory.remote() == sorted(ENGINE_PARTS)
    await fleet.publish(weights(1), everyone=True)
    assert trainer.sent[-1][1][0] == "http://engine-0/1"
    assert stamps(fleet)[0] == weights(1).stamp
