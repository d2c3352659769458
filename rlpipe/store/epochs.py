"""Epochs: one driver of a branch at a time.

    branches/<branch>/epochs/%08d.json         epoch n: driver and start; written once, kept forever
    branches/<branch>/epochs/%08d/%08d.json    renewals of its lease; the last name counts

A driver takes a branch by creating epoch n + 1. The driver of epoch n finds that record at its next
check, and stops. Only this record decides, and no clock is involved.

The lease prevents accidental replacement. While it is valid, another driver is refused unless it
requests a takeover. A lease ends when it is released, when its process is known to be dead (same
boot of the same machine, same PID namespace), or by time: on the holder's machine at its end,
elsewhere SKEW_S later. If clocks differ by more, a driver is replaced too early or too late. Cloned
machines may mistake each other's processes for dead ones. Both cost a driver, never a record.

A renewal every lease_s / 3 costs one lookup of epoch n + 1, one write, and one deletion of the
renewal before the last. At 60 s this is 180 of each an hour, and at most three objects exist. The
last renewals of a killed driver are garbage once it is replaced (`superseded_renewals`). Acquiring
costs two listings, two reads and one write. `check` costs one request for a missing object.

A takeover may happen between a check and the following write. Then the first writer wins: the new
driver continues from that commit, or gets an error that its own commit differs. No batch is trained
twice on one branch in either case.

A process that does a part of a driver's work (an iteration as a flow run) joins the driver's epoch.
It carries the same number, checks as the driver does, and is refused together with it.

Garbage collection (`gc`) runs alone on a store. The collector has epochs under the name `.gc`:

    collector                               driver
    1. writes its epoch                     1. writes an epoch of its branch
    2. reads the newest epoch of each       2. reads the newest epoch of the collector
       branch

Both write before they read. So the second reader sees the other, and stops. A collector replaces
the epoch of a driver that may only be suspended, and a driver replaces such a collector. The
replaced process gets an error before its next commit or removal.

Entry points: `Epochs`, `Epoch`.
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
"""Two renewals may fail before the lease ends."""
SKEW_S = 10.0
"""Largest expected difference between the clocks of two machines."""
KEPT_RENEWALS = 2
"""A reader that listed two renewals has a whole interval to read the last one."""
COLLECTOR = ".gc"
"""Name of the garbage collector among the branches. No run can have this name."""
EPOCH_NAME = re.compile(r"branches/([^/]+)/epochs/(\d{8})(?:/(\d{8}))?\.json")


def _time(value: str) -> str:
    """Validate the time of a lease. Raises: ValueError."""
    time = datetime.fromisoformat(value)
    # A year near 9999 would overflow when the length of the lease is added.
    if time.tzinfo is None or time.year > 2999:
        raise ValueError("not a time with its zone, before the year 3000")
    return value


Time = Annotated[str, AfterValidator(_time)]


class Lease(VersionedRecord):
    """The driver of an epoch, and the time until which it is valid without renewal."""

    branch: str
    epoch: int
    holder: Holder
    since: Time
    renewed: Time
    lease_s: float = Field(ge=0, lt=1e9)
    released: bool = False
    stand_in: bool = False
    """True if the process only finishes a task while no driver exists. A driver replaces it without
    waiting."""

    @property
    def until(self) -> datetime:
        """End of the lease by the holder's clock."""
        return datetime.fromisoformat(self.renewed) + timedelta(seconds=self.lease_s)

    def expired(self, skew_s: float) -> bool:
        """True if another driver may take the branch."""
        allowed = timedelta(seconds=0 if self.holder.is_local else skew_s)
        return self.released or self.holder.dead or clock() > self.until + allowed


class Epochs:
    """The epochs of a store's branches."""

    def __init__(self, files: Files, *, skew_s: float = SKEW_S) -> None:
        self._files = files
        self._skew_s = skew_s

    def newest(self, branch: str) -> Lease | None:
        """Return the lease that counts, or None for a branch without any driver so far.

        Raises: ObjectCorrupt.
        """
        while names := [
            name for name in self._files.list(epochs_folder(branch)) if EPOCH_NAME.fullmatch(name)
        ]:
            newest = max(names)
            # Two renewals since the listing delete this one: list again.
            with suppress(ObjectMissing):
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
        """Become the driver of a branch. The caller calls `keep`, or `renew` in time.

        The next driver replaces a `stand_in` without waiting. Raises: Fenced while the lease of
        another driver is valid (with `takeover`: if a third driver was faster), or while garbage
        collection runs; StoreError.
        """
        return self._admitted(
            self._take(branch, takeover=takeover, stand_in=stand_in, lease_s=lease_s)
        )

    @contextmanager
    def exclusive(self) -> Iterator[Epoch]:
        """Keep all drivers out of the store during the block. Call `check` before each removal.

        Raises: Fenced if a driver or another collector is active; StoreError.
        """
        # Write the collector's epoch before reading those of the branches (module docstring).
        own = self._take(COLLECTOR)
        own.keep()
        try:
            branches = {
                match[1]
                for name in self._files.list("branches")
                if (match := EPOCH_NAME.fullmatch(name))
            }
            for branch in sorted(branches - {COLLECTOR}):
                lease = self.newest(branch)
                # The driver of an expired lease may only be suspended. A new epoch stops it.
                if lease is not None and not lease.released and not lease.holder.dead:
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
        """Create the next epoch. `released`: the epoch only replaces the one before.

        Raises: Fenced; StoreError.
        """
        held = self.newest(branch)
        # Only the lease keeps a driver out. The number of the epoch decides between racing drivers.
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
            # Another driver was faster. A takeover was requested of the one before, not of this.
            raise self._refusal(read_lease(self._files, path)) from error
        return Epoch(self._files, lease)

    def _admitted(self, epoch: Epoch) -> Epoch:
        """Return the epoch, or release it and raise if garbage collection runs.

        A collector that is dead or suspended is replaced, so it removes nothing more.
        """
        try:
            while (held := self.newest(COLLECTOR)) is not None and not held.released:
                if not held.expired(self._skew_s):
                    raise self._refusal(held)
                with suppress(Fenced):  # another driver replaced it first: look again
                    self._take(COLLECTOR, released=True)
        except (Fenced, StoreError):
            epoch.release()
            raise
        return epoch

    def join(self, branch: str, *, stand_in: bool) -> Epoch:
        """Join the newest epoch while its driver is active, else become a stand-in.

        This process checks a joined epoch, but never renews it. Raises: Fenced if no driver is
        active and `stand_in` is False; StoreError.
        """
        while True:
            held = self.newest(branch)
            if held is not None and not held.expired(self._skew_s):
                return Epoch(self._files, held, joined=True)
            if not stand_in:
                raise Fenced(
                    "the process that started this task has ended",
                    where=self._files.url(epochs_folder(branch)),
                    found=_describe(held) if held else "no process so far",
                    expected="a process that runs the whole run",
                    do="start the run again (or Retry its flow run), and it starts this task "
                    "again; or press Retry on this task to run it alone",
                )
            epoch = None
            with suppress(Fenced):  # another process was faster: join that one
                epoch = self._take(branch, stand_in=True)
            if epoch is not None:
                return self._admitted(epoch)

    def _refusal(self, held: Lease) -> Fenced:
        """Return the error for a process that `held` keeps out."""
        allowed_s = 0 if held.holder.is_local else self._skew_s
        left_s = max((held.until - clock()).total_seconds() + allowed_s, 0)
        end = held.until + timedelta(seconds=allowed_s)
        where = self._files.url(epoch_path(held.branch, held.epoch))
        found = (
            f"{_describe(held)}; last sign of life {held.renewed}, counts as dead at "
            f"{end:%H:%M:%S} UTC without another one"
        )
        if held.branch == COLLECTOR:
            return Fenced(
                "garbage collection is running on this store (tools.gc)",
                where=where,
                found=found,
                do=f"wait until it ends, or stop it (a dead one blocks for {left_s:.0f} s more); "
                "then start again",
            )
        return Fenced(
            f"the run {held.branch} is running in another process",
            found=f"{found}; its record is {where}",
            expected="one process at a time for each run",
            do=f"end that process, or wait (a dead one blocks for {left_s:.0f} s more); or replace "
            "it now with --takeover; or start a run of another name with --run NAME",
        )


class Epoch:
    """The right to commit to a branch until another driver takes it.

    Thread-safe. Must stay in its process. A `joined` epoch belongs to another process: it ends with
    the next epoch too, but this process neither renews nor releases it.
    """

    def __init__(self, files: Files, lease: Lease, *, joined: bool = False) -> None:
        self._files = files
        self._lease = lease
        self._renewals = 0
        self.joined = joined
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._keeper = threading.Thread(
            target=self._renew_until_stopped, name=f"lease of {lease.branch}", daemon=True
        )
        self.lost: Fenced | None = None
        """Reason why this driver may not commit any more, as far as known without a request."""

    @property
    def stand_in(self) -> bool:
        """True if the epoch, own or joined, belongs to a stand-in for a driver."""
        return self._lease.stand_in

    @property
    def number(self) -> int:
        """Number of the epoch, from 1. Larger than that of every earlier driver."""
        return self._lease.epoch

    @property
    def identity(self) -> str:
        """Name of the epoch that no other has, of a store that was made again either."""
        return f"{self._lease.branch}/{self.number}/{self._lease.since}"

    def keep(self) -> None:
        """Renew the lease in the background until it is released or lost."""
        if not self.joined:
            self._keeper.start()

    def check(self) -> None:
        """Check that no newer epoch exists.

        Raises: Fenced, from then on at every call; StoreError.
        """
        path = epoch_path(self._lease.branch, self.number + 1)
        if self.lost is None and self._files.exists(path):
            newer = read_lease(self._files, path)
            self.lost = Fenced(
                "another process has taken over this run",
                where=self._files.url(path),
                found=_describe(newer),
                expected=f"no epoch after {self.number}, that of this process",
                do="let the other process run, or end it and start this run again",
            )
        if self.lost is not None:
            raise self.lost

    def check_driver(self) -> None:
        """Do `check`, and check that the driver of a joined epoch is active.

        Raises: Fenced; StoreError.
        """
        self.check()
        if not self.joined:
            return
        held = Epochs(self._files).newest(self._lease.branch)
        if held is not None and held.epoch == self.number and held.expired(SKEW_S):
            raise Fenced(
                "the process that started this task has ended",
                where=self._files.url(epoch_path(self._lease.branch, self.number)),
                found=_describe(held),
                expected="a process that is alive",
                do="start the run again, or press Retry on its flow run",
            )

    def renew(self) -> None:
        """Restart the time of the lease. Raises: Fenced; StoreError."""
        assert not self.joined, "the lease of a joined epoch is its driver's"
        # `release` may run at the same time. A renewal after it would undo the release.
        with self._lock:
            self.check()
            self._write()

    def release(self) -> None:
        """Release the branch, so that the next driver need not wait.

        If the store does not answer, the lease runs out instead.
        """
        self._stopped.set()
        with self._lock:
            if self.lost is None:
                if not self.joined:
                    with suppress(StoreError):
                        self._write(released=True)
                path = epoch_path(self._lease.branch, self.number)
                self.lost = Fenced(
                    "this driver has released the branch", where=self._files.url(path)
                )

    def _write(self, *, released: bool = False) -> None:
        # Count first: a failed write may have arrived, and no name can be written twice.
        self._renewals += 1
        now = clock().isoformat(timespec="milliseconds")
        lease = self._lease.model_copy(update={"renewed": now, "released": released})
        path = epoch_path(lease.branch, self.number, self._renewals)
        self._files.create(path, seal(lease, path))
        if self._renewals > KEPT_RENEWALS:
            self._files.delete(
                epoch_path(lease.branch, self.number, self._renewals - KEPT_RENEWALS)
            )

    def _renew_until_stopped(self) -> None:
        interval_s = self._lease.lease_s / RENEWALS_PER_LEASE
        while self.lost is None and not self._stopped.wait(interval_s):
            # `check` keeps a Fenced in `lost`. After any other error the next renewal may succeed.
            with suppress(Exception):
                self.renew()


def superseded_renewals(names: Iterable[str]) -> set[str]:
    """Return the names of renewals that do not count any more.

    `names`: names of a store's objects. All renewals of replaced epochs are superseded, and all but
    the last one of the newest epoch.
    """
    leases = {name: match for name in names if (match := EPOCH_NAME.fullmatch(name))}
    # Names have fixed widths, so the last one by name is the newest epoch and renewal.
    newest: dict[str, str] = {}
    for name, match in leases.items():
        newest[match[1]] = max(newest.get(match[1], name), name)
    return {name for name, match in leases.items() if match[3] and name != newest[match[1]]}


def clock() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(UTC)


def epochs_folder(branch: str) -> str:
    """Return the folder of a branch's epochs."""
    return f"branches/{branch}/epochs"


def epoch_path(branch: str, number: int, renewal: int = 0) -> str:
    """Return the path of an epoch's record, or of a renewal of its lease."""
    return f"{epochs_folder(branch)}/{number:08d}" + (
        f"/{renewal:08d}.json" if renewal else ".json"
    )


def read_lease(files: Files, path: str) -> Lease:
    """Return the lease at a path.

    Raises: ObjectMissing; ObjectCorrupt, also if the record belongs to another epoch.
    """
    lease = unseal(Lease, files.read(path), files.url(path))
    number = path.removesuffix(".json").partition("/epochs/")[2].partition("/")[0]
    if number != f"{lease.epoch:08d}" or not path.startswith(f"{epochs_folder(lease.branch)}/"):
        raise ObjectCorrupt(
            "the record belongs to another epoch",
            where=files.url(path),
            found=f"epoch {lease.epoch} of {lease.branch}",
            expected="the epoch of its name",
        )
    return lease


def _describe(lease: Lease) -> str:
    holder = lease.holder
    return f"process {holder.pid} on {holder.host} since {lease.since} (epoch {lease.epoch})"
