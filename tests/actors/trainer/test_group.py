"""All ranks as one: who holds what, and what is left after one of them dies
(rlpipe.actors.trainer.group).

The ranks are real actors of a small class that behaves as `TrainerRank` does towards its group,
without a model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from rlpipe.actors.ray.calls import ActorLost, call
from rlpipe.actors.trainer import group as trainer_group
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.errors import DeadlineExceeded, TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.types import Stage
from tests.actors.trainer.fake_ranks import start

pytestmark = pytest.mark.integration

RANKS = 2
SPEC: Any = SimpleNamespace(model_dir="m", deterministic=False)
"""Equal specs are the same engine; what is in one is the ranks' business."""


@pytest.fixture
def group(local_ray: str) -> Iterator[TrainerGroup]:
    """Two ranks that are found by name, as a run's are."""
    made = TrainerGroup(start, RANKS, start_timeout_s=120.0)
    yield made
    made.kill()


def to(state: str, *replay: str) -> Lineage:
    return Lineage(Stage.CHECKPOINT, "saved", state, "init", replay)


async def ask(group: TrainerGroup, what: str) -> list[Any]:
    return [status[what] for status in await group.call("status", deadline_s=60)]


async def test_a_call_goes_to_every_rank_and_answers_come_in_order_of_rank(group: TrainerGroup):
    assert await group.call("train", key="a", deadline_s=60) == ["a on 0", "a on 1"]
    assert await ask(group, "rank") == [0, 1]


async def test_setup_meets_at_the_address_of_rank_0(group: TrainerGroup):
    assert await ask(group, "ready") == [False, False]
    await group.setup(SPEC)
    assert await ask(group, "ready") == [True, True]
    assert await group.call("log", deadline_s=60) == [["setup m 127.0.0.1:29500"]] * 2


async def test_a_state_is_held_when_every_rank_holds_it_cleanly(group: TrainerGroup):
    assert await group.held() != "a"
    await group.setup(SPEC)
    await group.call("train", key="a", deadline_s=60)
    assert await group.held() == "a"
    assert await group.held() != "b"
    clean = {"held": "a", "dirty": False, "ready": True}
    for spoilt in ({"held": "b"}, {"dirty": True}, {"ready": False}):
        await group.call("become", rank=1, **spoilt, deadline_s=60)
        assert await group.held() != "a", spoilt
        await group.call("become", rank=1, **clean, deadline_s=60)
        assert await group.held() == "a"


async def test_ensure_does_nothing_when_the_state_is_held(group: TrainerGroup):
    await group.setup(SPEC)
    await group.call("train", key="b", deadline_s=60)
    assert await group.ensure(to("a", "b"), deadline_s=60) is None
    assert await group.call("log", deadline_s=60) == [["setup m 127.0.0.1:29500"]] * 2


async def test_ensure_restores_living_ranks_without_starting_them_again(group: TrainerGroup):
    await group.setup(SPEC)
    await group.call("train", key="b", deadline_s=60)
    pids = await ask(group, "pid")
    assert await group.ensure(to("a", "c", "d"), deadline_s=60) == {
        "replayed": 2,
        "mismatch": None,
        "rank": 0,
    }
    assert await group.held() == "d"
    assert await ask(group, "pid") == pids


async def test_the_first_state_is_made_in_ranks_that_have_trained_nothing(group: TrainerGroup):
    first = Lineage(Stage.INIT, "init", "init", "init", ("a",))
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    await group.initialise("init", None, deadline_s=60)
    await group.ensure(first, deadline_s=60)
    assert await group.held() == "a" and await ask(group, "pid") == pids
    await group.call("train", key="b", deadline_s=60)
    await group.ensure(first, deadline_s=60)
    assert await group.held() == "a" and not set(pids) & set(await ask(group, "pid"))


async def test_after_the_death_of_one_rank_all_are_started_again_and_restored(group: TrainerGroup):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    start_s = time.monotonic()
    with pytest.raises(ActorLost) as caught:
        await group.call("train", key="b", dies=1, deadline_s=300)
    assert caught.value.where == "trainer.train"
    assert await group.held() != "b"
    assert await group.ensure(to("a"), deadline_s=60) == {
        "replayed": 0,
        "mismatch": None,
        "rank": 0,
    }
    assert time.monotonic() - start_s < 60, (
        "nobody waits for the rank that is left in the collective"
    )
    assert await group.held() == "a"
    assert not set(pids) & set(await ask(group, "pid"))
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_half_trained_rank_is_not_restored_but_started_again_with_its_group(
    group: TrainerGroup,
):
    await group.setup(SPEC)
    await group.call("become", rank=0, dirty=True, deadline_s=60)
    pids = await ask(group, "pid")
    await group.ensure(to("a"), deadline_s=60)
    assert await group.held() == "a"
    assert not set(pids) & set(await ask(group, "pid"))


async def test_setup_starts_all_ranks_again_when_some_are_blank(group: TrainerGroup):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    await group.setup(SPEC)
    assert await ask(group, "pid") == pids
    await group.call("become", rank=1, ready=False, deadline_s=60)
    await group.setup(SPEC)
    assert await ask(group, "ready") == [True, True]
    assert not set(pids) & set(await ask(group, "pid"))


async def test_ranks_that_were_set_up_with_the_other_kind_of_arithmetic_are_started_again(
    group: TrainerGroup,
):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    other: Any = SimpleNamespace(**{**vars(SPEC), "deterministic": True})
    await group.setup(other)
    assert await ask(group, "deterministic") == [True, True]
    assert not set(pids) & set(await ask(group, "pid"))


async def test_an_error_of_one_rank_is_the_error_of_the_call_while_the_others_still_wait(
    group: TrainerGroup,
):
    with pytest.raises(TrainerError, match="trainer/1: no such batch"):
        await group.call("train", key="b", raises=1, deadline_s=300)


async def test_an_error_that_nobody_raised_on_purpose_is_the_trainer_s(group: TrainerGroup):
    with pytest.raises(TrainerError, match=r"trainer\.divide_by_zero: ZeroDivisionError"):
        await group.call("divide_by_zero", deadline_s=60)


async def test_a_full_gpu_comes_with_what_to_do(group: TrainerGroup):
    with pytest.raises(
        TrainerError, match=r"OutOfMemoryError: CUDA out of memory(.|\n)*train\.max_tokens_per_gpu"
    ):
        await group.call("fill_the_gpu", deadline_s=60)


async def test_ranks_in_which_something_unexpected_failed_are_started_again_and_those_that_refused_are_not(
    group: TrainerGroup,
):
    await group.setup(SPEC)
    await group.call("train", key="a", deadline_s=60)
    pids = await ask(group, "pid")
    with pytest.raises(TrainerError, match="into a trained engine"):
        await group.call("initialise", key="b", start_from=None, deadline_s=60)
    await group.setup(SPEC)
    assert await group.held() == "a" and await ask(group, "pid") == pids
    with pytest.raises(TrainerError, match="ZeroDivisionError"):
        await group.call("divide_by_zero", deadline_s=60)
    assert await group.held() != "a" and not await group.is_up(SPEC)
    await group.setup(SPEC)
    assert not set(pids) & set(await ask(group, "pid"))
    await group.ensure(to("a"), deadline_s=60)
    assert await group.held() == "a"


async def test_first_weights_go_into_ranks_that_have_trained_nothing(group: TrainerGroup):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    assert await group.initialise("a", None, deadline_s=60) == {"state_digest": "state of a"}
    assert await group.held() == "a"
    assert await ask(group, "pid") == pids
    assert await group.initialise("b", "checkpoint", deadline_s=60) == {
        "state_digest": "state of b"
    }
    assert await group.held() == "b"
    assert not set(pids) & set(await ask(group, "pid"))
    assert (
        await group.call("log", deadline_s=60)
        == [["setup m 127.0.0.1:29500", "initialise from checkpoint"]] * 2
    )


async def test_a_group_that_hangs_says_which_call_and_which_ranks(group: TrainerGroup):
    await ask(group, "rank")
    with pytest.raises(DeadlineExceeded) as caught:
        await group.call("train", key="b", dies=9, deadline_s=0.5)
    assert caught.value.where == "trainer.train"
    assert caught.value.found == "no answer of call 0, 1"


async def test_a_second_driver_finds_the_ranks_that_are_there(group: TrainerGroup):
    await group.setup(SPEC)
    await group.call("train", key="a", deadline_s=60)
    other = TrainerGroup(
        lambda rank: ray.get_actor(f"trainer-{rank}"), RANKS, start_timeout_s=120.0
    )
    assert await other.held() == "a"
    group.kill()
    assert await other.held() != "a"
    with pytest.raises(ActorLost):
        await call(other.ranks[0].status.remote(), where="trainer.status", deadline_s=60)


def in_calls(*ranks: tuple[str | None, dict[str, int], str | None]) -> list[dict[str, Any]]:
    """Statuses of ranks that are in these calls, have begun so many of each, and have failed in the
    last one or not."""
    return [{"busy": busy, "calls": calls, "failed": failed} for busy, calls, failed in ranks]


@pytest.mark.parametrize(
    ("ranks", "apart"),
    [
        (
            [
                ("train", {"train": 1}, None),
                ("train", {"train": 1}, None),
                ("train", {"train": 1}, None),
            ],
            False,
        ),
        ([("push", {"push": 2}, None), ("push", {"push": 2}, None), (None, {}, None)], False),
        ([("push", {"push": 2}, None), (None, {"push": 1}, None), (None, {}, None)], True),
        ([("push", {"push": 2}, None), (None, {"push": 2}, None), (None, {}, None)], False),
        ([("push", {"push": 2}, None), (None, {"push": 2}, "push"), (None, {}, None)], True),
        ([("train", {"train": 1}, None), ("train", {"train": 1}, None), (None, {}, None)], True),
        (
            [
                ("advantage", {"advantage": 3}, None),
                (None, {"advantage": 3}, None),
                (None, {"advantage": 3}, None),
            ],
            False,
        ),
        ([(None, {"train": 1}, None), (None, {"train": 1}, None), (None, {}, None)], False),
    ],
    ids=[
        "all in one call",
        "a push is none of the critic's",
        "a rank of the policy has not got the push",
        "the first speaks with engines after the others have sent",
        "a rank has left the push with an error",
        "the critic has not got the optimizer steps",
        "the first asks a teacher after the others have scored",
        "nobody works",
    ],
)
def test_ranks_are_apart_when_one_waits_for_another_that_will_not_come(
    ranks: list[Any], apart: bool
):
    group = TrainerGroup(lambda rank: rank, 2, critic_ranks=1, start_timeout_s=1.0)  # type: ignore[arg-type]
    assert group._have_diverged(in_calls(*ranks)) is apart


@pytest.fixture
def with_critic(local_ray: str) -> Iterator[TrainerGroup]:
    """One rank of the policy, and one that is the critic's own."""
    made = TrainerGroup(start, 1, critic_ranks=1, start_timeout_s=120.0)
    yield made
    made.kill()


async def test_a_critic_s_own_rank_is_one_of_the_group_but_in_a_world_of_its_own_and_not_for_engines(
    with_critic: TrainerGroup,
):
    await with_critic.setup(SPEC)
    policy = "setup m 127.0.0.1:29500 and 127.0.0.1:29500"
    critic = "setup m 127.0.0.1:29501 and 127.0.0.1:29500"
    assert await with_critic.call("log", deadline_s=60) == [[policy], [critic]]
    assert await with_critic.call("remembers", deadline_s=60) == ["weights of 0"]
    assert await with_critic.call("train", key="a", deadline_s=60) == ["a on 0", "a on 1"]
    pids = await ask(with_critic, "pid")
    with pytest.raises(ActorLost):
        await with_critic.call("train", key="b", dies=1, deadline_s=300)
    assert await with_critic.held() != "a"
    await with_critic.ensure(to("a"), deadline_s=60)
    assert await with_critic.held() == "a"
    assert not set(pids) & set(await ask(with_critic, "pid")), "both were started again"


async def test_a_push_whose_caller_died_is_waited_for_although_the_critic_has_no_part_in_it(
    with_critic: TrainerGroup, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_group, "MAX_DIVERGED_S", 0.2)
    await with_critic.setup(SPEC)
    await with_critic.call("train", key="a", deadline_s=60)
    pids = await ask(with_critic, "pid")
    rank: Any = with_critic.ranks[0]
    pushing = rank.push.remote(alone=0, seconds=1.0)
    while (await rank.status.options(concurrency_group=trainer_group.STATUS).remote())[
        "busy"
    ] != "push":
        pass
    await with_critic.setup(SPEC)
    assert await with_critic.held() == "a"
    assert await ask(with_critic, "pid") == pids
    await pushing
