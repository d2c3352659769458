"""Weights that are published: who is given them, when, and who takes requests
(rlpipe.actors.engines.fleet)."""

from __future__ import annotations

import asyncio

import pytest

from rlpipe.actors.engines import supervised
from rlpipe.actors.engines.fleet import NOT_CONFIRMED, Fleet
from rlpipe.errors import DeadlineExceeded, Fenced, SyncError
from tests.actors.engines.fake_fleet import Trainer, actor, routed, stamps, until, weights

pytestmark = pytest.mark.integration


async def test_a_publication_reaches_every_engine_before_it_takes_requests(
    fleet: Fleet, trainer: Trainer
):
    assert await routed(fleet) == []
    sent = await fleet.publish(weights(1), everyone=True)
    assert sent == {"engines": 2, "bytes": 7, "seconds": 0.1}
    assert stamps(fleet) == [weights(1).stamp] * 2
    assert await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]
    assert trainer.sent == [(weights(1).stamp, ["http://engine-0/1", "http://engine-1/1"], True)]


async def test_engines_that_hold_them_are_left_alone_and_later_ones_have_requests_held(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 0
    await fleet.publish(weights(2), everyone=True)
    assert [(stamp, idle) for stamp, _, idle in trainer.sent] == [
        (weights(1).stamp, True),
        (weights(2).stamp, False),
    ]


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


async def test_an_engine_that_the_weights_did_not_reach_is_replaced_while_the_others_go_on(
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


async def test_an_engine_is_left_alone_by_a_push_that_fails_before_its_first_byte(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    trainer.fails_before = DeadlineExceeded("the trainer is busy", where="trainer.push")
    with pytest.raises(DeadlineExceeded):
        await fleet.publish(weights(2), everyone=True)
    assert stamps(fleet) == [weights(1).stamp] * 2
    assert await routed(fleet) == ["http://engine-0/1", "http://engine-1/1"]


async def test_engines_that_a_push_left_in_the_middle_get_no_more_requests_whatever_broke_it(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(1), everyone=True)
    trainer.fails_after = KeyError("weight_version")
    with pytest.raises(KeyError):
        await fleet.publish(weights(2), everyone=True)
    history = await actor(fleet.router.actor).history.remote()
    assert ("remove", ["http://engine-0/1", "http://engine-1/1"]) in history
    assert not set(stamps(fleet)) & {weights(1).stamp, weights(2).stamp}


async def test_first_weights_wait_for_a_trainer_that_is_ahead_unless_everyone_is_to_have_them(
    fleet: Fleet, trainer: Trainer
):
    trainer.ahead = True
    trainer.free = False
    assert (await fleet.publish(weights(1), everyone=False))["engines"] == 0
    assert await routed(fleet) == []
    assert (await fleet.publish(weights(2), everyone=True))["engines"] == 2


async def test_what_is_forgotten_is_given_to_nobody(fleet: Fleet, trainer: Trainer):
    await fleet.publish(weights(60), everyone=True)
    fleet.forget_weights()
    await asyncio.sleep(0.3)
    assert len(trainer.sent) == 1
    await fleet.publish(weights(0, "another run's "), everyone=False)
    assert stamps(fleet) == [weights(0, "another run's ").stamp] * 2


async def test_weights_that_reach_nobody_are_an_error(fleet: Fleet, trainer: Trainer):
    trainer.lost = {"http://engine-0/1", "http://engine-1/1"}
    with pytest.raises(SyncError, match="arrived nowhere"):
        await fleet.publish(weights(1), everyone=True)


async def test_between_two_pushes_the_older_weights_serve_and_whoever_comes_back_gets_the_newer(
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


async def test_older_weights_replace_newer_ones_only_when_everyone_gets_them(
    fleet: Fleet, trainer: Trainer
):
    await fleet.publish(weights(2), everyone=True)
    await fleet.publish(weights(1), everyone=False)
    assert fleet.weights == weights(2)
    await fleet.publish(weights(1, "other "), everyone=True)
    assert stamps(fleet) == [weights(1, "other ").stamp] * 2


async def test_weights_that_waited_behind_newer_ones_do_not_take_their_place(
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


async def test_who_lost_the_engines_while_it_waited_publishes_nothing(
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
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that does not answer within a second hangs."""
    monkeypatch.setattr(supervised, "CALL_TIMEOUT_S", 1.0)


async def test_one_engine_whose_actor_hangs_keeps_no_other_from_the_weights(
    fleet: Fleet, trainer: Trainer, hasty: None
):
    await fleet.publish(weights(1), everyone=True)
    await actor(fleet.engines[1].actor).become.remote(marks_s=600.0)
    assert (await fleet.publish(weights(2), everyone=True))["engines"] == 1
    assert trainer.sent[-1][1] == ["http://engine-0/1"]
    assert (stamps(fleet)[0], await routed(fleet)) == (weights(2).stamp, ["http://engine-0/1"])


async def test_so_it_is_if_it_hangs_once_it_has_them(fleet: Fleet, trainer: Trainer, hasty: None):
    async def hangs() -> None:
        await actor(fleet.engines[1].actor).become.remote(marks_s=600.0)

    trainer.meanwhile = hangs
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 1
    assert len(trainer.sent[-1][1]) == 2
    assert (stamps(fleet), await routed(fleet)) == ([weights(1).stamp, None], ["http://engine-0/1"])


async def test_if_they_all_hang_then_the_error_says_so_of_each(
    fleet: Fleet, trainer: Trainer, hasty: None
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


async def test_if_no_actor_answers_it_is_said(fleet: Fleet, trainer: Trainer, hasty: None):
    for engine in fleet.engines:
        await actor(engine.actor).become.remote(marks_s=600.0)
    with pytest.raises(SyncError, match="no engine answers"):
        await fleet.publish(weights(1), everyone=True)


async def test_an_engine_that_is_started_again_during_a_push_has_not_been_reached_by_it(
    fleet: Fleet, trainer: Trainer
):
    again = "http://engine-1/2"

    async def up_again() -> bool:
        return fleet.engines[1].url == again

    async def dies() -> None:
        trainer.meanwhile = None
        await actor(fleet.engines[1].actor).become.remote(alive=False)
        await until(up_again)

    trainer.meanwhile = dies
    assert (await fleet.publish(weights(1), everyone=True))["engines"] == 1

    async def reached() -> bool:
        return again in await routed(fleet)

    await until(reached)
    assert trainer.sent[-1] == (weights(1).stamp, [again], True)
