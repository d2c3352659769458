"""Calling real actors: answers in order, deadlines that name who is late, errors that keep their
kind (rlpipe.actors.ray.calls)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlpipe.actors.ray import calls
from rlpipe.actors.ray.calls import ActorLost, call, call_or_kill, gather, kill_actors
from rlpipe.errors import ConfigError, DeadlineExceeded, RlpipeError

pytestmark = pytest.mark.integration


class Echo:
    """Answers, fails, dawdles or dies, as it is told."""

    def say(self, what: Any, after_s: float = 0.0) -> Any:
        time.sleep(after_s)
        return what

    def fail(self, error: Exception) -> None:
        raise error

    def divide_by_zero(self) -> float:
        return 1 / 0

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os._exit(1)


def start(name: str | None = None) -> Any:
    options: dict[str, Any] = {"num_cpus": 0}
    if name:
        options |= {"name": name, "lifetime": "detached", "get_if_exists": True}
    remote: Any = ray.remote(Echo)
    return remote.options(**options).remote()


@pytest.fixture(scope="module")
def pair(local_ray: str) -> Iterator[list[Any]]:
    """Two actors that nobody kills."""
    actors = [start(), start()]
    yield actors
    for actor in actors:
        ray.kill(actor)


async def test_answers_are_in_the_order_of_the_calls_not_of_arrival(pair):
    refs = [pair[0].say.remote("slow", 0.5), pair[1].say.remote("quick")]
    assert await gather(refs, where="echo", deadline_s=60) == ["slow", "quick"]
    assert await gather([], where="echo", deadline_s=60) == []


async def test_one_call_answers_its_result(pair):
    assert await call(pair[0].say.remote({"held": None}), where="echo", deadline_s=60) == {
        "held": None
    }


async def test_an_error_of_ours_comes_through_as_it_was_raised(pair):
    raised = ConfigError(
        "not a size",
        where="train.parallel",
        found=3,
        expected="a divisor of 8",
        do="choose another",
    )
    with pytest.raises(ConfigError) as caught:
        await call(pair[0].fail.remote(raised), where="trainer.setup", deadline_s=60)
    assert type(caught.value) is ConfigError
    assert str(caught.value) == f"{raised}\n  (raised in trainer.setup)"
    assert caught.value.__notes__ == ["raised in trainer.setup"]


async def test_an_error_of_another_kind_is_named_with_its_place_and_the_end_of_its_trace(pair):
    with pytest.raises(RlpipeError) as caught:
        await call(pair[0].divide_by_zero.remote(), where="trainer.train", deadline_s=60)
    assert type(caught.value) is RlpipeError
    assert caught.value.problem == "ZeroDivisionError: division by zero"
    assert caught.value.where == "trainer.train"
    assert "in divide_by_zero" in str(caught.value.found)


async def test_who_does_not_answer_in_time_is_named(pair):
    start_s = time.monotonic()
    refs = [pair[0].say.remote("here"), pair[1].say.remote("late", 3.0)]
    with pytest.raises(DeadlineExceeded) as caught:
        await gather(refs, where="trainer.status", deadline_s=0.5)
    assert time.monotonic() - start_s < 2.5
    assert caught.value.where == "trainer.status"
    assert caught.value.found == "no answer of call 1"
    assert caught.value.expected == "within 0.5 s"
    assert await call(pair[1].say.remote("again"), where="echo", deadline_s=60) == "again", (
        "the actor is not harmed"
    )


async def test_a_deadline_inside_the_actor_is_not_taken_for_ours(pair):
    inside = DeadlineExceeded("the router is silent", where="engine/0")
    with pytest.raises(DeadlineExceeded, match="engine/0: the router is silent"):
        await call(pair[0].fail.remote(inside), where="generator.rollout", deadline_s=60)
    with pytest.raises(RlpipeError, match="TimeoutError: the socket") as caught:
        await call(
            pair[0].fail.remote(TimeoutError("the socket")),
            where="generator.rollout",
            deadline_s=60,
        )
    assert not isinstance(caught.value, DeadlineExceeded)


async def test_the_first_failure_ends_the_wait_for_the_others(pair):
    start_s = time.monotonic()
    with pytest.raises(ConfigError):
        await gather(
            [pair[0].say.remote("late", 3.0), pair[1].fail.remote(ConfigError("no"))],
            where="echo",
            deadline_s=60,
        )
    assert time.monotonic() - start_s < 2.5


async def test_a_dead_actor_is_lost_by_name_during_a_call_and_after(local_ray):
    actor = start()
    for ref in (actor.die.remote(), actor.say.remote("still there?")):
        with pytest.raises(ActorLost) as caught:
            await call(ref, where="engine.status", deadline_s=60)
        assert caught.value.where == "engine.status"
        assert caught.value.found


async def test_who_is_late_and_hangs_is_ended_and_who_is_only_late_is_not(
    pair, local_ray, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(DeadlineExceeded):
        await call_or_kill(
            pair[0], pair[0].say.remote("late", 1.5), where="conductor.open", deadline_s=0.2
        )
    assert await call(pair[0].say.remote("again"), where="echo", deadline_s=60) == "again"
    monkeypatch.setattr(calls, "READY_TIMEOUT_S", 0.2)
    hung = start("one-that-hangs")
    await call(hung.pid.remote(), where="echo", deadline_s=60)
    with pytest.raises(DeadlineExceeded):
        await call_or_kill(
            hung, hung.say.remote("never", 600.0), where="conductor.open", deadline_s=0.2
        )
    with pytest.raises(ValueError, match="one-that-hangs"):
        ray.get_actor("one-that-hangs", namespace=local_ray)


async def test_the_name_of_an_actor_that_was_ended_is_free_at_once(local_ray):
    actor = start("one-of-a-name")
    before = await call(actor.pid.remote(), where="echo", deadline_s=60)
    assert before == await call(start("one-of-a-name").pid.remote(), where="echo", deadline_s=60)
    actor.say.remote("busy", 600.0)
    kill_actors([actor])
    again = start("one-of-a-name")
    after = await call(again.pid.remote(), where="echo", deadline_s=60)
    assert after != before
    kill_actors([again, again])
    kill_actors([again])
    with pytest.raises(ValueError, match="one-of-a-name"):
        ray.get_actor("one-of-a-name", namespace=local_ray)
