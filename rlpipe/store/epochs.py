"""Epochs: one driver of a branch at a time, and a driver that was replaced is told so before it
commits.

    branches/<branch>/epochs/%08d.json         epoch n: who drives, since when. Written once, without gaps, kept for good
    branches/<branch>/epochs/%08d/%08d.json    its lease, renewed: the last one counts, which is the last by name

Whoever creates epoch n + 1 has replaced the driver of epoch n, whose next check finds that record.
This alone decides, and no clock has a part in it. The lease only keeps a driver from being replaced
by accident: while it runs, another driver is refused unless it asks for a takeover. A lease is over
when it was released, when its process is known to be dead (same boot of the same machine, same PID
namespace), or by the clock: on the holder's machine when its time is up, elsewhere SKEW_S later.
Clocks that differ by more replace a driver too early, or wait longer; cloned machines may take each
other's processes for dead. Both cost a driver, never a record.

A renewal every lease_s / 3: one look for epoch n + 1, one write, one removal of the renewal before
the last. At 60 s that is 180 of each an hour and at most three objects; a killed driver's last ones
are garbage (`superseded_renewals`) once it is replaced. Acquiring is two listings, two reads, one write;
`check` is one request for an object that is not there.

Between a check and the write that follows it a takeover may still come. Then first writer wins: the
new driver finds that commit and goes on from it, or is told that it differs. No batch is trained
twice on one branch either way.

A process that does a part of a driver's work (an iteration in a flow run of its own) joins its
epoch: it carries that number, checks as its driver does, and is refused with it.

Whoever removes things from the store (`gc`) is alone in it. It has epochs of its own, under a name
that no run has:

    collector                                    driver
    1. writes an epoch of its own                1. writes an epoch of its branch
    2. looks at every branch's newest one        2. looks at the collector's newest one

Both write before they look, so whichever looks second sees the other, and gives up. A driver that
may only be asleep is replaced by the collector, and so is such a collector by a driver: each is
told before its next commit or removal.

Not here: which process holds one, and whether it lives (`holders`), when to check
(`Branches.commit`, and whoever opens a run), or ending the other driver's processes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

from rlpipe.errors import Fenced, ObjectConflict, ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.holders import Holder
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal, unseal
from rlpipe.types import VersionedRecord

LEASE_S = 60.0
RENEWALS_PER_LEASE = 3
"""Two may fail before the lease is over."""
SKEW_S = 10.0
"""How far the clocks of two machines may be apart."""
KEPT_RENEWALS = 2
"""A reader that has listed them has a whole interval to read the last one."""
COLLECTOR = ".gc"
"""In place of a branch: whose epochs are the collector's."""
EPOCH_NAME = re.compile(r"branches/([^/]+)/epochs/(\d{8})(?:/(\d{8}))?\.json")


def _time(value: str) -> str:
    """A time that a lease can run from. Raises: ValueError."""
    found = datetime.fromisoformat(value)
    if found.tzinfo is None or found.year > 2999:
        raise ValueError("not a time with its zone, before the year 3000")
    return value


Time = Annotated[str, AfterValidator(_time)]


class Lease(VersionedRecord):
    """Who drives a branch, and for how long unless it is renewed."""

    branch: str
    epoch: int
    holder: Holder
    since: Time
    renewed: Time
    lease_s: float = Field(ge=0, lt=1e9)
    released: bool = False
    stand_in: bool = False
    """Does it only finish what somebody asked for while there is no driver? A driver need not wait
    for it."""

    @property
    def until(self) -> datetime:
        """When it is over by its holder's clock."""
        return datetime.fromisoformat(self.renewed) + timedelta(seconds=self.lease_s)

    def expired(self, skew_s: float) -> bool:
        """May the branch be taken without asking?"""
        allowed = timedelta(seconds=0 if self.holder.is_local else skew_s)
        return self.released or self.holder.dead or clock() > self.until + allowed


class Epochs:
    """The epochs of a store's branches."""

    def __init__(self, files: Files, *, skew_s: float = SKEW_S) -> None:
        self._files = files
        self._skew_s = skew_s

    def newest(self, branch: str) -> Lease | None:
        """The lease that counts; None if nobody ever drove the branch. Raises: ObjectCorrupt."""
        while names := [
            name for name in self._files.list(epochs_folder(branch)) if EPOCH_NAME.fullmatch(name)
        ]:
            newest = max(names)
            with suppress(ObjectMissing):  # renewed twice since the listing: list again
                return read_lease(self._files, newest)
        return None

    def acquire(
        self,
        branch: str,
        *,
        takeover: bool = False,
        stand_in: bool = False,
        lease_s: float = LEASE_S,
    ) -> Epoch:
        """Become the driver of a branch; call `keep` on what this returns, or `renew` in time.

        A `stand_in` is replaced by the next driver without being asked. Raises: Fenced while
        another driver's lease runs (with `takeover`: if a third one was faster), or the collector
        is at work; StoreError.
        """
        return self._admitted(
            self._take(branch, takeover=takeover, stand_in=stand_in, lease_s=lease_s)
        )

    @contextmanager
    def exclusive(self) -> Iterator[Epoch]:
        """Keep every driver out of the store for as long as the block takes; `check` the epoch
        before each thing done in it.

        Raises: Fenced if there is a driver now, or another collector; StoreError.
        """
        own = self._take(COLLECTOR)
        own.keep()
        try:
            for branch in sorted(
                {
                    match[1]
                    for name in self._files.list("branches")
                    if (match := EPOCH_NAME.fullmatch(name))
                }
            ):
                held = self.newest(branch) if branch != COLLECTOR else None
                if held is not None and not held.released and not held.holder.dead:
                    self._take(branch, stand_in=True, released=True)
            yield own
        finally:
            own.release()

    def _take(
        self,
        branch: str,
        *,
        takeover: bool = False,
        stand_in: bool = False,
        lease_s: float = LEASE_S,
        released: bool = False,
    ) -> Epoch:
        """The next epoch, `released` from the start if it is only to replace the one before.
        Raises: Fenced; StoreError."""
        held = self.newest(branch)
        if (
            held is not None
            and not takeover
            and not held.expired(self._skew_s)
            and (stand_in or not held.stand_in)
        ):
            raise self._refusal(held)
        now = clock().isoformat(timespec="milliseconds")
        number = held.epoch + 1 if held else 1
        lease = Lease(
            branch=branch,
            epoch=number,
            holder=Holder.here(),
            since=now,
            renewed=now,
            lease_s=lease_s,
            released=released,
            stand_in=stand_in,
        )
        path = epoch_path(branch, number)
        try:
            self._files.create(path, seal(lease, path))
        except ObjectConflict as error:
            raise self._refusal(read_lease(self._files, path)) from error
        return Epoch(self._files, lease)

    def _admitted(self, epoch: Epoch) -> Epoch:
        """The epoch, given back if the collector is at work. One that died or sleeps is replaced,
        and removes nothing more."""
        try:
            while (held := self.newest(COLLECTOR)) is not None and not held.released:
                if not held.expired(self._skew_s):
                    raise self._refusal(held)
                with suppress(Fenced):  # somebody was faster: look again
                    self._take(COLLECTOR, released=True)
        except (Fenced, StoreError):
            epoch.release()
            raise
        return epoch

    def join(self, branch: str, *, stand_in: bool) -> Epoch:
        """Work under the newest epoch while its driver lives (checked, never renewed here); else
        become a stand-in for one.

        Raises: Fenced instead if this shall be no `stand_in`; StoreError.
        """
        while True:
            held = self.newest(branch)
            if held is not None and not held.expired(self._skew_s):
                return Epoch(self._files, held, joined=True)
            if not stand_in:
                raise Fenced(
                    "the driver that asked for this has ended",
                    where=self._files.url(epochs_folder(branch)),
                    found=_who(held) if held else "no driver so far",
                    expected="a driver whose lease runs",
                    do="start the run again (or Retry its flow run): it puts this one back; Retry on this one does it alone",
                )
            epoch = None
            with suppress(Fenced):  # somebody was faster: join them
                epoch = self._take(branch, stand_in=True)
            if epoch is not None:
                return self._admitted(epoch)

    def _refusal(self, held: Lease) -> Fenced:
        allowed = 0 if held.holder.is_local else self._skew_s
        left_s = (held.until - clock()).total_seconds() + allowed
        until = f"{held.until + timedelta(seconds=allowed):%H:%M:%S} UTC"
        where = self._files.url(epoch_path(held.branch, held.epoch))
        found = f"{_who(held)}; its lease, last renewed {held.renewed}, is over at {until} unless it renews it again"
        if held.branch == COLLECTOR:
            do = f"wait until it is done, or stop it (if it is dead already: {max(left_s, 0):.0f} s); then start again"
            return Fenced(
                "what nobody needs is being removed from this store (tools.gc)",
                where=where,
                found=found,
                do=do,
            )
        return Fenced(
            "another driver runs this branch",
            where=where,
            found=found,
            expected="no driver, or one that is dead, done or silent for its whole lease",
            do=f"stop it, or wait until it ends (if it is dead already: {max(left_s, 0):.0f} s); to replace it while it runs, "
            "start again with --takeover; or give the new run another name: --run NAME",
        )


class Epoch:
    """The right to commit to a branch, until another driver takes it. Thread-safe; stays in its
    process.

    One that is `joined` is another process's: it ends with the next one too, but this process
    neither renews nor releases it.
    """

    def __init__(self, files: Files, lease: Lease, *, joined: bool = False) -> None:
        self._files = files
        self._lease = lease
        self._renewals = 0
        self.joined = joined
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._keeper = threading.Thread(
            target=self._renew_until_stopped, name=f"lease of {lease.branch}", daemon=True
        )
        self.lost: Fenced | None = None
        """Why this driver may not commit any more, as far as is known without asking the store."""

    @property
    def stand_in(self) -> bool:
        """Is it held, by us or whom we joined, only while there is no driver?"""
        return self._lease.stand_in

    @property
    def number(self) -> int:
        """From 1; larger than that of every driver before."""
        return self._lease.epoch

    def keep(self) -> None:
        """Renew the lease in the background until it is released or lost."""
        if not self.joined:
            self._keeper.start()

    def check(self) -> None:
        """Ask the store whether this is still the newest epoch. Raises: Fenced, now and ever after;
        StoreError."""
        if self.lost is None and self._files.exists(
            path := epoch_path(self._lease.branch, self.number + 1)
        ):
            newer = read_lease(self._files, path)
            self.lost = Fenced(
                "another driver has taken over this branch",
                where=self._files.url(path),
                found=_who(newer),
                expected=f"none after epoch {self.number}, which is ours",
                do="leave the branch to it, or stop it and start this one again",
            )
        if self.lost is not None:
            raise self.lost

    def check_driver(self) -> None:
        """`check`, and whether the driver that was joined is still there to wait for. Raises:
        Fenced; StoreError."""
        self.check()
        if not self.joined:
            return
        held = Epochs(self._files).newest(self._lease.branch)
        if held is not None and held.epoch == self.number and held.expired(SKEW_S):
            raise Fenced(
                "the driver that this works for has ended",
                where=self._files.url(epoch_path(self._lease.branch, self.number)),
                found=_who(held),
                expected="its lease renewed",
                do="start the run again, or press Retry on its flow run",
            )

    def renew(self) -> None:
        """Make the lease run from now. Raises: Fenced; StoreError."""
        assert not self.joined, "the lease of a joined epoch is its driver's"
        with self._lock:
            self.check()
            self._write()

    def release(self) -> None:
        """Give the branch back: the next driver need not wait. A store that does not answer lets
        the lease run out instead."""
        self._stopped.set()
        with self._lock:
            if self.lost is None:
                if not self.joined:
                    with suppress(StoreError):
                        self._write(released=True)
                path = epoch_path(self._lease.branch, self.number)
                self.lost = Fenced(
                    "this driver has given the branch back", where=self._files.url(path)
                )

    def _write(self, *, released: bool = False) -> None:
        self._renewals += 1  # first: a number whose write failed may be there all the same
        now = clock().isoformat(timespec="milliseconds")
        lease = self._lease.model_copy(update={"renewed": now, "released": released})
        path = epoch_path(lease.branch, self.number, self._renewals)
        self._files.create(path, seal(lease, path))
        if self._renewals > KEPT_RENEWALS:
            self._files.delete(
                epoch_path(lease.branch, self.number, self._renewals - KEPT_RENEWALS)
            )

    def _renew_until_stopped(self) -> None:
        while self.lost is None and not self._stopped.wait(
            self._lease.lease_s / RENEWALS_PER_LEASE
        ):
            with suppress(
                Exception
                # `check` keeps a Fenced in `lost`; whatever else it is, the next renewal may succeed
            ):
                self.renew()


def superseded_renewals(names: Iterable[str]) -> set[str]:
    """Of the names of a store's objects: renewals that count no more, those of replaced epochs and
    all but each last one."""
    leases = {name: match for name in names if (match := EPOCH_NAME.fullmatch(name))}
    newest: dict[str, str] = {}
    for name, match in leases.items():
        newest[match[1]] = max(newest.get(match[1], name), name)
    return {name for name, match in leases.items() if match[3] and name != newest[match[1]]}


def clock() -> datetime:
    """The time by this machine's clock."""
    return datetime.now(UTC)


def epochs_folder(branch: str) -> str:
    """Where the epochs of a branch lie."""
    return f"branches/{branch}/epochs"


def epoch_path(branch: str, number: int, renewal: int = 0) -> str:
    """Where the record of an epoch lies, or a renewal of its lease."""
    return f"{epochs_folder(branch)}/{number:08d}" + (
        f"/{renewal:08d}.json" if renewal else ".json"
    )


def read_lease(files: Files, path: str) -> Lease:
    """The lease of this name. Raises: ObjectMissing; ObjectCorrupt, also if it is another
    epoch's."""
    lease = unseal(Lease, files.read(path), files.url(path))
    if path.removesuffix(".json").partition("/epochs/")[2].partition("/")[
        0
    ] != f"{lease.epoch:08d}" or not path.startswith(f"{epochs_folder(lease.branch)}/"):
        found = f"epoch {lease.epoch} of {lease.branch}"
        raise ObjectCorrupt(
            "this is another lease",
            where=files.url(path),
            found=found,
            expected="the epoch of its name",
        )
    return lease


def _who(lease: Lease) -> str:
    holder = lease.holder
    return f"epoch {lease.epoch}: process {holder.pid} on {holder.host} since {lease.since}"
