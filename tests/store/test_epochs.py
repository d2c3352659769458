"""Epochs and leases: one driver at a time, and a replaced driver is refused before it commits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from rlpipe.errors import Fenced, ObjectMissing
from rlpipe.store import epochs, holders
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epoch, Epochs, superseded_renewals
from rlpipe.store.holders import Holder
from rlpipe.store.objects.files import Files
from tests.processes import pool
from tests.store.drivers import Driver, a_commit, refused
from tests.store.lineage import Run, collect

RUN = "branches/run/epochs"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move this machine's clock by a number of seconds."""
    moved = [0.0]

    def move(seconds: float) -> None:
        moved[0] += seconds

    monkeypatch.setattr(epochs, "clock", lambda: datetime.now(UTC) + timedelta(seconds=moved[0]))
    return move


@pytest.mark.integration
def test_an_active_driver_keeps_a_second_one_out_and_is_named(files: Files):
    with Driver(files) as first:
        assert first.answer() == 1
        where = files.url(f"{RUN}/00000001.json")
        who = f"process {first.process.pid} on {os.uname().nodename} since 20"
        with refused(
            "is running in another process",
            where,
            who,
            " counts as dead at ",
            " UTC",
            "--takeover",
            "--run NAME",
        ):
            Epochs(files).acquire("run")
        with Driver(files) as second, refused(who):
            second.answer()
        assert first.do("check") == first.do("renew") == first.do("release") == 1
        assert Epochs(files).acquire("run").number == 2
        assert Epochs(files).acquire("another run").number == 1


@pytest.mark.integration
def test_a_killed_driver_of_this_machine_is_replaced_at_once_reaped_or_not(files: Files):
    with Driver(files, own_child=True, lease_s=3600.0) as first:
        assert first.answer() == 1
        assert first.process.pid is not None
        os.kill(first.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)
        zombies = Epochs(files).acquire("run")
        assert zombies.number == 2
        zombies.release()
    with Driver(files, lease_s=3600.0) as second:
        assert second.answer() == 3
    assert Epochs(files).acquire("run").number == 4


@pytest.mark.integration
def test_a_killed_driver_of_another_machine_is_replaced_after_its_lease(
    files: Files, later: Callable[[float], None]
):
    with Driver(files, pid_space="another machine", lease_s=30.0) as first:
        assert first.answer() == 1
    with refused("--takeover"):
        Epochs(files).acquire("run")
    later(30.0)
    with refused("a dead one blocks for "):
        Epochs(files, skew_s=10.0).acquire("run")
    later(10.1)
    assert Epochs(files, skew_s=10.0).acquire("run").number == 2


@pytest.mark.integration
def test_after_a_takeover_the_old_driver_is_refused_and_the_new_one_continues(files: Files):
    branches = Branches(files)
    branches.create("run", {}, "init")
    with Driver(files) as first:
        assert first.answer() == first.do("commit", 0) == 1
        with Driver(files, takeover=True, pid_space="another machine") as second:
            assert second.answer() == 2
            for call, *arguments in (["commit", 1], ["check"], ["renew"], ["commit", 1]):
                with refused(
                    "another process has taken over",
                    f"process {second.process.pid}",
                    "no epoch after 1",
                ):
                    first.do(str(call), *arguments)
            written = files.list("branches/run")
            assert first.do("release") == 1
            assert files.list("branches/run") == written
            assert second.do("commit", 1) == second.do("renew") == second.do("commit", 2) == 2
    assert [commit.epoch for commit in branches.walk("run")] == [2, 2, 1]


@pytest.mark.integration
def test_a_driver_that_was_suspended_beyond_its_lease_is_refused_at_its_commit(local_files: Files):
    Branches(local_files).create("run", {}, "init")
    with Driver(local_files, lease_s=0.2) as first:
        assert first.answer() == 1
        os.kill(first.process.pid or 0, signal.SIGSTOP)
        time.sleep(0.3)
        epoch = Epochs(local_files).acquire("run")
        os.kill(first.process.pid or 0, signal.SIGCONT)
        with refused("taken over"):
            first.do("commit", 0)
        Branches(local_files).commit(a_commit(0, epoch.number), fence=epoch.check)


def test_an_expired_lease_can_be_renewed_if_no_driver_took_the_branch(
    files: Files, later: Callable[[float], None]
):
    epoch = Epochs(files).acquire("run", lease_s=10.0)
    later(100.0)
    epoch.check()
    epoch.renew()
    with refused("is running in another process"):
        Epochs(files).acquire("run")
    later(10.1)
    assert Epochs(files).acquire("run").number == 2


def test_a_renewal_restarts_the_time_of_the_lease(files: Files, later: Callable[[float], None]):
    epoch = Epochs(files).acquire("run", lease_s=10.0)
    for _ in range(4):
        later(9.0)
        epoch.renew()
        with refused("(a dead one blocks for 10 s more)"):
            Epochs(files).acquire("run")


@pytest.mark.parametrize("takeover", [False, True])
def test_one_of_many_racing_threads_becomes_the_driver_and_the_others_get_its_name(
    files: Files, takeover: bool
):
    if takeover:
        Epochs(files).acquire("run")
    barrier = threading.Barrier(8)

    def race(_: int) -> Epoch | Fenced:
        contender = Epochs(Files(files.root))
        barrier.wait()
        try:
            return contender.acquire("run", takeover=takeover)
        except Fenced as error:
            return error

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(race, range(8)))
    won = sorted(result.number for result in results if isinstance(result, Epoch))
    first = 2 if takeover else 1
    assert won == list(range(first, first + len(won))), "one holder an epoch"
    assert takeover or won == [1]
    lost = [result for result in results if isinstance(result, Fenced)]
    assert all(f"process {os.getpid()}" in str(error) for error in lost)
    for epoch in (
        result for result in results if isinstance(result, Epoch) and result.number != won[-1]
    ):
        with refused("taken over"):
            epoch.check()


@pytest.mark.integration
def test_one_of_many_racing_processes_becomes_the_driver(files: Files):
    with pool(4) as contenders:
        attempts = contenders.map(try_to_acquire, [files] * 8, chunksize=1)
    assert sorted(attempts) == [0] * 7 + [1]


def try_to_acquire(files: Files) -> int:
    """Return the acquired epoch, or 0. The process stays alive in its pool."""
    try:
        return Epochs(files).acquire("run").number
    except Fenced:
        return 0


def test_the_slower_of_two_takeovers_does_not_replace_the_faster_one(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    Epochs(local_files).acquire("run")
    slow = Epochs(local_files)
    seen = Epochs(local_files).newest("run")
    assert Epochs(local_files).acquire("run", takeover=True).number == 2
    monkeypatch.setattr(slow, "newest", lambda _: seen)
    with refused("process ", "(epoch 2)"):
        slow.acquire("run", takeover=True)


def test_a_released_branch_is_free_and_its_driver_may_not_commit(files: Files):
    epoch = Epochs(files).acquire("run", lease_s=3600.0)
    epoch.release()
    for call in (epoch.check, epoch.renew):
        with refused("this driver has released the branch"):
            call()
    before = files.list()
    epoch.release()
    assert files.list() == before
    assert Epochs(files).acquire("run").number == 2


def test_another_process_with_the_pid_of_a_dead_driver_is_not_its_driver(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    earlier = Holder.here().model_copy(update={"started": 1})
    monkeypatch.setattr(Holder, "here", lambda: earlier)
    Epochs(local_files).acquire("run")
    monkeypatch.undo()
    assert Epochs(local_files).acquire("run").number == 2


def test_a_driver_of_another_user_is_not_dead(monkeypatch: pytest.MonkeyPatch):
    def hidden(*_: object) -> None:
        raise PermissionError

    holder = Holder.here()
    monkeypatch.setattr(os, "kill", hidden)
    assert not holder.dead
    monkeypatch.setattr(holders, "state_and_start", hidden)
    assert not holder.dead


def test_the_pid_of_a_dead_process_means_nothing_on_another_machine(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(holders, "pid_space", lambda: "another boot")
    gone = Holder.here().model_copy(update={"pid": 2**22 + 1})
    monkeypatch.setattr(Holder, "here", lambda: gone)
    Epochs(local_files).acquire("run")
    monkeypatch.undo()
    with refused(f"process {2**22 + 1}"):
        Epochs(local_files).acquire("run")


def test_renewals_do_not_accumulate_and_a_check_is_one_request(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, str]] = []

    def counted(name: str) -> None:
        plain = getattr(Files, name)
        monkeypatch.setattr(
            Files,
            name,
            lambda files, path, *rest: asked.append((name, path)) or plain(files, path, *rest),
        )

    epoch = Epochs(local_files).acquire("run")
    for name in ("create", "read", "exists", "list", "delete", "size"):
        counted(name)
    epoch.check()
    assert asked == [("exists", f"{RUN}/00000002.json")]
    for _ in range(30):
        epoch.renew()
    assert len(asked) == 1 + 3 * 30 - epochs.KEPT_RENEWALS
    assert len(local_files.list("branches/run/epochs")) == 1 + epochs.KEPT_RENEWALS


def test_a_lease_that_was_renewed_between_listing_and_reading_is_listed_again(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    epoch = Epochs(local_files).acquire("run")
    epoch.renew()
    read = Files.read

    def late(files: Files, path: str, sha256: str | None = None) -> bytes:
        monkeypatch.undo()
        for _ in range(3):
            epoch.renew()
        return read(files, path, sha256)

    monkeypatch.setattr(Files, "read", late)
    with refused("is running in another process"):
        Epochs(local_files).acquire("run")


def test_the_fence_is_called_last_before_the_write_and_a_fenced_commit_is_not_written(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    files = local_files
    branches = Branches(files)
    branches.create("run", {}, "init")
    epoch = Epochs(files).acquire("run")
    branches.commit(a_commit(0, 1), fence=epoch.check)

    def nothing_is_asked_after_this() -> None:
        epoch.check()
        monkeypatch.setattr(Files, "read", None)

    branches.commit(a_commit(1, 1), fence=nothing_is_asked_after_this)
    monkeypatch.undo()

    def taken_while_it_committed() -> None:
        Epochs(files).acquire("run", takeover=True)
        epoch.check()

    with refused("taken over"):
        branches.commit(a_commit(2, 1), fence=taken_while_it_committed)
    with pytest.raises(ObjectMissing):
        branches.read("run", 2)


def test_a_commit_of_an_older_epoch_than_the_newest_is_refused(files: Files):
    branches = Branches(files)
    branches.create("run", {}, "init")
    for iteration, epoch in ((0, 0), (1, 3)):
        branches.commit(a_commit(iteration, epoch))
    for late in (
        a_commit(2, 2),
        a_commit(1, 2),
        a_commit(1, 2).model_copy(update={"plans": ("other",)}),
    ):
        with refused(
            "a newer driver has committed",
            "epoch 3",
            f"epoch {late.epoch} (this driver)",
            "00000001.json",
        ):
            branches.commit(late)
    branches.create("fork", {}, "init", parent="run/00000001")
    fork = a_commit(2, 1).model_copy(update={"branch": "fork"})
    assert branches.commit(fork).epoch == 1, "a fork has its own drivers"
    branches.commit(a_commit(2, 3))


def test_epochs_are_neither_commits_nor_branches_nor_findings(files: Files):
    run = Run(files).start()
    for _ in range(6):
        Epochs(files).acquire("run", takeover=True).renew()
    assert Branches(files).newest("run") is None
    run.iterate()
    newest = Branches(files).newest("run")
    assert newest is not None
    assert newest.iteration == 0
    assert Branches(files).names() == ["run"]
    assert check_branch(files, "run") == []


def test_superseded_renewals_are_garbage(files: Files):
    run = Epochs(files).acquire("run")
    other = Epochs(files).acquire("other")
    for _ in range(3):
        run.renew()
        other.renew()
    run = Epochs(files).acquire("run", takeover=True, lease_s=3600.0)
    names = files.list()
    gone = [
        f"{RUN}/00000001/00000002.json",
        f"{RUN}/00000001/00000003.json",
        "branches/other/epochs/00000001/00000002.json",
    ]
    assert superseded_renewals(names) == set(gone)
    assert collect(files, 3600.0) == []
    assert collect(files, -60.0) == sorted(gone)
    run.renew()
    run.renew()
    assert collect(files, -60.0) == [f"{RUN}/00000002/00000001.json"]
    assert files.list(RUN) == [
        f"{RUN}/00000001.json",
        f"{RUN}/00000002.json",
        f"{RUN}/00000002/00000002.json",
    ]
    with refused("epoch 2"):
        Epochs(files).acquire("run")
    other.check()
