"""Calls of real actors: results in order, deadlines that name the late call, errors with their type
(rlpipe.actors.ray.calls)."""

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
    """An actor that returns, raises, waits or dies on request."""

    def say(self, value: Any, after_s: float = 0.0) -> Any:
        time.sleep(after_s)
        return value

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
    """Two actors that live during all tests."""
    actors = [start(), start()]
    yield actors
    for actor in actors:
        ray.kill(actor)


async def test_results_are_in_the_order_of_the_calls(pair):
    refs = [pair[0].say.remote("slow", 0.5), pair[1].say.remote("quick")]
    assert await gather(refs, where="echo", deadline_s=60) == ["slow", "quick"]
    assert await gather([], where="echo", deadline_s=60) == []


async def test_call_returns_the_result(pair):
    assert await call(pair[0].say.remote({"held": None}), where="echo", deadline_s=60) == {
        "held": None
    }


async def test_an_rlpipe_error_is_raised_unchanged(pair):
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


async def test_another_error_is_raised_as_rlpipe_error_with_the_end_of_its_trace(pair):
    with pytest.raises(RlpipeError) as caught:
        await call(pair[0].divide_by_zero.remote(), where="trainer.train", deadline_s=60)
    assert type(caught.value) is RlpipeError
    assert caught.value.problem == "ZeroDivisionError: division by zero"
    assert caught.value.where == "trainer.train"
    assert "in divide_by_zero" in str(caught.value.found)


async def test_a_late_call_is_named(pair):
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


async def test_a_deadline_raised_inside_the_actor_keeps_its_place(pair):
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


async def test_a_dead_actor_is_reported_as_lost_during_a_call_and_afterwards(local_ray):
    actor = start()
    for ref in (actor.die.remote(), actor.say.remote("still there?")):
        with pytest.raises(ActorLost) as caught:
            await call(ref, where="engine.status", deadline_s=60)
        assert caught.value.where == "engine.status"
        assert caught.value.found


async def test_a_late_actor_is_killed_only_if_it_hangs(
    pair, local_ray, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(DeadlineExceeded):
        await call_or_kill(
            pair[0], pair[0].say.remote("late", 1.5), where="conductor.open", deadline_s=0.2
        )
    assert await call(pair[0].say.remote("again"), where="echo", deadline_s=60) == "again"
    monkeypatch.setattr(calls, "READY_TIMEOUT_S", 0.2)
    hung = start("hanging-actor")
    await call(hung.pid.remote(), where="echo", deadline_s=60)
    with pytest.raises(DeadlineExceeded):
        await call_or_kill(
            hung, hung.say.remote("never", 600.0), where="conductor.open", deadline_s=0.2
        )
    with pytest.raises(ValueError, match="hanging-actor"):
        ray.get_actor("hanging-actor", namespace=local_ray)


async def test_the_name_of_a_killed_actor_is_free_at_once(local_ray):
    actor = start("named-actor")
    before = await call(actor.pid.remote(), where="echo", deadline_s=60)
    assert before == await call(start("named-actor").pid.remote(), where="echo", deadline_s=60)
    actor.say.remote("busy", 600.0)
    kill_actors([actor])
    again = start("named-actor")
    after = await call(again.pid.remote(), where="echo", deadline_s=60)
    assert after != before
    kill_actors([again, again])
    kill_actors([again])
    with pytest.raises(ValueError, match="named-actor"):
        ray.get_actor("named-actor", namespace=local_ray)
