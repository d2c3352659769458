"""Check the chain of a history: is each record the one that a commit named?

    chain    each commit has the bytes that the commit after it names; each record has the bytes
             that a commit names; each commit names the digest of its parent

By itself this finds a record that was rewritten with its seal, but not with every later commit.
With a digest that was kept elsewhere (`head`: the sha256 of a commit, or its first 16 digits or
more) it finds all of them: either everything below that commit is as it was, or the change is
named, or no commit has the digest. A `Proof` then says how far the digest reaches. Notes name the
records that it does not fix: newer commits and leaves.

A public key may take the place of a digest (`signatures`): the newest commit that is signed with
it must be right.

A checkpoint that garbage collection removed is no finding, as it wrote down which bytes it removed
(`receipts`). A person who may delete objects can write such a record too, so the audit proves that
nothing was changed, but not that every removal was garbage collection's.

The rest of the audit compares data files with the digests in their nodes (`audit_reading`), and
tables with the records if a head is given (`bookkeeping`). Epochs, receipts and notes are not
fixed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.audit.reader import Report, format_ranges, read_or_report
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
STATES = (f"nodes/{Stage.INIT}/", f"nodes/{Stage.SEGMENT}/")
"""Where the states are recorded that no train node made."""


class Proof(NamedTuple):
    """What a held digest fixes."""

    head: str
    """The whole digest."""
    commit: str
    """Name of the commit that has it."""
    first: str
    """Name of the oldest commit that it fixes with all its records."""
    commits: int
    records: int
    broken: bool
    """True if a record or file of the history is not as it was."""

    def __str__(self) -> str:
        what = f"{self.commit} has the digest {self.head}"
        if not self.commits:
            return f"{what}: it proves the bytes of that commit alone, which names no digests"
        if self.broken:
            return f"{what}, but its history is not all as it was: see the findings"
        return f"{what}: it proves {self.commits} commits down to {self.first}, and {self.records} records with their files"


def checked_head(head: str) -> str:
    """A digest as it can be looked for. Raises: ConfigError if it is none, or too short to prove
    anything.
    """
    found = head.strip().lower()
    if not HEAD.fullmatch(found):
        raise ConfigError(
            "not the digest of a commit",
            where="--head",
            found=head,
            expected="16 to 64 hexadecimal digits",
        )
    return found


def check_chain(
    files: Snapshot,
    report: Report,
    branch: str,
    commits: Sequence[Commit],
    evaluations: Mapping[str, Sequence[Node]],
    head: str | None = None,
) -> None:
    """Check the chain of a branch's history. `commits`: newest first, as far as they can be read.
    `evaluations`: by state.

    Raises: StoreError if the store does not answer.
    """
    _Chain(files, report, branch, commits, evaluations).check(head)


def signed_head(
    files: Snapshot, report: Report, commits: Sequence[Commit], key: PublicKey
) -> str | None:
    """The digest in the newest signature of a history that was made with a key; None, and a
    finding, if there is none.

    A signature that was not made with the key that it names is a finding as well.
    """
    found: str | None = None
    for commit in commits:
        path = signature_path(commit.branch, commit.iteration)
        if not files.exists(path):
            continue
        signature = read_or_report(
            files, report.findings, "chain", files.shown(path), partial(read_signature, files, path)
        )
        if signature is None or not key.of(signature):
            continue
        if not key.signed(signature):
            report.add_finding(
                "chain",
                files.shown(path),
                "its signature was not made with the key that it names, or it was changed",
            )
        elif found is None:
            found = signature.commit
    if found is None:
        where = files.shown(f"branches/{commits[0].branch}/signatures") if commits else files.root
        report.add_finding("chain", where, "no commit of the history is signed with this key")
    return found


class _Chain:
    """One history, and which of its records a commit has named."""

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
        """Leaves that garbage collection took."""
        self._named_as_missing = {one.where for one in report.findings} | {
            one.problem for one in report.findings
        }

    def check(self, head: str | None) -> None:
        """Compare every digest; with a `head`, say what it proves."""
        broken = [self._check_commit(commit) for commit in self._commits]
        if head is not None:
            self._prove(head, broken)
        if self._collected and head is not None:
            where = self._files.shown(f"branches/{self._branch}")
            problem = f"{len(self._collected)} checkpoints that its commits name were removed by garbage collection"
            self._report.add_note(
                "chain", where, f"{problem}: {', '.join(sorted(self._collected)[:5])}"
            )

    def _check_commit(self, commit: Commit) -> bool:
        """Check what one commit names. Answers if something is not as it was."""
        if commit.parent_sha256 is None:
            self._wrong(_path(commit), "it names no digest of its parent, as every commit does")
            return True
        where = commit_name(commit.branch, commit.iteration)
        parent = f"branches/{commit.parent}.json" if commit.parent else config_path(commit.branch)
        named = {parent: commit.parent_sha256, **commit.records, **commit.leaves}
        with ThreadPoolExecutor(READERS) as pool:
            found = dict(zip(named, pool.map(self._digest, named), strict=True))
        different = [path for path, sha256 in named.items() if found[path] != sha256]
        wrong = [
            path for path in different if self._is_wrong(where, path, named[path], found[path])
        ]
        return bool(wrong)

    def _digest(self, path: str) -> str | None:
        """sha256 of an object; None if it is not there, or cannot be read (which is a finding of
        the other checks).
        """
        try:
            return self._files.digest_of(path)
        except (ObjectMissing, ObjectCorrupt):
            return None
        except StoreError:
            self._files.check_reachable()
            return None

    def _is_wrong(self, where: str, path: str, expected: str, found: str | None) -> bool:
        """Name an object that is not the one that a commit named. Answers if it is a finding."""
        match path.split("/"):
            case ["nodes", stage, name] if stage in LEAVES:
                if self._was_removed(Stage(stage), name.removesuffix(".json"), expected):
                    self._collected.append(path if found is None else f"{path} (made again since)")
                    return False
        if found is not None:
            problem = f"it was changed: {where} names it with sha256 {expected}, found is {found}"
            self._wrong(path, problem)
        elif not self._is_named(path):
            self._wrong(path, f"it cannot be read, and {where} names it with sha256 {expected}")
        return True

    def _was_removed(self, stage: Stage, digest: str, sha256: str) -> bool:
        try:
            return self._receipts.was_removed(stage, digest, sha256)
        except ObjectCorrupt:  # named by `explained`
            return False

    def _is_named(self, path: str) -> bool:
        """True if the other checks have named an object that cannot be read."""
        stem = path.rpartition("/")[2].removesuffix(".json")
        known = (
            (path, stem)
            if len(stem) == 64
            else (path, path.removeprefix("branches/").removesuffix(".json"))
        )
        return any(name in said for name in known for said in self._named_as_missing)

    def _wrong(self, path: str, problem: str) -> None:
        self._report.add_finding("chain", self._files.shown(path), problem)

    def _prove(self, head: str, broken: Sequence[bool]) -> None:
        """Say what a held digest fixes, and name what it does not."""
        digests = [self._digest(_path(commit)) for commit in self._commits]
        number = next(
            (number for number, digest in enumerate(digests) if digest and digest.startswith(head)),
            None,
        )
        if number is None:
            newest = (
                f"the newest is {_name(self._commits[0])} with {digests[0]}"
                if self._commits
                else "there is none"
            )
            self._wrong(
                f"branches/{self._branch}",
                f"no commit of its history has the digest {head}: it or a commit below it was rewritten or "
                f"removed, or the digest is of another run; {newest}",
            )
            return
        below = list(self._commits[number:])
        reached = _unbroken(below)
        linked = [commit for commit in reached if commit.parent_sha256 is not None]
        fixed = {path for commit in linked for path in (*commit.records, *commit.leaves)}
        torn = len(linked) == len(reached) < len(below)
        damaged = any(one.rule in ("files", "records") for one in self._report.findings)
        wrong = torn or damaged or any(broken[number : number + len(linked)])
        self._report.proof = Proof(
            digests[number] or head,
            _name(below[0]),
            _name([*below[:1], *linked][-1]),
            len(linked),
            len(fixed),
            wrong,
        )
        if number:
            newer = (
                f"{_name(self._commits[number - 1])} to {_name(self._commits[0])}"
                if number > 1
                else _name(self._commits[0])
            )
            self._note(
                _path(self._commits[number - 1]),
                f"newer than the digest, which does not fix it: {newer}",
            )
        self._note_unfixed(below, fixed)

    def _note_unfixed(self, commits: Sequence[Commit], fixed: set[str]) -> None:
        """Name the records of a history that no commit of it names."""
        chained = [commit for commit in commits if commit.parent_sha256 is not None]
        own = {
            node_path(stage, digest) for commit in chained for stage, digest in commit.nodes.items()
        }
        states = {commit.nodes[Stage.TRAIN] for commit in commits if Stage.TRAIN in commit.nodes}
        states |= {
            path.rpartition("/")[2].removesuffix(".json")
            for path in fixed
            if path.startswith(STATES)
        }
        segments = {
            path
            for branch in {commit.branch for commit in commits}
            for path in self._segments(branch)
        }
        leaves = {
            path
            for state in states
            for path in leaf_paths(
                state, (node.digest for node in self._evaluations.get(state, ()))
            )
        }
        branches = {commit.branch for commit in chained}
        names = {_name(commit) for commit in chained}
        listed = [path for branch in branches for path in self._files.list(f"gates/{branch}")]
        gates = [path for path in listed if path.removeprefix("gates/").rpartition("-")[0] in names]
        configs = {config_path(branch) for branch in {self._branch, *branches}}
        for path in sorted({*own, *leaves, *segments, *gates, *configs} - fixed):
            if self._files.exists(path):
                self._note(
                    path,
                    "not fixed by the digest: it was recorded after that commit, or stands beside the commits",
                )
        if noted := noted_iterations(self._files, self._branch):
            problem = (
                f"iterations that are noted without a commit are not fixed: {format_ranges(noted)}"
            )
            self._note(f"rollouts/{self._branch}", problem)

    def _segments(self, branch: str) -> list[str]:
        return self._files.list(f"branches/{branch}/segments")

    def _note(self, path: str, problem: str) -> None:
        self._report.add_note("chain", self._files.shown(path), problem)


def _unbroken(commits: Sequence[Commit]) -> list[Commit]:
    """The commits from the first one on that a chain of digests reaches, the commit of an older
    rlpipe where it ends too.
    """
    found: list[Commit] = []
    for commit in commits:
        if found and (
            found[-1].parent_sha256 is None
            or found[-1].parent != commit_name(commit.branch, commit.iteration)
        ):
            break
        found.append(commit)
    return found


def _name(commit: Commit) -> str:
    return commit_name(commit.branch, commit.iteration)


def _path(commit: Commit) -> str:
    return commit_path(commit.branch, commit.iteration)
