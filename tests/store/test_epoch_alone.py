"""Garbage collection and drivers exclude each other, also after one of them was suspended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from rlpipe.errors import Fenced
from rlpipe.store import epochs
from rlpipe.store.epochs import COLLECTOR, Epoch, Epochs
from rlpipe.store.holders import Holder
from rlpipe.store.objects.files import Files
from tests.store.drivers import refused

REMOVING = "garbage collection is running on this store"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move this machine's clock by a number of seconds."""
    moved = [0.0]
    monkeypatch.setattr(epochs, "clock", lambda: datetime.now(UTC) + timedelta(seconds=moved[0]))
    return lambda seconds: moved.__setitem__(0, moved[0] + seconds)


def test_no_driver_starts_continues_or_stands_in_during_a_collection(files: Files):
    Epochs(files).acquire("run").release()
    with Epochs(files).exclusive() as own:
        own.check()
        for branch, takeover in (("run", False), ("run", True), ("new", False), ("new", True)):
            with refused(REMOVING, f"branches/{COLLECTOR}/epochs/00000001"):
                Epochs(files).acquire(branch, takeover=takeover)
        with refused(REMOVING):
            Epochs(files).join("run", stand_in=True)
        with refused(REMOVING), Epochs(files).exclusive():
            pass
    assert Epochs(files).join("run", stand_in=True).number > 1


@pytest.mark.parametrize("stand_in", [False, True])
def test_no_collection_starts_while_a_driver_is_active(files: Files, stand_in: bool):
    driver = Epochs(files).acquire("run", stand_in=stand_in)
    with refused("is running in another process"), Epochs(files).exclusive():
        pass
    driver.renew()
    assert Epochs(files).acquire("other").number == 1, (
        "a collector that was refused keeps no driver out"
    )
    driver.release()


def test_a_driver_and_a_collector_that_start_together_never_both_succeed(local_files: Files):
    def drive(branch: str, begun: list[object], barrier: threading.Barrier) -> None:
        barrier.wait()
        try:
            begun.append(Epochs(Files(local_files.root)).acquire(branch))
        except Fenced as error:
            begun.append(error)

    for attempt in range(12):
        begun: list[object] = []
        barrier = threading.Barrier(2)
        driver = threading.Thread(target=drive, args=(f"run-{attempt}", begun, barrier))
        driver.start()
        barrier.wait()
        try:
            with Epochs(local_files).exclusive():
                driver.join()
                assert isinstance(begun[0], Fenced)
        except Fenced:
            driver.join()
        for epoch in begun:
            if isinstance(epoch, Epoch):
                epoch.release()


def test_a_suspended_driver_is_refused_after_a_collection(
    local_files: Files, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
):
    elsewhere = Holder.here().model_copy(update={"pid_space": "another machine"})
    monkeypatch.setattr(Holder, "here", lambda: elsewhere)
    asleep = Epochs(local_files).acquire("run", lease_s=30.0)
    later(45.0)
    with Epochs(local_files).exclusive():
        pass
    with refused("another process has taken over"):
        asleep.check()


def test_a_suspended_collector_removes_nothing_after_a_driver_started(
    local_files: Files, later: Callable[[float], None]
):
    with Epochs(local_files).exclusive() as own:
        own.check()
        later(epochs.LEASE_S + 1)
        driver = Epochs(local_files).acquire("run")
        with refused("another process has taken over"):
            own.check()
        driver.check()
    assert Epochs(local_files).acquire("another").number == 1
