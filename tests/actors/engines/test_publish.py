"""Pushes of published weights, and the admission of engines (rlpipe.actors.engines.fleet)."""

from __future__ import annotations

import asyncio

import pytest

from rlpipe.actors.engines import supervised
from rlpipe.actors.engines.fleet import NOT_CONFIRMED, Fleet
from rlpipe.errors import DeadlineExceeded, Fenced, SyncError
from tests.actors.engines.fake_fleet import Trainer, actor, routed, stamps, until, weights

pytestmark = pytest.mark.integration


async def test_every_engine_gets_the_weights_before_it_is_admitted(fleet: Fleet, trainer: Trainer):
    assert await routed(fleet) == []
    sent = await fleet.publish(weights(1), everyone=True)
    assert sent == {"engines": 2, "bytes": 7, "seconds": 0.1}
    assert stamps(fleet) == [weights(1).stamp] * 2
    assert await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]
    assert trainer.sent == [(weights(1).stamp, ["http://engine-0/1", "http://engine-1/1"], True)]


async def test_engines_with_the_weights_get_no_push_and_a_later_push_holds_requests(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 0
    await fleet.publish(weights(2), everyone=True)
    assert [(stamp, idle) for stamp, _, idle in trainer.sent] == [
        (weights(1).stamp, True),
        (weights(2).stamp, False),
    ]


async def test_no_weights_are_sent_to_a_restarted_engine_while_the_trainer_works(
    fleet: Fleet, trainer: Trainer
):
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


async def test_an_engine_that_did_not_get_the_weights_is_replaced_while_the_others_continue(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    trainer.lost = {"http://engine-1/1"}
    await fleet.publish(weights(2), everyone=True)
    assert stamps(fleet)[0] == weights(2).stamp

    async def both() -> bool:
        return stamps(fleet) == [weights(2).stamp] * 2 and "http://engine-1/2" in await routed(
            fleet
        )

    await until(both)
    history = await actor(fleet.router.actor).history.remote()
    assert ("remove", ["http://engine-1/1"]) in history


async def test_a_push_that_fails_before_its_first_byte_changes_no_engine(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    trainer.fails_before = DeadlineExceeded("the trainer is busy", where="trainer.push")
    with pytest.raises(DeadlineExceeded):
        await fleet.publish(weights(2), everyone=True)
    assert stamps(fleet) == [weights(1).stamp] * 2
    assert await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]


async def test_engines_of_an_interrupted_push_get_no_more_requests(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(1), everyone=True)
    trainer.fails_after = KeyError("weight_version")
    with pytest.raises(KeyError):
        await fleet.publish(weights(2), everyone=True)
    history = await actor(fleet.router.actor).history.remote()
    assert ("remove", ["http://engine-0/1", "http://engine-1/1"]) in history
    assert not set(stamps(fleet)) & {weights(1).stamp, weights(2).stamp}


async def test_first_weights_wait_for_a_trainer_with_other_weights_unless_they_are_for_everyone(
    fleet: Fleet, trainer: Trainer
):
    trainer.ahead = True
    trainer.free = False
    assert (await fleet.publish(weights(1), everyone=False))["engines"] == 0
    assert await routed(fleet) == []
    assert (await fleet.publish(weights(2), everyone=True))["engines"] == 2


async def test_forgotten_weights_are_not_sent(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(60), everyone=True)
    fleet.forget_weights()
    await asyncio.sleep(0.3)
    assert len(trainer.sent) == 1
    await fleet.publish(weights(0, "another run's "), everyone=False)
    assert stamps(fleet) == [weights(0, "another run's ").stamp] * 2


async def test_a_push_that_no_engine_gets_is_an_error(fleet: Fleet, trainer: Trainer):
    trainer.lost = {"http://engine-0/1", "http://engine-1/1"}
    with pytest.raises(SyncError, match="arrived nowhere"):
        await fleet.publish(weights(1), everyone=True)


async def test_until_the_next_push_older_weights_serve_and_a_restarted_engine_gets_the_newer(
    fleet: Fleet, trainer: Trainer
):
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


async def test_older_weights_replace_newer_ones_only_in_a_push_for_everyone(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(2), everyone=True)
    await fleet.publish(weights(1), everyone=False)
    assert fleet.weights == weights(2)
    await fleet.publish(weights(1, "other "), everyone=True)
    assert stamps(fleet) == [weights(1, "other ").stamp] * 2


async def test_older_weights_that_waited_for_a_push_do_not_replace_newer_ones(
    fleet: Fleet, trainer: Trainer
):
    async with fleet._pushing:
        newer = asyncio.create_task(fleet.publish(weights(2), everyone=True))
        await asyncio.sleep(0.2)
        older = asyncio.create_task(fleet.publish(weights(1), everyone=False))
        await asyncio.sleep(0.2)
    await asyncio.gather(newer, older)
    assert fleet.weights == weights(2)
    assert stamps(fleet) == [weights(2).stamp] * 2


async def test_a_driver_that_was_replaced_during_its_wait_publishes_nothing(
    fleet: Fleet, trainer: Trainer
):
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


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat an actor that does not answer within a second as hanging."""
    monkeypatch.setattr(supervised, "CALL_TIMEOUT_S", 1.0)


async def test_a_hanging_actor_does_not_keep_other_engines_from_the_weights(
    fleet: Fleet, trainer: Trainer, short_deadlines: None
):
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.engines[1].actor).become.remote(marks_s=600.0)
    assert (await fleet.publish(weights(2), everyone=True))["engines"] == 1
    assert trainer.sent[-1][1] == ["http://engine-0/1"]
    assert (stamps(fleet)[0], await routed(fleet)) == (weights(2).stamp, ["http://engine-0/1"])


async def test_an_actor_that_hangs_after_the_push_does_not_keep_other_engines_from_the_weights(
    fleet: Fleet, trainer: Trainer, short_deadlines: None
):
    async def hangs() -> None:
        await actor(fleet.engines[1].actor).become.remote(marks_s=600.0)

    trainer.meanwhile = hangs
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 1
    assert len(trainer.sent[-1][1]) == 2
    assert (stamps(fleet), await routed(fleet)) == ([weights(1).stamp, None], ["http://engine-0/1"])


async def test_if_all_actors_hang_after_the_push_the_error_names_each_engine(
    fleet: Fleet, trainer: Trainer, short_deadlines: None
):
    async def hang() -> None:
        for engine in fleet.engines:
            await actor(engine.actor).become.remote(marks_s=600.0)

    trainer.meanwhile = hang
    with pytest.raises(SyncError, match="arrived nowhere") as caught:
        await fleet.publish(weights(1), everyone=True)
    assert caught.value.found == dict.fromkeys(
        ["http://engine-0/1", "http://engine-1/1"], NOT_CONFIRMED
    )


async def test_a_push_without_an_answering_actor_is_an_error(
    fleet: Fleet, trainer: Trainer, short_deadlines: None
):
    for engine in fleet.engines:
        await actor(engine.actor).become.remote(marks_s=600.0)
    with pytest.raises(SyncError, match="no engine answers"):
        await fleet.publish(weights(1), everyone=True)


async def test_an_engine_that_restarts_during_a_push_gets_another_push(
    fleet: Fleet, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
):
    again = "http://engine-1/2"
    check = fleet.engines[1].check
    checked = asyncio.Event()

    async def noted_check() -> bool:
        found = await check()
        checked.set()
        return found

    async def up_again() -> bool:
        return fleet.engines[1].url == again

    async def dies() -> None:
        trainer.meanwhile = None
        checked.clear()
        await checked.wait()  # its supervisor has seen it alive during the push
        await actor(fleet.engines[1].actor).become.remote(alive=False)
        await until(up_again)

    monkeypatch.setattr(fleet.engines[1], "check", noted_check)
    trainer.meanwhile = dies
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 1

    async def reached() -> bool:
        return again in await routed(fleet)

    await until(reached)
    assert trainer.sent[-1] == (weights(1).stamp, [again], True)
