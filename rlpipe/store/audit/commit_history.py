"""Reads the commits of a branch and of its origins for the audit, with gaps and lost commits.

Entry points: `history`, `committed_before`, `lost_commits`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rlpipe.store import receipts
from rlpipe.store.audit.findings import Finding, read_or_report
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.branches import Branches, commit_name, parse_commit_name
from rlpipe.store.objects.files import Files
from rlpipe.store.tables import scalars
from rlpipe.types import Commit

MOST_GAPS = 100
"""Consecutive missing commits that are reported one by one. A longer gap is one finding."""


class History(NamedTuple):
    """The commits of a branch and of its origins."""

    commits: list[Commit]
    """Readable commits, newest first."""
    inits: list[str]
    """Digests of the nodes of the first weights."""
    first: int
    """First iteration of the branch itself."""
    rooted: bool
    """True if every configuration is readable, so that `inits` is complete."""
    findings: list[Finding]


def history(files: Snapshot, branch: str) -> History:
    """Read the history of a branch.

    An unreadable commit or configuration is a finding. The history then continues with the
    iteration before, or with the origin that the configuration or the oldest commit names. Raises:
    ObjectMissing if the branch does not exist.
    """
    branches = Branches(files)
    findings = list[Finding]()
    commits: list[Commit] = []
    inits: list[str] = []
    first_of: dict[str, int] = {}
    unread = 0
    if not files.names_below(f"branches/{branch}"):
        branches.get(branch)  # raises ObjectMissing
    name = branch
    last = None
    # A damaged configuration may name a descendant as its origin, hence the second condition.
    while name is not None and name not in first_of:
        record = read_or_report(files, findings, "records", name, partial(branches.get, name))
        unread += record is None
        origin = record.parent if record else None
        if record:
            inits.append(record.init)
        numbers = [k for k in branches.committed(name) if last is None or k <= last]
        if origin:
            first_of[name] = parse_commit_name(origin)[1] + 1
        else:
            first_of[name] = 0 if record else min(numbers, default=0)
        end = max(numbers, default=first_of[name] - 1) + 1 if last is None else last + 1
        own = _own_commits(files, findings, name, range(first_of[name], end), numbers, origin)
        # Without the configuration the oldest commit still names the origin of a fork.
        if record is None and own and own[-1].parent:
            origin = own[-1].parent
        commits += own
        name, last = parse_commit_name(origin) if origin else (None, None)
    return History(commits, list(dict.fromkeys(inits)), first_of[branch], unread == 0, findings)


def _own_commits(
    files: Snapshot,
    findings: list[Finding],
    branch: str,
    expected: range,
    numbers: Sequence[int],
    origin: str | None,
) -> list[Commit]:
    """Return the readable commits of a branch itself, newest first.

    `numbers`: the listed iterations. `origin`: the parent commit of a fork.
    """
    branches = Branches(files)
    commits = list[Commit]()
    listed = set(numbers)
    for start, end in _gaps(expected, listed):
        if end - start > MOST_GAPS:
            problem = f"the commits {start} to {end - 1} are missing, and later ones exist"
            findings.append(Finding("records", commit_name(branch, start), problem))
        else:
            # Reading a missing commit makes a finding.
            listed |= set(range(start, end))
    for k in sorted(listed, reverse=True):
        where = commit_name(branch, k)
        commit = read_or_report(
            files, findings, "records", where, partial(branches.read, branch, k)
        )
        if commit is None:
            continue
        commits.append(commit)
        if k < expected.start:
            problem = f"the branch begins with iteration {expected.start}"
            findings.append(Finding("records", where, problem))
            continue
        before = origin if k == expected.start else commit_name(branch, k - 1)
        if commit.parent != before and (origin or k > expected.start):
            problem = f"its parent is {commit.parent}, the history of its branch has {before}"
            findings.append(Finding("records", where, problem))
    return commits


def _gaps(expected: range, listed: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each run of expected numbers that are not listed."""
    before = expected.start
    for number in [*sorted(k for k in listed if k in expected), expected.stop]:
        if number > before:
            yield before, number
        before = number + 1


def committed_before(files: Files, branch: str) -> set[int]:
    """Return the iterations of a branch that were committed, by evidence other than commits.

    Receipts and tables are written only after a commit.
    """
    names = files.list(f"branches/{branch}/receipts")
    received = {int(match[1]) for name in names if (match := receipts.RECEIPT_NAME.fullmatch(name))}
    return received | scalars.newest_covered(files, branch)


def lost_commits(files: Files, branch: str, committed: Iterable[int]) -> list[Finding]:
    """Return findings for committed iterations after the newest commit.

    `history` reports those that are missing before it.
    """
    newest = max(Branches(files).committed(branch), default=-1)
    problem = "its commit is gone: a receipt or the tables of the run show that it was committed"
    return [
        Finding("records", commit_name(branch, k), problem) for k in sorted(committed) if k > newest
    ]
