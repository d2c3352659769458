"""Branches: a run is a chain of commits, one per iteration, each written once.

Iterations are numbered without gaps. The first commit of a root branch has iteration 0 and no
parent; that of a fork goes on from its parent's. A commit is refused unless its parent is there, so
what `newest` returns always has its whole history. Along a branch the epochs of its commits never
go down. After each commit its receipt is written, which outlives it. Each commit names the digests
of its parent and of its records (`chain`).

Not here: who may commit (`epochs`), or what a commit's nodes hold (`nodes`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any
from uuid import uuid4

from pydantic import Field

from rlpipe.errors import Fenced, ObjectConflict, ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.chain import link_commit
from rlpipe.store.nodes import refuse_unknown_contract
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import CHAIN_KEYS, PROVENANCE_KEYS, Receipts
from rlpipe.store.records import now, seal, unseal
from rlpipe.types import CONTRACTS, Commit, Record, Stage, VersionedRecord

CONFIG_NAME = re.compile(r"branches/[^/]+/config\.json")
COMMIT_NAME = re.compile(r"branches/([^/]+)/([0-9]{8})\.json")
TIMING_KEYS = {"leaves", "awaited"}
"""Keys of the chain in which two commits of one result may differ: a checkpoint was recorded
between them."""


class Branch(VersionedRecord):
    """What a branch is, from the start: its configuration, its first weights, and what it was
    forked from."""

    branch: str
    config: dict[str, Any]
    init: str
    """Digest of the node of its first weights."""
    parent: str | None = None
    """`branch/%08d` of the commit it goes on from; None for a root branch."""
    contracts: dict[Stage, int] = Field(default_factory=dict)
    """Version of each stage's contract, for as long as the branch is there; of a stage that is not
    named it is 1."""
    created: str = ""


def commit_name(branch: str, iteration: int) -> str:
    """`branch/%08d`: how a commit is named as a parent."""
    return f"{branch}/{iteration:08d}"


def parse_commit_name(name: str) -> tuple[str, int]:
    """Branch and iteration of a commit's name. Raises: ValueError."""
    branch, separator, iteration = name.rpartition("/")
    if not separator or commit_name(branch, int(iteration)) != name:
        raise ValueError(f"not the name of a commit: {name!r}")
    return branch, int(iteration)


class Branches:
    """The branches of a store."""

    def __init__(self, files: Files) -> None:
        self._files, self._receipts = files, Receipts(files)
        self._known: dict[str, Branch] = {}

    def names(self) -> list[str]:
        """All branches, sorted."""
        return [
            path.split("/")[1]
            for path in self._files.list("branches")
            if path.endswith("/config.json")
        ]

    def create(
        self, branch: str, config: Mapping[str, Any], init: str, parent: str | None = None
    ) -> Branch:
        """Start a branch, or find it started in just this way. `parent`: the commit that it is a
        fork of.

        Raises: ObjectConflict if the name is taken by another run; ObjectMissing if the parent is
        not there.
        """
        if parent is not None:
            self.read(*parse_commit_name(parent))
        record = Branch(
            branch=branch,
            config=dict(config),
            init=init,
            parent=parent,
            contracts=dict(CONTRACTS),
            created=now(),
        )
        path = config_path(branch)
        try:
            self._files.create(path, seal(record, path))
        except ObjectConflict as error:
            found = self.get(branch)
            if (
                found.model_copy(update={"created": record.created, "contracts": record.contracts})
                == record
            ):
                return found
            raise ObjectConflict(
                "there is a run of this name with another configuration or start",
                where=self._files.url(path),
                found=f"other values of {[key for key in _differing_keys(found, record) if key != 'contracts']}",
                do="resume it with its own configuration, fork it, or take another name",
            ) from error
        return record

    def get(self, branch: str) -> Branch:
        """What the branch is. Raises: ObjectMissing, ObjectCorrupt."""
        if branch not in self._known:
            path = config_path(branch)
            record = unseal(Branch, self._files.read(path), self._files.url(path))
            if record.branch != branch or not _is_commit_name(record.parent):
                found = f"{record.branch}, a fork of {record.parent}"
                raise ObjectCorrupt(
                    "this is another branch",
                    where=self._files.url(path),
                    found=found,
                    expected=branch,
                )
            for stage, version in record.contracts.items():
                refuse_unknown_contract(stage, version, self._files.url(path))
            self._known[branch] = record
        return self._known[branch]

    def find(self, branch: str) -> Branch | None:
        """What the branch is, or None if there is none. Raises: ObjectCorrupt."""
        try:
            return self.get(branch)
        except ObjectMissing:
            return None

    def config(self, branch: str) -> dict[str, Any]:
        """The configuration the branch was created with. Raises: ObjectMissing, ObjectCorrupt."""
        return self.get(branch).config

    def contracts(self, branch: str) -> dict[Stage, int]:
        """Version of each stage's contract on a branch; of one that is not begun yet, the newest.
        Raises: ObjectCorrupt."""
        record = self.find(branch)
        return (
            dict(CONTRACTS)
            if record is None
            else {stage: record.contracts.get(stage, 1) for stage in Stage}
        )

    def newest(self, branch: str, after: int | None = None) -> Commit | None:
        """The commit to go on from: the newest, or the parent of a fork that has none, or None.

        `after` is an iteration known to be committed: only what follows it is looked for, without a
        listing. Raises: ObjectMissing if there is no such branch, or `after` is not committed;
        ObjectCorrupt.
        """
        record = self.get(branch)
        if after is not None:
            return self.read(branch, [after, *self.committed(branch, after)][-1])
        if committed := self.committed(branch):
            return self.read(branch, committed[-1])
        return self.read(*parse_commit_name(record.parent)) if record.parent else None

    def committed(self, branch: str, after: int | None = None) -> list[int]:
        """The iterations that a branch has committed itself, in order. `after`: as `newest`; those
        that follow it."""
        if after is not None:
            return list(
                takewhile(lambda k: self._files.exists(commit_path(branch, k)), count(after + 1))
            )
        return [
            int(match[2])
            for path in self._files.list(f"branches/{branch}")
            if (match := COMMIT_NAME.fullmatch(path))
        ]

    def read(self, branch: str, iteration: int) -> Commit:
        """One commit. Raises: ObjectMissing; ObjectCorrupt also if it is another one, or does not
        follow the one before it."""
        return self.read_stored(branch, iteration)[0]

    def read_stored(self, branch: str, iteration: int) -> tuple[Commit, str]:
        """One commit, and the sha256 of its bytes: the head of the history up to it. Raises: as
        `read`."""
        path = commit_path(branch, iteration)
        data = self._files.read(path)
        commit = unseal(Commit, data, self._files.url(path))
        if (commit.branch, commit.iteration) != (branch, iteration) or not _follows(commit):
            found = f"{commit_name(commit.branch, commit.iteration)} after {commit.parent}"
            raise ObjectCorrupt(
                "this is another commit",
                where=self._files.url(path),
                found=found,
                expected="one that follows",
            )
        return commit, hashlib.sha256(data).hexdigest()

    def parent_name(self, branch: str, iteration: int) -> str | None:
        """Name of the commit that an iteration of a branch follows: of the branch itself, or the
        one it is a fork of.

        None for the first of a root branch. Raises: StoreError for an iteration of before the fork;
        ObjectMissing, ObjectCorrupt.
        """
        fork = self.get(branch).parent
        first = parse_commit_name(fork)[1] + 1 if fork else 0
        if iteration < first:
            where = commit_name(branch, iteration)
            raise StoreError(
                "not an iteration of this branch",
                where=where,
                expected=f"at least {first}: it is a fork of {fork}",
            )
        return fork if iteration == first else commit_name(branch, iteration - 1)

    def before(self, branch: str, iteration: int) -> Commit | None:
        """The commit that an iteration of a branch goes on from, a fork's first from another
        branch's; None for the very first.

        Raises: as `parent_name`; ObjectMissing if that iteration is not committed.
        """
        parent = self.parent_name(branch, iteration)
        return self.read(*parse_commit_name(parent)) if parent else None

    def commit(
        self,
        commit: Commit,
        fence: Callable[[], object] | None = None,
        *,
        look_for: Sequence[str] = (),
    ) -> Commit:
        """Record an iteration; returns the record that counts: ours, or an earlier one that says
        the same.

        `attempt` and `created` are filled in if they are empty, and the keys of the chain from what
        is stored. `look_for`: paths of checkpoints and evaluations that may be recorded by now,
        beside those that the commit awaits. `fence` is called last before the write, and raises if
        this driver may not commit any more (`Epoch.check`). Raises: Fenced if it does, or if a
        newer epoch has committed; StoreError if the commit does not follow from the branch's last
        one; ObjectMissing if that is not there; ObjectConflict if the iteration was committed with
        another content.
        """
        before, parent_sha256 = self._refuse_gap(commit)
        commit = commit.model_copy(
            update={
                "attempt": commit.attempt or uuid4().hex[:12],
                "created": commit.created or now(),
            }
        )
        path = commit_path(commit.branch, commit.iteration)
        if not self._files.exists(path):
            self._receipts.refuse_other(commit)
        if before is not None and before.branch == commit.branch:
            self._receipts.write_missing(before)  # its driver may have been killed before it did
        record = self.get(commit.branch)
        commit = link_commit(
            self._files,
            commit,
            before,
            config=record.config,
            init=record.init,
            config_path=config_path(commit.branch),
            parent_sha256=parent_sha256,
            look_for=look_for,
        )
        if fence is not None:
            fence()
        try:
            self._files.create(path, seal(commit, path))
        except ObjectConflict as error:
            winner = self.read(commit.branch, commit.iteration)
            self._refuse_older(commit, winner)
            if not (differing := _differing_keys(winner, commit)):
                self._receipts.write(winner)
                return winner
            raise ObjectConflict(
                "this iteration was committed by another driver, with another result",
                where=self._files.url(path),
                found=f"other values of {differing} by attempt {winner.attempt}",
                do="stop this driver; start it again to go on from the newest commit",
            ) from error
        self._receipts.write(commit)
        return commit

    def sampled_by(self, branch: str) -> str:
        """The branch that planned and sampled what a branch's iterations are made of: itself,
        unless it loads another's rollouts (`debug.load_debug_rollout_data`), which may load others
        in turn. Raises: ObjectMissing, ObjectCorrupt."""
        return [branch, *self.sources(branch)][-1]

    def sources(self, branch: str) -> list[str]:
        """The branches whose rollouts a branch loads: the one it names, the one which that names,
        and so on.

        Raises: ObjectMissing, ObjectCorrupt.
        """
        seen = [branch]
        while found := self.find(seen[-1]):
            debug = found.config.get("debug")
            loads = debug.get("load_debug_rollout_data") if isinstance(debug, dict) else None
            if not isinstance(loads, str) or loads in seen:
                break
            seen.append(loads)
        return seen[1:]

    def walk(self, branch: str) -> Iterator[Commit]:
        """The commits of a branch and of what it was forked from, newest first. Raises:
        ObjectMissing, ObjectCorrupt."""
        commit = self.newest(branch)
        while commit is not None:
            yield commit
            commit = self.read(*parse_commit_name(commit.parent)) if commit.parent else None

    def _refuse_gap(self, commit: Commit) -> tuple[Commit | None, str | None]:
        """The commit before this one, and the sha256 of its bytes. Raises: as `commit`."""
        expected = self.parent_name(commit.branch, commit.iteration)
        if commit.parent != expected:
            name = commit_name(commit.branch, commit.iteration)
            raise StoreError(
                "not the next commit of its branch",
                where=name,
                found=commit.parent,
                expected=expected,
            )
        if expected is None:
            return None, None
        before, sha256 = self.read_stored(*parse_commit_name(expected))
        self._refuse_older(commit, before)
        return before, sha256

    def _refuse_older(self, commit: Commit, other: Commit) -> None:
        if other.branch == commit.branch and other.epoch > commit.epoch:
            raise Fenced(
                "a newer driver has committed to this branch",
                where=self._files.url(commit_path(other.branch, other.iteration)),
                found=f"epoch {other.epoch}",
                expected=f"epoch {commit.epoch}, which is ours, or an older one",
                do="leave the branch to it, or stop it and start this one again",
            )


def config_path(branch: str) -> str:
    """Where the record of a branch lives."""
    return f"branches/{branch}/config.json"


def is_commit(path: str) -> bool:
    """Is this the name of a commit's record?"""
    return COMMIT_NAME.fullmatch(path) is not None


def commit_path(branch: str, iteration: int) -> str:
    """Where the record of a commit lives."""
    return f"branches/{commit_name(branch, iteration)}.json"


def _is_commit_name(name: str | None) -> bool:
    try:
        return name is None or bool(parse_commit_name(name))
    except ValueError:
        return False


def _follows(commit: Commit) -> bool:
    """Is its parent the iteration before it? So no history goes in circles."""
    if commit.parent is None or not _is_commit_name(commit.parent):
        return commit.parent is None
    return parse_commit_name(commit.parent)[1] == commit.iteration - 1


def _differing_keys(first: Record, second: Record) -> list[str]:
    """Keys in which two records of one thing say something else; those of the chain only if no
    others differ."""
    free = PROVENANCE_KEYS | TIMING_KEYS
    one = first.model_dump()
    other = second.model_dump()
    differing = [key for key in one if one[key] != other[key] and key not in free]
    return [key for key in differing if key not in CHAIN_KEYS] or differing
