"""All ranks as one: the held state, failures and restarts (rlpipe.actors.trainer.group).

The ranks are real actors of a fake class without a model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import ray

from rlpipe.actors.ray.calls import ActorLost, call
from rlpipe.actors.trainer import group as trainer_group
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.errors import DeadlineExceeded, TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.types import Stage
from tests.actors.trainer.fake_ranks import renew, start

pytestmark = pytest.mark.integration

RANKS = 2
SPEC: Any = SimpleNamespace(model_dir="m", deterministic=False)
"""The group only compares specs; ranks read their contents."""


@pytest.fixture
def group(local_ray: str) -> Iterator[TrainerGroup]:
    """Two ranks that are found by name, as the ranks of a run."""
    group = TrainerGroup(start, RANKS, start_timeout_s=120.0)
    yield group
    for rank in group.ranks:
        renew(rank)


def lineage_to(state: str, *replay: str) -> Lineage:
    return Lineage(Stage.CHECKPOINT, "saved", state, "init", replay)


async def ask(group: TrainerGroup, what: str) -> list[Any]:
    return [status[what] for status in await group.call("status", deadline_s=60)]


async def test_a_call_goes_to_every_rank_and_returns_answers_in_order_of_rank(group: TrainerGroup):
    assert await group.call("train", key="a", deadline_s=60) == ["a on 0", "a on 1"]
    assert await ask(group, "rank") == [0, 1]


async def test_a_call_with_one_answer_goes_to_rank_0_alone(group: TrainerGroup):
    assert await group.call("uploading", deadline_s=60) == ["prefix of 0"]


async def test_setup_uses_the_address_of_rank_0_as_rendezvous(group: TrainerGroup):
    assert await ask(group, "ready") == [False, False]
    await group.setup(SPEC)
    assert await ask(group, "ready") == [True, True]
    assert await group.call("log", deadline_s=60) == [["setup m 127.0.0.1:29500"]] * 2


async def test_a_state_is_held_if_every_rank_holds_it_and_is_not_dirty(group: TrainerGroup):
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


async def test_ensure_does_nothing_if_the_state_is_held(group: TrainerGroup):
    await group.setup(SPEC)
    await group.call("train", key="b", deadline_s=60)
    assert await group.ensure(lineage_to("a", "b"), deadline_s=60) is None
    assert await group.call("log", deadline_s=60) == [["setup m 127.0.0.1:29500"]] * 2


async def test_ensure_restores_living_ranks_without_a_restart(group: TrainerGroup):
    await group.setup(SPEC)
    await group.call("train", key="b", deadline_s=60)
    pids = await ask(group, "pid")
    assert await group.ensure(lineage_to("a", "c", "d"), deadline_s=60) == {
        "replayed": 2,
        "mismatch": None,
        "rank": 0,
    }
    assert await group.held() == "d"
    assert await ask(group, "pid") == pids


async def test_a_first_state_is_restored_only_in_ranks_that_have_trained_nothing(
    group: TrainerGroup,
):
    first = Lineage(Stage.INIT, "init", "init", "init", ("a",))
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    await group.initialise("init", None, deadline_s=60)
    await group.ensure(first, deadline_s=60)
    assert await group.held() == "a" and await ask(group, "pid") == pids
    await group.call("train", key="b", deadline_s=60)
    await group.ensure(first, deadline_s=60)
    assert await group.held() == "a" and not set(pids) & set(await ask(group, "pid"))


async def test_after_the_death_of_one_rank_all_ranks_are_restarted_and_restored(
    group: TrainerGroup,
):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    start_s = time.monotonic()
    with pytest.raises(ActorLost) as caught:
        await group.call("train", key="b", dies=1, deadline_s=300)
    assert caught.value.where == "trainer.train"
    assert await group.held() != "b"
    assert await group.ensure(lineage_to("a"), deadline_s=60) == {
        "replayed": 0,
        "mismatch": None,
        "rank": 0,
    }
    assert time.monotonic() - start_s < 60, (
        "the rank that waits in the collective is killed at once"
    )
    assert await group.held() == "a"
    assert not set(pids) & set(await ask(group, "pid"))
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_half_trained_rank_is_restarted_with_its_group(
    group: TrainerGroup,
):
    await group.setup(SPEC)
    await group.call("become", rank=0, dirty=True, deadline_s=60)
    pids = await ask(group, "pid")
    await group.ensure(lineage_to("a"), deadline_s=60)
    assert await group.held() == "a"
    assert not set(pids) & set(await ask(group, "pid"))


async def test_setup_restarts_all_ranks_if_some_are_blank(group: TrainerGroup):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    await group.setup(SPEC)
    assert await ask(group, "pid") == pids
    await group.call("become", rank=1, ready=False, deadline_s=60)
    await group.setup(SPEC)
    assert await ask(group, "ready") == [True, True]
    assert not set(pids) & set(await ask(group, "pid"))


async def test_setup_restarts_ranks_if_the_deterministic_setting_changes(
    group: TrainerGroup,
):
    await group.setup(SPEC)
    pids = await ask(group, "pid")
    other: Any = SimpleNamespace(**{**vars(SPEC), "deterministic": True})
    await group.setup(other)
    assert await ask(group, "deterministic") == [True, True]
    assert not set(pids) & set(await ask(group, "pid"))


async def test_an_error_of_one_rank_is_raised_while_the_other_ranks_still_wait(
    group: TrainerGroup,
):
    with pytest.raises(TrainerError, match="trainer/1: no such batch"):
        await group.call("train", key="b", raises=1, deadline_s=300)


async def test_an_unexpected_error_is_raised_as_trainer_error(group: TrainerGroup):
    with pytest.raises(TrainerError, match=r"trainer\.divide_by_zero: ZeroDivisionError"):
        await group.call("divide_by_zero", deadline_s=60)


async def test_the_error_of_a_full_gpu_has_advice(group: TrainerGroup):
    with pytest.raises(
        TrainerError, match=r"OutOfMemoryError: CUDA out of memory(.|\n)*train\.max_tokens_per_gpu"
    ):
        await group.call("fill_the_gpu", deadline_s=60)


async def test_ranks_restart_after_an_unexpected_error_and_not_after_a_refusal(
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
    await group.ensure(lineage_to("a"), deadline_s=60)
    assert await group.held() == "a"


async def test_initialise_restarts_ranks_that_have_trained(group: TrainerGroup):
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


async def test_the_error_of_a_group_that_hangs_names_the_call_and_the_ranks(group: TrainerGroup):
    await ask(group, "rank")
    with pytest.raises(DeadlineExceeded) as caught:
        await group.call("train", key="b", dies=9, deadline_s=0.5)
    assert caught.value.where == "trainer.train"
    assert caught.value.found == "no answer of call 0, 1"


async def test_a_second_driver_finds_the_running_ranks(group: TrainerGroup):
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


def statuses_of(*ranks: tuple[str | None, dict[str, int], str | None]) -> list[dict[str, Any]]:
    """Return statuses with the running call, the number of calls begun, and the failed call."""
    return [{"busy": busy, "calls": calls, "failed": failed} for busy, calls, failed in ranks]


@pytest.mark.parametrize(
    ("ranks", "diverged"),
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
        "a push does not concern the critic",
        "a rank of the policy has not received the push",
        "rank 0 talks to engines after the others have sent",
        "a rank has left the push with an error",
        "the critic has not received the optimizer steps",
        "rank 0 calls a teacher after the others have scored",
        "no rank works",
    ],
)
def test_ranks_have_diverged_if_one_waits_for_another_that_will_not_join(
    ranks: list[Any], diverged: bool
):
    group = TrainerGroup(lambda rank: rank, 2, critic_ranks=1, start_timeout_s=1.0)  # type: ignore[arg-type]
    assert group._have_diverged(statuses_of(*ranks)) is diverged


@pytest.fixture
def with_critic(local_ray: str) -> Iterator[TrainerGroup]:
    """One rank of the policy, and one rank of the critic."""
    group = TrainerGroup(start, 1, critic_ranks=1, start_timeout_s=120.0)
    yield group
    for rank in group.ranks:
        renew(rank)


async def test_a_critic_rank_is_part_of_the_group_in_its_own_world_and_gets_no_calls_about_engines(
    with_critic: TrainerGroup,
):
    await with_critic.setup(SPEC)
    policy = "setup m 127.0.0.1:29500 and 127.0.0.1:29500"
    critic = "setup m 127.0.0.1:29501 and 127.0.0.1:29500"
    assert await with_critic.call("log", deadline_s=60) == [[policy], [critic]]
    assert await with_critic.call("remembers", deadline_s=60) == ["weights of 0"]
    assert await with_critic.call("uploading", deadline_s=60) == ["prefix of 0"]
    assert await with_critic.call("train", key="a", deadline_s=60) == ["a on 0", "a on 1"]
    pids = await ask(with_critic, "pid")
    with pytest.raises(ActorLost):
        await with_critic.call("train", key="b", dies=1, deadline_s=300)
    assert await with_critic.held() != "a"
    await with_critic.ensure(lineage_to("a"), deadline_s=60)
    assert await with_critic.held() == "a"
    assert not set(pids) & set(await ask(with_critic, "pid")), "both ranks were restarted"


async def test_setup_waits_for_a_push_of_a_dead_caller_also_with_a_critic(
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


async def test_a_rank_that_has_never_answered_has_the_time_of_a_start(
    monkeypatch: pytest.MonkeyPatch,
):
    """Imports of a new rank took longer than a minute on a busy machine, and it was killed."""
    deadlines: list[float] = []

    async def answer(refs: list[Any], *, where: str, deadline_s: float) -> list[Any]:
        deadlines.append(deadline_s)
        return [{"deterministic": None, "ready": True, "dirty": False, "held": "a"} for _ in refs]

    monkeypatch.setattr(trainer_group, "gather", answer)
    status = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None))
    group = TrainerGroup(
        lambda _: cast("Any", SimpleNamespace(status=status)), 1, start_timeout_s=9
    )
    await group.held()
    await group.held()
    assert deadlines == [9, trainer_group.STATUS_TIMEOUT_S]
