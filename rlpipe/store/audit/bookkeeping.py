"""The records that stand beside a branch's commits, checked for the audit: epochs, leases,
receipts, tables, notes, gates.

    epochs      numbered from 1 without gaps; every commit was made under one that is there; no lease is dated in the future
    receipts    every commit but the newest has one; each is of an iteration of this branch
    tables      each file has the bytes of its name, and rows of the branch's commits; no committed iteration is left out; where
                the digest of a commit is held, the rows are those that the records give
    notes       each is sealed and of the iteration of its name; so are gates that were opened

What cannot be told from a driver that was killed at the right moment is a note of the report, not a
finding: the newest commit without a receipt, tables that end before it, a lease that is not renewed
any more. A renewal that is removed leaves no trace.

Not here: whether a receipt fits its commit (`audit_reading`), or the objects that no branch refers
to (`explained`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

import numpy as np
import pyarrow.compute as pc

from rlpipe.errors import ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store import notes, receipts
from rlpipe.store.audit.reader import Report, format_ranges, read_or_report
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.branches import commit_name
from rlpipe.store.epochs import (
    EPOCH_NAME,
    SKEW_S,
    Lease,
    clock,
    epoch_path,
    epochs_folder,
    read_lease,
)
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import receipt_path
from rlpipe.store.records import unseal
from rlpipe.store.tables import scalars
from rlpipe.store.tables.scalar_rows import rows_of
from rlpipe.types import Commit

FUTURE_S = 300.0
"""How far a lease may be dated ahead of this machine's clock. Drivers allow SKEW_S; the audit may
run anywhere."""
ATTEMPTS = 3


def check_bookkeeping(
    files: Snapshot,
    report: Report,
    branch: str,
    commits: Sequence[Commit],
    first: int,
    *,
    compared: bool = False,
) -> None:
    """Check what stands beside a branch's own commits.

    `first`: the iteration with which the branch begins. `compared`: are the rows of tables compared
    with the records? That reads every rollout once more.
    """
    check_epochs(files, report, branch, {commit.epoch for commit in commits})
    _check_receipts(files, report, branch, commits, first)
    _check_tables(files, report, branch, {commit.iteration for commit in commits}, first)
    for commit in commits if compared else ():
        _compare_tables(files, report, commit)
    _check_notes(files, report, branch)


def check_epochs(
    files: Snapshot, report: Report, branch: str, used: Collection[int] = ()
) -> list[Lease]:
    """Check the epochs of a branch; the leases that could be read. `used`: epochs under which
    commits were made."""
    paths = [path for path in files.list(epochs_folder(branch)) if EPOCH_NAME.fullmatch(path)]
    numbers = {int(match[2]) for path in paths if (match := EPOCH_NAME.fullmatch(path))}
    named = [number for number in {*numbers, *used} if number > 0]
    for number in range(1, max(named, default=0) + 1):
        if not files.exists(epoch_path(branch, number)):
            problem = "an epoch is missing: epochs are numbered without gaps, and are kept for good"
            report.add_finding("epochs", files.shown(epoch_path(branch, number)), problem)
    leases = {}
    for path in paths:
        lease = read_or_report(
            files,
            report.findings,
            "epochs",
            files.shown(path),
            partial(read_lease, files, path),
            required=False,
        )
        if lease is not None:
            leases[path] = lease
    for path, lease in leases.items():
        _check_lease(files, report, path, lease, leases.get(epoch_path(branch, lease.epoch)))
    return list(leases.values())


def _check_lease(
    files: Snapshot, report: Report, path: str, lease: Lease, taken: Lease | None
) -> None:
    """Check a lease against the one with which its epoch was `taken`."""
    where = files.shown(path)
    latest = clock() + timedelta(seconds=max(FUTURE_S, SKEW_S))
    for name in ("since", "renewed"):
        if datetime.fromisoformat(getattr(lease, name)) > latest:
            report.add_finding(
                "epochs",
                where,
                f"dated in the future: {name} {getattr(lease, name)}; it keeps other drivers out until then",
            )
    if datetime.fromisoformat(lease.renewed) < datetime.fromisoformat(lease.since) - timedelta(
        seconds=FUTURE_S
    ):
        report.add_finding(
            "epochs", where, f"renewed {lease.renewed}, before it was taken: {lease.since}"
        )
    match = EPOCH_NAME.fullmatch(path)
    if match and match[3] and taken is not None:
        other = [
            name
            for name in ("holder", "since", "stand_in")
            if getattr(lease, name) != getattr(taken, name)
        ]
        if other:
            report.add_finding(
                "epochs",
                where,
                f"this renewal is not of its epoch's driver: another {', '.join(other)}",
            )


def _check_receipts(
    files: Snapshot, report: Report, branch: str, commits: Sequence[Commit], first: int
) -> None:
    iterations = {commit.iteration for commit in commits}
    names = files.list(f"branches/{branch}/receipts")
    received = {int(match[1]) for path in names if (match := receipts.RECEIPT_NAME.fullmatch(path))}
    for k in sorted(received):
        if k < first:
            report.add_finding(
                "records",
                files.shown(receipt_path(branch, k)),
                f"a receipt of an iteration before the branch's first, {first}",
            )
    missing = sorted(k for k in iterations - received if not files.exists(receipt_path(branch, k)))
    if missing and not received and len(iterations) > 1:
        report.add_note(
            "records", branch, "no commit has a receipt: they are gone, or are older than receipts"
        )
        return
    for k in missing:
        where = files.shown(receipt_path(branch, k))
        if k + 1 in iterations:
            problem = "the receipt of a commit is gone: the commit that follows writes it if it is missing"
            report.add_finding("records", where, problem)
        elif k in scalars.newest_covered(files, branch):
            report.add_finding(
                "records",
                where,
                "the receipt of a commit is gone: tables have its rows, and are written after it",
            )
        else:
            problem = "the newest commit has no receipt: its driver was killed before it wrote it, or it is gone"
            report.add_note("records", where, problem)


def _check_tables(
    files: Snapshot, report: Report, branch: str, iterations: Collection[int], first: int
) -> None:
    """Check the tables. Files that the run puts together meanwhile come and go: then they are
    looked at again."""
    for _ in range(ATTEMPTS):
        own = Report()
        try:
            live = Files(
                files.root
            )  # the listing of a snapshot may have neither the small files nor the large one
            parts = {table: scalars.parts_of(live, branch, table) for table in scalars.TABLES}
            for table, files_of_it in parts.items():
                for part in files_of_it:
                    _check_part(files, own, branch, table, part, first)
        except ObjectMissing:
            continue
        _check_coverage(files, own, branch, parts, iterations)
        report.merge(own)
        return


def _check_part(
    files: Snapshot, report: Report, branch: str, table: str, part: scalars.Part, first: int
) -> None:
    """Check one file of a table. Raises: ObjectMissing if it was removed since it was listed."""
    where = files.shown(part.path)
    read = partial(scalars.read_part, files, table, part)
    rows = read_or_report(files, report.findings, "tables", where, read, required=False)
    if rows is None:
        if not files.exists(part.path):
            raise ObjectMissing("the file was put together with others", where=where)
        return
    if part.first < first or not files.exists(f"branches/{commit_name(branch, part.end - 1)}.json"):
        problem = f"it is named for iterations {part.first} to {part.end - 1}, which the branch has not all committed"
        report.add_finding("tables", where, problem)
    iterations = rows["iteration"].to_numpy()
    within = bool(np.all((iterations >= part.first) & (iterations < part.end)))
    if not within or set(rows["branch"].to_pylist()) - {branch}:
        report.add_finding(
            "tables",
            where,
            "it has rows of another branch, or of iterations that its name does not have",
        )
    keys = ["iteration", "group_id", "index"] if table == "samples" else ["iteration", "name"]
    if rows.group_by(keys).aggregate([]).num_rows != rows.num_rows:
        report.add_finding("tables", where, "it has a row twice")


def _compare_tables(files: Snapshot, report: Report, commit: Commit) -> None:
    """Compare the rows of one iteration with those that its records give now; what is not there is
    named elsewhere."""
    for table in scalars.TABLES:
        for part in scalars.parts_of(files, commit.branch, table):
            if not part.first <= commit.iteration < part.end:
                continue
            with suppress(StoreError):
                stored = scalars.read_part(files, table, part).filter(
                    pc.field("iteration") == commit.iteration
                )
                drawn = rows_of(files, commit, [table])[table]
                if repr(stored.to_pylist()) != repr(
                    drawn.to_pylist()
                ):  # NaN is no number that equals itself
                    problem = f"its rows of iteration {commit.iteration} are not those of the records: delete it to have it made again"
                    report.add_finding("tables", files.shown(part.path), problem)


def _check_coverage(
    files: Snapshot,
    report: Report,
    branch: str,
    parts: dict[str, list[scalars.Part]],
    iterations: Collection[int],
) -> None:
    """Compare the tables with the commits, and with each other.

    A driver writes the same iterations to one table after the other. Killed between the two it
    leaves the second without the newest file of the first; every other gap is a file that is gone.
    """
    covered = {
        table: {k for part in own for k in range(part.first, part.end)}
        for table, own in parts.items()
    }
    newest = max(
        (part for own in parts.values() for part in own),
        key=lambda part: (part.end, part.first),
        default=None,
    )
    for table, own in covered.items():
        if newest is None:
            return
        where = files.shown(f"branches/{branch}/scalars/{table}")
        missing = sorted(set(iterations) - own)
        pending = [
            k
            for k in missing
            if k >= newest.end or (table != next(iter(covered)) and k >= newest.first)
        ]
        if gone := sorted(set(missing) - set(pending)):
            report.add_finding(
                "tables", where, f"the rows of these iterations are gone: {format_ranges(gone)}"
            )
        if pending:
            report.add_note(
                "tables",
                where,
                f"not yet in the table, it is made when the run goes on: iterations {format_ranges(pending)}",
            )


def _check_notes(files: Snapshot, report: Report, branch: str) -> None:
    for k in notes.noted_iterations(files, branch):
        path = notes.note_path(branch, k)
        read_or_report(
            files,
            report.findings,
            "records",
            commit_name(branch, k),
            partial(notes.read_note, files, branch, k),
        )
    for path in files.list(f"gates/{branch}"):
        if match := notes.GATE_NAME.fullmatch(path):
            read = partial(_read_gate, files, report, path, int(match[2]))
            read_or_report(files, report.findings, "records", files.shown(path), read)


def _read_gate(files: Snapshot, report: Report, path: str, iteration: int) -> None:
    """Read the record of a gate that was opened. Raises: ObjectMissing, ObjectCorrupt."""
    data = files.read(path)
    try:
        said = json.loads(data)
        sealed = "sha256" in said
        found = (
            unseal(notes.OpenedGate, data, files.url(path))
            if sealed
            else notes.OpenedGate.model_validate(said)
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ObjectCorrupt(
            "not the record of a gate", where=files.url(path), found=repr(error)[:200]
        ) from error
    if found.iteration != iteration:
        problem = "this is another iteration's gate"
        raise ObjectCorrupt(
            problem, where=files.url(path), found=found.iteration, expected=iteration
        )
    if not sealed:
        report.add_note(
            "records",
            files.shown(path),
            "not sealed, as gates were at first: its bytes cannot be checked",
        )
