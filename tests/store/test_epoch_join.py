"""Joined epochs: a process that works for a driver has its epoch, and is refused with it."""

from __future__ import annotations

import threading

import pytest

from rlpipe.errors import Fenced
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from tests.store.drivers import Driver, a_commit, refused


@pytest.mark.integration
def test_a_joined_epoch_has_the_number_of_the_driver_and_does_not_renew_its_lease(files: Files):
    with Driver(files) as driver:
        assert driver.answer() == 1
        leases = files.list("branches/run/epochs")
        joined = Epochs(files).join("run", stand_in=True)
        assert (joined.number, joined.joined) == (1, True)
        joined.keep()
        assert not [thread for thread in threading.enumerate() if thread.name == "lease of run"]
        joined.check()
        joined.release()
        assert joined.lost is not None
        assert files.list("branches/run/epochs") == leases
        assert driver.do("check") == driver.do("renew") == 1


def test_a_join_without_an_active_driver_becomes_a_stand_in(local_files: Files):
    Epochs(local_files).acquire("run").release()
    joined = Epochs(local_files).join("run", stand_in=True)
    assert (joined.number, joined.joined) == (2, False)
    second = Epochs(local_files).join("run", stand_in=True)
    assert (second.number, second.joined) == (2, True)
    with refused("is running in another process"):
        Epochs(local_files).acquire("run", stand_in=True)


def test_after_a_takeover_an_older_joined_epoch_may_not_commit_and_a_newer_one_may(
    local_files: Files, commits: Branches
):
    driver = Epochs(local_files).acquire("run")
    zombie = Epochs(local_files).join("run", stand_in=True)
    commits.commit(a_commit(0, zombie.number), fence=zombie.check)
    replacing = Epochs(local_files).acquire("run", takeover=True)
    with pytest.raises(Fenced, match="another process has taken over this run"):
        commits.commit(a_commit(1, zombie.number), fence=zombie.check)
    assert commits.newest("run") == commits.read("run", 0)
    with pytest.raises(Fenced):
        driver.check()
    joined = Epochs(local_files).join("run", stand_in=True)
    assert joined.number == replacing.number == 2
    commits.commit(a_commit(1, joined.number), fence=joined.check)


@pytest.fixture
def commits(local_files: Files) -> Branches:
    """Return the branches of a store that has the branch `run`."""
    branches = Branches(local_files)
    branches.create("run", {}, "init")
    return branches


def test_a_driver_replaces_a_stand_in_without_waiting(local_files: Files):
    stand_in = Epochs(local_files).join("run", stand_in=True)
    other = Epochs(local_files).join("run", stand_in=False)
    assert other.joined
    driver = Epochs(local_files).acquire("run")
    assert driver.number == stand_in.number + 1
    with pytest.raises(Fenced, match="another process has taken over"):
        stand_in.check()


def test_resources_of_an_ended_driver_are_left_to_the_next_driver(local_files: Files):
    with pytest.raises(Fenced, match="the process that started this task has ended"):
        Epochs(local_files).join("run", stand_in=False)
    Epochs(local_files).acquire("run").release()
    with pytest.raises(Fenced, match="the process that started this task has ended"):
        Epochs(local_files).join("run", stand_in=False)
