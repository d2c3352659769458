"""Epochs under random sequences of operations, compared with a model."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlpipe.errors import Fenced
from rlpipe.store import epochs, holders
from rlpipe.store.epochs import Epoch, Epochs, Holder
from rlpipe.store.objects.files import Files
from tests.store.lineage import collect


class Drivers(RuleBasedStateMachine):
    """Drivers on three machines with one clock, which acquire, renew, release, sleep and die."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.directory = pytest.MonkeyPatch(), tempfile.TemporaryDirectory()
        self.files = Files(self.directory.name)
        self.now, self.machine, self.dead = datetime(2030, 1, 1, tzinfo=UTC), "here", set[int]()
        self.epochs: list[Epoch] = []
        self.home = ""
        self.until = self.now
        self.free = True
        self.patches.setattr(epochs, "clock", lambda: self.now)
        self.patches.setattr(holders, "pid_space", lambda: self.machine)
        self.patches.setattr(holders, "ended", lambda pid, _: pid in self.dead)
        self.patches.setattr(Holder, "here", self.holder)

    def holder(self) -> Holder:
        pid = len(self.epochs) + 1
        return Holder(
            host=self.machine, pid_space=self.machine, pid=pid, started=0, attempt=str(pid)
        )

    def teardown(self) -> None:
        self.patches.undo()
        self.directory.cleanup()

    @rule(
        machine=st.sampled_from(["here", "there", "far"]),
        takeover=st.booleans(),
        lease_s=st.sampled_from([10.0, 60.0]),
    )
    def acquire(self, machine: str, takeover: bool, lease_s: float) -> None:
        near = self.home == machine
        killed = len(self.epochs) in self.dead
        silent = self.now > self.until + timedelta(seconds=0 if near else epochs.SKEW_S)
        self.machine = machine
        try:
            epoch = Epochs(self.files).acquire("run", takeover=takeover, lease_s=lease_s)
        except Fenced:
            assert not (self.free or takeover or silent or (near and killed))
            return
        assert self.free or takeover or silent or (near and killed)
        assert epoch.number == len(self.epochs) + 1
        self.epochs.append(epoch)
        self.home, self.until, self.free = machine, self.now + timedelta(seconds=lease_s), False

    @precondition(lambda self: not self.free)
    @rule()
    def renew(self) -> None:
        self.epochs[-1].renew()
        self.until = self.now + timedelta(seconds=self.epochs[-1]._lease.lease_s)

    @precondition(lambda self: self.epochs)
    @rule()
    def release(self) -> None:
        self.epochs[-1].release()
        self.free = True

    @precondition(lambda self: len(self.epochs) > 1)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        """Wake a driver that was replaced."""
        late = self.epochs[data.draw(st.integers(0, len(self.epochs) - 2))]
        with pytest.raises(Fenced):
            late.renew()
        late.release()

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Release the branch by a driver that was replaced."""
        late = self.epochs[data.draw(st.integers(0, len(self.epochs) - 1))]
        late.release()
        self.free = self.free or late is self.epochs[-1]

    @precondition(lambda self: self.epochs)
    @rule()
    def die(self) -> None:
        self.dead.add(len(self.epochs))

    @rule(seconds=st.sampled_from([1.0, 11.0, 25.0, 75.0]))
    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @rule()
    def clean(self) -> None:
        collect(self.files, -1e6)

    @rule(machine=st.sampled_from(["here", "there", "far"]))
    def clean_alone(self, machine: str) -> None:
        """Collect garbage while all drivers are excluded."""
        near = self.home == machine
        killed = len(self.epochs) in self.dead
        silent = self.now > self.until + timedelta(seconds=0 if near else epochs.SKEW_S)
        self.machine = machine
        try:
            with Epochs(self.files).exclusive() as own:
                assert self.free or silent or (near and killed)
                own.check()
                with pytest.raises(Fenced):
                    Epochs(self.files).acquire("run", takeover=True)
                self.free = True
        except Fenced:
            assert not (self.free or silent or (near and killed))
        if (newest := Epochs(self.files).newest("run")) is None:
            return
        for number in range(len(self.epochs) + 1, newest.epoch + 1):
            self.epochs.append(Epoch(self.files, newest.model_copy(update={"epoch": number})))
            self.epochs[-1].release()

    @invariant()
    def only_the_newest_may_commit(self) -> None:
        allowed = []
        for epoch in self.epochs[-2:]:
            with suppress(Fenced):
                Epoch(self.files, epoch._lease).check() if epoch.lost is None else epoch.check()
                allowed.append(epoch.number)
        assert allowed == ([] if self.free else [len(self.epochs)])


def test_only_the_newest_driver_may_commit_and_is_replaced_only_if_allowed():
    run_state_machine_as_test(
        Drivers, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )
