"""Leases that are renewed in the background until they are released or lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlpipe.errors import StoreError
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from tests.store.drivers import refused

RUN = "branches/run/epochs"


def until(reached: Callable[[], object]) -> None:
    """Wait for the effect of a thread."""
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def renewals(files: Files, epoch: int = 1) -> list[str]:
    return files.list(f"{RUN}/{epoch:08d}")


@pytest.mark.integration
def test_a_kept_lease_is_renewed_until_it_is_lost(files: Files):
    epoch = Epochs(files).acquire("run", lease_s=0.3)
    epoch.keep()
    until(lambda: [*renewals(files), ""][0] >= f"{RUN}/00000001/00000003.json")
    assert epoch.lost is None
    Epochs(files).acquire("run", takeover=True)
    until(lambda: epoch.lost is not None)
    until(lambda: not epoch._keeper.is_alive())
    with refused("taken over"):
        epoch.check()
    last = renewals(files)
    epoch.release()
    assert renewals(files) == last


def test_a_kept_lease_ends_with_its_release(local_files: Files):
    epoch = Epochs(local_files).acquire("run", lease_s=3600.0)
    epoch.keep()
    epoch.release()
    until(lambda: not epoch._keeper.is_alive())
    assert Epochs(local_files).acquire("run").number == 2


def test_a_renewal_that_waits_behind_a_release_does_not_undo_it(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    epoch = Epochs(local_files).acquire("run")
    create = Files.create
    pool = ThreadPoolExecutor(1)
    waiting = []

    def slow(files: Files, path: str, data: bytes) -> bool:
        monkeypatch.undo()
        waiting.append(pool.submit(epoch.renew))
        time.sleep(0.1)
        return create(files, path, data)

    monkeypatch.setattr(Files, "create", slow)
    epoch.release()
    with refused("released the branch"):
        waiting[0].result()
    assert Epochs(local_files).acquire("run").number == 2


def test_a_failed_renewal_is_repeated_and_a_failed_release_is_ignored(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    """The failed write arrives, as after a lost reply."""
    create = Files.create
    attempts = []

    def fail_after_writing(files: Files, path: str, data: bytes) -> bool:
        attempts.append(create(files, path, data))
        if len(attempts) % 2:
            raise (
                StoreError("no answer") if len(attempts) != 3 else TypeError("an unexpected answer")
            )
        return True

    epoch = Epochs(local_files).acquire("run", lease_s=0.06)
    monkeypatch.setattr(Files, "create", fail_after_writing)
    epoch.keep()
    until(lambda: len(attempts) >= 6)
    assert epoch.lost is None
    monkeypatch.setattr(
        Files, "create", lambda *_: fail_after_writing(*_) and fail_after_writing(*_)
    )
    epoch.release()
    with refused("released the branch"):
        epoch.check()
