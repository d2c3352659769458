"""Checks the chain of a history: every record has the bytes that a commit named.

    chain    each commit has the bytes that the next commit names; each record has the bytes that a
             commit names; each commit names the digest of its parent

The check alone finds a record that was rewritten with its seal, unless every later commit was
rewritten too. With a digest that was kept outside the store (`head`: the sha256 of a commit, or at
least its first 16 digits) it finds all of them. Then either everything below that commit is
unchanged, or a finding names the change, or no commit has the digest. A `Proof` says how far the
digest reaches. Notes name the records that it does not fix: newer commits and leaves.

A public key can replace the digest (`signatures`): the newest commit that is signed with it is the
head.

A checkpoint that garbage collection removed is no finding, because the collection recorded the
removed bytes (`receipts`). A person with permission to delete can write such a record too. So the
audit proves that nothing was changed, but not that garbage collection did every removal.

Other checks compare data files with the digests in their nodes (`reader`), and, if a head is given,
tables with the records (`bookkeeping`). Epochs, receipts and notes are not fixed by the chain.

Entry points: `check_chain`, `signed_head`, `checked_head`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.audit.findings import Report, format_ranges, read_or_report
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.branches import commit_name, commit_path, config_path
from rlpipe.store.chain import leaf_paths
from rlpipe.store.nodes import LEAVES, node_path
from rlpipe.store.notes import noted_iterations
from rlpipe.store.receipts import Receipts
from rlpipe.store.signatures import PublicKey, read_signature, signature_path
from rlpipe.types import Commit, Node, Stage

HEAD = re.compile(r"[0-9a-f]{16,64}")
READERS = 8
OTHER_STATES = (f"nodes/{Stage.INIT}/", f"nodes/{Stage.SEGMENT}/")
"""Folders of the states that no train node made."""


class Proof(NamedTuple):
    """The part of a history that a held digest fixes."""

    head: str
    """The whole digest."""
    commit: str
    """Name of the commit with this digest."""
    first: str
    """Name of the oldest commit that is fixed together with its records."""
    commits: int
    records: int
    broken: bool
    """True if a record or file of the history was changed."""

    def __str__(self) -> str:
        head = f"{self.commit} has the digest {self.head}"
        if not self.commits:
            return f"{head}: it proves only the bytes of that commit, which names no digests"
        if self.broken:
            return f"{head}, but its history was changed: see the findings"
        return (
            f"{head}: it proves {self.commits} commits down to {self.first}, and {self.records} "
            "records with their files"
        )


def checked_head(head: str) -> str:
    """Return a digest in lower case.

    Raises: ConfigError if it is not a digest, or too short to prove anything.
    """
    normalized = head.strip().lower()
    if not HEAD.fullmatch(normalized):
        raise ConfigError(
            "not the digest of a commit",
            where="--head",
            found=head,
            expected="16 to 64 hexadecimal digits",
        )
    return normalized


def check_chain(
    files: Snapshot,
    report: Report,
    branch: str,
    commits: Sequence[Commit],
    evaluations: Mapping[str, Sequence[Node]],
    head: str | None = None,
) -> None:
    """Check the chain of a branch's history.

    `commits`: the readable commits, newest first. `evaluations`: evaluation nodes by state. Raises:
    StoreError if the store does not answer.
    """
    _ChainCheck(files, report, branch, commits, evaluations).check(head)


def signed_head(
    files: Snapshot, report: Report, commits: Sequence[Commit], key: PublicKey
) -> str | None:
    """Return the digest in the newest signature with a key; add a finding if no commit has one.

    An invalid signature in the name of the key is a finding as well.
    """
    head: str | None = None
    for commit in commits:
        path = signature_path(commit.branch, commit.iteration)
        if not files.exists(path):
            continue
        signature = read_or_report(
            files, report.findings, "chain", files.shown(path), partial(read_signature, files, path)
        )
        # A run may have been signed with several keys in turn.
        if signature is None or not key.of(signature):
            continue
        if not key.signed(signature):
            problem = "the signature is invalid: it was changed, or made with another key"
            report.add_finding("chain", files.shown(path), problem)
        elif head is None:
            head = signature.commit
    if head is None:
        where = files.shown(f"branches/{commits[0].branch}/signatures") if commits else files.root
        report.add_finding("chain", where, "no commit of the history is signed with this key")
    return head


class _ChainCheck:
    """Check of one history."""

    def __init__(
        self,
        files: Snapshot,
        report: Report,
        branch: str,
        commits: Sequence[Commit],
        evaluations: Mapping[str, Sequence[Node]],
    ) -> None:
        self._files = files
        self._report = report
        self._branch = branch
        self._commits = commits
        self._evaluations = evaluations
        self._receipts = Receipts(files)
        self._collected: list[str] = []
        """Leaves that garbage collection removed."""
        self._reported = {one.where for one in report.findings} | {
            one.problem for one in report.findings
        }
        """Texts of the findings of other checks."""

    def check(self, head: str | None) -> None:
        """Compare every digest. With a `head`, report what it proves."""
        broken = [self._is_broken(commit) for commit in self._commits]
        if head is not None:
            self._prove(head, broken)
        if self._collected and head is not None:
            where = self._files.shown(f"branches/{self._branch}")
            examples = ", ".join(sorted(self._collected)[:5])
            problem = (
                f"garbage collection removed {len(self._collected)} checkpoints that its commits "
                f"name: {examples}"
            )
            self._report.add_note("chain", where, problem)

    def _is_broken(self, commit: Commit) -> bool:
        """Check the records that a commit names. True if there is a finding."""
        if commit.parent_sha256 is None:
            self._add_finding(_path(commit), "it names no digest of its parent")
            return True
        where = _name(commit)
        # The chain of a root branch begins with its configuration (`chain.link_commit`).
        parent = f"branches/{commit.parent}.json" if commit.parent else config_path(commit.branch)
        expected = {parent: commit.parent_sha256, **commit.records, **commit.leaves}
        with ThreadPoolExecutor(READERS) as pool:
            stored = dict(zip(expected, pool.map(self._digest, expected), strict=True))
        different = [path for path, sha256 in expected.items() if stored[path] != sha256]
        wrong = [
            path for path in different if self._is_wrong(where, path, expected[path], stored[path])
        ]
        return bool(wrong)

    def _digest(self, path: str) -> str | None:
        """Return the sha256 of an object; None if it is missing or unreadable."""
        # Other checks report unreadable objects.
        try:
            return self._files.digest_of(path)
        except (ObjectMissing, ObjectCorrupt):
            return None
        except StoreError:
            self._files.check_reachable()
            return None

    def _is_wrong(self, where: str, path: str, expected: str, stored: str | None) -> bool:
        """Report an object that differs from the one that the commit `where` named.

        False if garbage collection removed it.
        """
        # Only leaves may be removed from a run that stays. The record of the removal has the bytes.
        match path.split("/"):
            case ["nodes", stage, name] if stage in LEAVES:
                if self._was_removed(Stage(stage), name.removesuffix(".json"), expected):
                    again = "" if stored is None else " (recorded again since)"
                    self._collected.append(path + again)
                    return False
        if stored is not None:
            problem = f"it was changed: {where} names it with sha256 {expected}, found is {stored}"
            self._add_finding(path, problem)
        elif not self._is_reported(path):
            problem = f"it cannot be read, and {where} names it with sha256 {expected}"
            self._add_finding(path, problem)
        return True

    def _was_removed(self, stage: Stage, digest: str, sha256: str) -> bool:
        try:
            return self._receipts.was_removed(stage, digest, sha256)
        except ObjectCorrupt:  # `reachability` reports it
            return False

    def _is_reported(self, path: str) -> bool:
        """True if another check has reported an unreadable object."""
        # Other checks name a node or plan by digest, and a commit or configuration by branch.
        stem = path.rpartition("/")[2].removesuffix(".json")
        names = (
            (path, stem)
            if len(stem) == 64
            else (path, path.removeprefix("branches/").removesuffix(".json"))
        )
        return any(name in text for name in names for text in self._reported)

    def _prove(self, head: str, broken: Sequence[bool]) -> None:
        """Report the part of the history that a held digest fixes, and the records outside it."""
        digests = [self._digest(_path(commit)) for commit in self._commits]
        number = next(
            (number for number, digest in enumerate(digests) if digest and digest.startswith(head)),
            None,
        )
        if number is None:
            self._report_unknown_head(head, digests)
            return
        # Commits are newest first: those before `number` are newer than the digest.
        below = list(self._commits[number:])
        connected = _connected(below)
        linked = [commit for commit in connected if commit.parent_sha256 is not None]
        fixed = {path for commit in linked for path in (*commit.records, *commit.leaves)}
        # A commit is missing or unreadable, and older commits exist.
        torn = len(linked) == len(connected) < len(below)
        # The chain fixes nodes, and nodes fix files. So a damaged file breaks the proof as well.
        damaged = any(one.rule in ("files", "records") for one in self._report.findings)
        self._report.proof = Proof(
            head=digests[number] or head,
            commit=_name(below[0]),
            first=_name([*below[:1], *linked][-1]),
            commits=len(linked),
            records=len(fixed),
            broken=torn or damaged or any(broken[number : number + len(linked)]),
        )
        if number:
            oldest = self._commits[number - 1]
            newer = _name(self._commits[0])
            if number > 1:
                newer = f"{_name(oldest)} to {newer}"
            self._add_note(_path(oldest), f"newer than the digest, so not fixed by it: {newer}")
        self._note_unfixed(below, fixed)

    def _report_unknown_head(self, head: str, digests: Sequence[str | None]) -> None:
        newest = "the history has no commit"
        if self._commits:
            newest = f"the newest is {_name(self._commits[0])} with {digests[0]}"
        self._add_finding(
            f"branches/{self._branch}",
            f"no commit of its history has the digest {head}: it or a commit below it was "
            f"rewritten or removed, or the digest belongs to another run; {newest}",
        )

    def _note_unfixed(self, commits: Sequence[Commit], fixed: set[str]) -> None:
        """Name the records of a history that no commit of it names."""
        linked = [commit for commit in commits if commit.parent_sha256 is not None]
        own = {
            node_path(stage, digest) for commit in linked for stage, digest in commit.nodes.items()
        }
        states = {commit.nodes[Stage.TRAIN] for commit in commits if Stage.TRAIN in commit.nodes}
        states |= {
            path.rpartition("/")[2].removesuffix(".json")
            for path in fixed
            if path.startswith(OTHER_STATES)
        }
        segments = {
            path
            for branch in {commit.branch for commit in commits}
            for path in self._files.list(f"branches/{branch}/segments")
        }
        leaves = {
            path
            for state in states
            for path in leaf_paths(
                state, (node.digest for node in self._evaluations.get(state, ()))
            )
        }
        branches = {commit.branch for commit in linked}
        names = {_name(commit) for commit in linked}
        listed = [path for branch in branches for path in self._files.list(f"gates/{branch}")]
        gates = [path for path in listed if path.removeprefix("gates/").rpartition("-")[0] in names]
        configs = {config_path(branch) for branch in {self._branch, *branches}}
        for path in sorted({*own, *leaves, *segments, *gates, *configs} - fixed):
            if self._files.exists(path):
                self._add_note(
                    path,
                    "not fixed by the digest: recorded after that commit, or not part of the chain",
                )
        if noted := noted_iterations(self._files, self._branch):
            problem = f"iterations without a commit are not fixed: {format_ranges(noted)}"
            self._add_note(f"rollouts/{self._branch}", problem)

    def _add_finding(self, path: str, problem: str) -> None:
        self._report.add_finding("chain", self._files.shown(path), problem)

    def _add_note(self, path: str, problem: str) -> None:
        self._report.add_note("chain", self._files.shown(path), problem)


def _connected(commits: Sequence[Commit]) -> list[Commit]:
    """Return the commits, from the first on, that a chain of digests connects.

    A commit without a digest of its parent is the last one.
    """
    connected: list[Commit] = []
    for commit in commits:
        if connected and (
            connected[-1].parent_sha256 is None or connected[-1].parent != _name(commit)
        ):
            break
        connected.append(commit)
    return connected


def _name(commit: Commit) -> str:
    return commit_name(commit.branch, commit.iteration)


def _path(commit: Commit) -> str:
    return commit_path(commit.branch, commit.iteration)
