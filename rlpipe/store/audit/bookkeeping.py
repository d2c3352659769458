"""Checks the records of a branch outside its commits: epochs, receipts, tables, notes, gates.

    epochs      numbered from 1 without gaps; the epoch of every commit exists; no lease has a date
                in the future
    receipts    every commit except the newest has one; each belongs to an iteration of this branch
    tables      each file has the bytes of its name, and rows of the branch's commits; no committed
                iteration is missing; with a held digest, the rows equal those of the records
    notes       each is sealed, and belongs to the iteration of its name; so do opened gates

A killed driver can leave the same state as some changes: the newest commit without a receipt,
tables that end before it, a lease without renewal. These are notes of the report, not findings. A
removed renewal leaves no trace.

`reader` checks whether a receipt matches its commit.

Entry points: `check_bookkeeping`, `check_epochs`.
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
from rlpipe.store.audit.findings import Report, format_ranges, read_or_report
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
"""How far the date of a lease may be ahead of this machine's clock. Drivers allow SKEW_S, but an
audit may run on any machine."""
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
    """Check the records of a branch outside its own commits.

    `first`: the first iteration of the branch. `compared`: compare the rows of tables with the
    records, which reads every rollout once more.
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
    """Check the epochs of a branch, and return the readable leases. `used`: epochs of commits."""
    paths = [path for path in files.list(epochs_folder(branch)) if EPOCH_NAME.fullmatch(path)]
    numbers = {int(match[2]) for path in paths if (match := EPOCH_NAME.fullmatch(path))}
    # Commits without a driver, as in tools, have epoch 0.
    named = [number for number in {*numbers, *used} if number > 0]
    for number in range(1, max(named, default=0) + 1):
        if not files.exists(epoch_path(branch, number)):
            problem = "an epoch is missing: epochs are numbered without gaps, and kept forever"
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
    """Check a lease. `taken`: the first lease of its epoch."""
    where = files.shown(path)
    # A lease in the future would keep other drivers out for that long.
    latest = clock() + timedelta(seconds=max(FUTURE_S, SKEW_S))
    for name in ("since", "renewed"):
        time = getattr(lease, name)
        if datetime.fromisoformat(time) > latest:
            problem = f"dated in the future: {name} {time}; it keeps other drivers out until then"
            report.add_finding("epochs", where, problem)
    earliest = datetime.fromisoformat(lease.since) - timedelta(seconds=FUTURE_S)
    if datetime.fromisoformat(lease.renewed) < earliest:
        problem = f"renewed {lease.renewed}, before it was taken: {lease.since}"
        report.add_finding("epochs", where, problem)
    match = EPOCH_NAME.fullmatch(path)
    if match and match[3] and taken is not None:
        other = [
            name
            for name in ("holder", "since", "stand_in")
            if getattr(lease, name) != getattr(taken, name)
        ]
        if other:
            problem = f"the renewal is not from the driver of its epoch: another {', '.join(other)}"
            report.add_finding("epochs", where, problem)


def _check_receipts(
    files: Snapshot, report: Report, branch: str, commits: Sequence[Commit], first: int
) -> None:
    iterations = {commit.iteration for commit in commits}
    names = files.list(f"branches/{branch}/receipts")
    received = {int(match[1]) for path in names if (match := receipts.RECEIPT_NAME.fullmatch(path))}
    for k in sorted(received):
        if k < first:
            problem = f"the receipt belongs to an iteration before the branch's first, {first}"
            report.add_finding("records", files.shown(receipt_path(branch, k)), problem)
    missing = sorted(k for k in iterations - received if not files.exists(receipt_path(branch, k)))
    if missing and not received and len(iterations) > 1:
        problem = "no commit has a receipt: they are gone, or the run is older than receipts"
        report.add_note("records", branch, problem)
        return
    for k in missing:
        where = files.shown(receipt_path(branch, k))
        if k + 1 in iterations:
            problem = "the receipt of a commit is gone: the next commit writes a missing receipt"
            report.add_finding("records", where, problem)
        elif k in scalars.newest_covered(files, branch):
            problem = "the receipt of a commit is gone: tables are written later, and have its rows"
            report.add_finding("records", where, problem)
        else:
            problem = (
                "the newest commit has no receipt: its driver was killed before the write, or the "
                "receipt is gone"
            )
            report.add_note("records", where, problem)


def _check_tables(
    files: Snapshot, report: Report, branch: str, iterations: Collection[int], first: int
) -> None:
    """Check the tables, again if the run merges their files during the check."""
    for _ in range(ATTEMPTS):
        own = Report()
        try:
            # The listing of a snapshot may have neither the small files nor the merged one.
            live = Files(files.root)
            parts = {table: scalars.parts_of(live, branch, table) for table in scalars.TABLES}
            for table, table_parts in parts.items():
                for part in table_parts:
                    _check_part(files, own, branch, table, part, first)
        except ObjectMissing:
            continue
        _check_coverage(files, own, branch, parts, iterations)
        report.merge(own)
        return


def _check_part(
    files: Snapshot, report: Report, branch: str, table: str, part: scalars.Part, first: int
) -> None:
    """Check one file of a table. Raises: ObjectMissing if it was deleted since the listing."""
    where = files.shown(part.path)
    read = partial(scalars.read_part, files, table, part)
    rows = read_or_report(files, report.findings, "tables", where, read, required=False)
    if rows is None:
        if not files.exists(part.path):
            raise ObjectMissing("the file was merged with others", where=where)
        return
    if part.first < first or not files.exists(f"branches/{commit_name(branch, part.end - 1)}.json"):
        problem = (
            f"its name has iterations {part.first} to {part.end - 1}, and the branch has not "
            "committed all of them"
        )
        report.add_finding("tables", where, problem)
    iterations = rows["iteration"].to_numpy()
    within = bool(np.all((iterations >= part.first) & (iterations < part.end)))
    if not within or set(rows["branch"].to_pylist()) - {branch}:
        problem = "it has rows of another branch, or of iterations outside its name"
        report.add_finding("tables", where, problem)
    keys = ["iteration", "group_id", "index"] if table == "samples" else ["iteration", "name"]
    if rows.group_by(keys).aggregate([]).num_rows != rows.num_rows:
        report.add_finding("tables", where, "it has the same row twice")


def _compare_tables(files: Snapshot, report: Report, commit: Commit) -> None:
    """Compare the rows of one iteration with those that its records give."""
    for table in scalars.TABLES:
        for part in scalars.parts_of(files, commit.branch, table):
            if not part.first <= commit.iteration < part.end:
                continue
            with suppress(StoreError):  # other checks report unreadable objects
                stored = scalars.read_part(files, table, part).filter(
                    pc.field("iteration") == commit.iteration
                )
                computed = rows_of(files, commit, [table])[table]
                # Compared as text, because NaN does not equal NaN.
                if repr(stored.to_pylist()) != repr(computed.to_pylist()):
                    problem = (
                        f"its rows of iteration {commit.iteration} are not those of the records: "
                        "delete it, and it is computed again"
                    )
                    report.add_finding("tables", files.shown(part.path), problem)


def _check_coverage(
    files: Snapshot,
    report: Report,
    branch: str,
    parts: dict[str, list[scalars.Part]],
    iterations: Collection[int],
) -> None:
    """Compare the iterations of the tables with the commits, and with each other."""
    # A driver writes the same iterations to one table after the other. If it is killed in between,
    # the second table lacks the newest file of the first. Every other gap is a lost file.
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
            problem = f"the rows of these iterations are gone: {format_ranges(gone)}"
            report.add_finding("tables", where, problem)
        if pending:
            problem = (
                f"iterations {format_ranges(pending)} are not in the table yet; the run adds them "
                "when it continues"
            )
            report.add_note("tables", where, problem)


def _check_notes(files: Snapshot, report: Report, branch: str) -> None:
    for k in notes.noted_iterations(files, branch):
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
    """Read the record of an opened gate. Raises: ObjectMissing, ObjectCorrupt."""
    data = files.read(path)
    try:
        content = json.loads(data)
        # The first records of gates had no seal.
        sealed = "sha256" in content
        gate = (
            unseal(notes.OpenedGate, data, files.url(path))
            if sealed
            else notes.OpenedGate.model_validate(content)
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ObjectCorrupt(
            "not a readable record of a gate", where=files.url(path), found=repr(error)[:200]
        ) from error
    if gate.iteration != iteration:
        raise ObjectCorrupt(
            "the gate belongs to another iteration",
            where=files.url(path),
            found=gate.iteration,
            expected=iteration,
        )
    if not sealed:
        problem = "no seal, as in early records of gates: its bytes cannot be checked"
        report.add_note("records", files.shown(path), problem)
