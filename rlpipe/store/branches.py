"""Branches: a run is a chain of commits, one for each iteration, each written once.

Iterations are numbered without gaps. The first commit of a root branch has iteration 0 and no
parent. The first commit of a fork continues the numbers of its parent. A commit is refused if its
parent is missing, so the commit that `newest` returns has its whole history. Along a branch the
epochs of the commits never decrease. A receipt is written after each commit and outlives it. Each
commit names the digests of its parent and of its records (`chain`).

Entry points: `Branches`, `commit_name`, `commit_path`, `config_path`.
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
from rlpipe.store.notes import noted_iterations
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import CHAIN_KEYS, PROVENANCE_KEYS, TIMING_KEYS, Receipts
from rlpipe.store.records import now, seal, unseal
from rlpipe.types import CONTRACTS, Commit, Record, Stage, VersionedRecord

CONFIG_NAME = re.compile(r"branches/[^/]+/config\.json")
COMMIT_NAME = re.compile(r"branches/([^/]+)/([0-9]{8})\.json")


class Branch(VersionedRecord):
    """The start of a branch: its configuration, its first weights, and its parent if it is a
    fork."""

    branch: str
    config: dict[str, Any]
    init: str
    """Digest of the node of the first weights."""
    parent: str | None = None
    """`branch/%08d` of the commit that a fork starts from; None for a root branch."""
    contracts: dict[Stage, int] = Field(default_factory=dict)
    """Version of each stage's contract, fixed for the life of the branch. 1 for a stage that is not
    listed."""
    created: str = ""


def commit_name(branch: str, iteration: int) -> str:
    """Return `branch/%08d`, the name of a commit as a parent."""
    return f"{branch}/{iteration:08d}"


def parse_commit_name(name: str) -> tuple[str, int]:
    """Return branch and iteration of a commit's name. Raises: ValueError."""
    branch, separator, iteration = name.rpartition("/")
    if not separator or commit_name(branch, int(iteration)) != name:
        raise ValueError(f"not the name of a commit: {name!r}")
    return branch, int(iteration)


def config_path(branch: str) -> str:
    """Return the path of a branch's configuration."""
    return f"branches/{branch}/config.json"


def commit_path(branch: str, iteration: int) -> str:
    """Return the path of a commit."""
    return f"branches/{commit_name(branch, iteration)}.json"


def is_commit(path: str) -> bool:
    """True if the path is that of a commit."""
    return COMMIT_NAME.fullmatch(path) is not None


class Branches:
    """The branches of a store."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._receipts = Receipts(files)
        # A branch's configuration never changes after its first commit, so one read is enough.
        self._loaded: dict[str, Branch] = {}

    def names(self) -> list[str]:
        """Return the names of all branches, sorted."""
        return [
            path.split("/")[1]
            for path in self._files.list("branches")
            if path.endswith("/config.json")
        ]

    def create(
        self, branch: str, config: Mapping[str, Any], init: str, parent: str | None = None
    ) -> Branch:
        """Start a branch, or return it if it exists with the same start.

        `parent`: the commit that a fork starts from. Raises: ObjectConflict if another run has the
        name; ObjectMissing if the parent is missing.
        """
        if parent is not None:
            self.read(*parse_commit_name(parent))  # raises if the parent is missing
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
            existing = self.get(branch)
            # An older rlpipe may have created the branch. Its contracts then stay in force.
            ignored = {"created": record.created, "contracts": record.contracts}
            if existing.model_copy(update=ignored) == record:
                return existing
            differing = [key for key in _differing_keys(existing, record) if key != "contracts"]
            raise ObjectConflict(
                "a run of this name exists with another configuration or start",
                where=self._files.url(path),
                found=f"other values of {differing}",
                do="resume it with its own configuration, fork it, or take another name",
            ) from error
        return record

    def replace_config(self, branch: str, config: Mapping[str, Any]) -> Branch:
        """Replace the configuration of a root branch that has no commits and no notes.

        The caller holds the epoch of the branch. A call that was killed leaves either
        configuration, or no branch: the next start then creates it. Raises: ObjectMissing.
        """
        existing = self.get(branch)
        # A first commit names the digest of the configuration; a fork's parent is a commit.
        assert existing.parent is None and not self.committed(branch) and not self.noted(branch)
        path = config_path(branch)
        record = existing.model_copy(update={"config": dict(config)})
        self._files.delete(path)
        self._files.create(path, seal(record, path))
        del self._loaded[branch]
        return self.get(branch)

    def noted(self, branch: str) -> list[int]:
        """Return the iterations of a branch that have notes instead of commits, in order."""
        return noted_iterations(self._files, branch)

    def get(self, branch: str) -> Branch:
        """Return the start of a branch. Raises: ObjectMissing, ObjectCorrupt."""
        if branch not in self._loaded:
            path = config_path(branch)
            url = self._files.url(path)
            record = unseal(Branch, self._files.read(path), url)
            if record.branch != branch or not _is_commit_name(record.parent):
                raise ObjectCorrupt(
                    "the record belongs to another branch",
                    where=url,
                    found=f"{record.branch}, a fork of {record.parent}",
                    expected=branch,
                )
            for stage, version in record.contracts.items():
                refuse_unknown_contract(stage, version, url)
            self._loaded[branch] = record
        return self._loaded[branch]

    def find(self, branch: str) -> Branch | None:
        """Return the start of a branch, or None if the branch is missing. Raises: ObjectCorrupt."""
        try:
            return self.get(branch)
        except ObjectMissing:
            return None

    def config(self, branch: str) -> dict[str, Any]:
        """Return the configuration of a branch. Raises: ObjectMissing, ObjectCorrupt."""
        return self.get(branch).config

    def contracts(self, branch: str) -> dict[Stage, int]:
        """Return the version of each stage's contract on a branch.

        A branch that does not exist yet gets the newest versions. Raises: ObjectCorrupt.
        """
        record = self.find(branch)
        if record is None:
            return dict(CONTRACTS)
        return {stage: record.contracts.get(stage, 1) for stage in Stage}

    def newest(self, branch: str, after: int | None = None) -> Commit | None:
        """Return the commit to continue from.

        That is the newest commit; for a fork without commits its parent; else None. `after`: an
        iteration that is committed. Only later ones are looked for then, without a listing.
        Raises: ObjectMissing if the branch is missing or `after` is not committed; ObjectCorrupt.
        """
        record = self.get(branch)
        if after is not None:
            return self.read(branch, [after, *self.committed(branch, after)][-1])
        # Commits have no gaps, so the newest one has the whole history below it.
        if committed := self.committed(branch):
            return self.read(branch, committed[-1])
        return self.read(*parse_commit_name(record.parent)) if record.parent else None

    def committed(self, branch: str, after: int | None = None) -> list[int]:
        """Return the iterations that the branch itself has committed, in order.

        `after`: an iteration that is committed. Only later ones are returned then, without a
        listing.
        """
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
        """Return one commit.

        Raises: ObjectMissing; ObjectCorrupt if the record is another commit, or its parent is not
        the iteration before.
        """
        return self.read_stored(branch, iteration)[0]

    def read_stored(self, branch: str, iteration: int) -> tuple[Commit, str]:
        """Return one commit and the sha256 of its bytes, the head of the history up to it.

        Raises: as `read`.
        """
        path = commit_path(branch, iteration)
        data = self._files.read(path)
        commit = unseal(Commit, data, self._files.url(path))
        if (commit.branch, commit.iteration) != (branch, iteration) or not _follows(commit):
            raise ObjectCorrupt(
                "the record belongs to another commit",
                where=self._files.url(path),
                found=f"{commit_name(commit.branch, commit.iteration)} after {commit.parent}",
                expected=f"{commit_name(branch, iteration)} after the iteration before",
            )
        return commit, hashlib.sha256(data).hexdigest()

    def parent_name(self, branch: str, iteration: int) -> str | None:
        """Return the name of the commit that an iteration follows, also on another branch.

        None for iteration 0 of a root branch. Raises: StoreError for an iteration before the fork;
        ObjectMissing, ObjectCorrupt.
        """
        origin = self.get(branch).parent
        first = parse_commit_name(origin)[1] + 1 if origin else 0
        if iteration < first:
            raise StoreError(
                "the iteration is before the first one of its branch",
                where=commit_name(branch, iteration),
                expected=f"at least {first}, because the branch is a fork of {origin}",
            )
        return origin if iteration == first else commit_name(branch, iteration - 1)

    def before(self, branch: str, iteration: int) -> Commit | None:
        """Return the commit that an iteration follows; None for iteration 0 of a root branch.

        Raises: as `parent_name`; ObjectMissing if that commit is missing.
        """
        parent = self.parent_name(branch, iteration)
        return self.read(*parse_commit_name(parent)) if parent else None

    def of_iteration(self, branch: str, iteration: int) -> Commit:
        """Return the commit of an iteration, also of one before the branch was forked.

        Raises: ObjectMissing, ObjectCorrupt.
        """
        while (origin := self.get(branch).parent) is not None:
            parent, forked = parse_commit_name(origin)
            if iteration > forked:
                break
            branch = parent
        return self.read(branch, iteration)

    def commit(
        self,
        commit: Commit,
        fence: Callable[[], object] | None = None,
        *,
        look_for: Sequence[str] = (),
    ) -> Commit:
        """Record an iteration, and return the record that counts.

        The result is this commit or an earlier one with the same result. Empty `attempt` and
        `created` and the keys of the chain are filled in. `look_for`: paths of checkpoints and
        evaluations that may exist, in addition to the awaited ones. `fence` is the last call before
        the write, and raises if this driver may not commit any more (`Epoch.check`).

        Raises: Fenced by `fence`, or if a newer epoch has committed; StoreError if the commit does
        not follow the branch's last one; ObjectMissing if that one is missing; ObjectConflict if
        the iteration was committed with another result.
        """
        before, parent_sha256 = self._read_parent(commit)
        commit = commit.model_copy(
            update={
                "attempt": commit.attempt or uuid4().hex[:12],
                "created": commit.created or now(),
            }
        )
        path = commit_path(commit.branch, commit.iteration)
        # A receipt without a commit: the commit was removed, and may be replaced only by an equal
        # result.
        if not self._files.exists(path):
            self._receipts.refuse_other(commit)
        if before is not None and before.branch == commit.branch:
            # The driver may have been killed between the commit before and its receipt.
            self._receipts.write_missing(before)
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
        # The last step before the write keeps the window short in which a takeover is missed.
        if fence is not None:
            fence()
        try:
            self._files.create(path, seal(commit, path))
        except ObjectConflict as error:
            commit = self._adopt_winner(commit, error)
        # Only now: a receipt before its commit would be evidence of a commit that never existed.
        self._receipts.write(commit)
        return commit

    def sampled_by(self, branch: str) -> str:
        """Return the branch that sampled the rollouts of a branch.

        That is the branch itself unless it loads the rollouts of another one
        (`debug.load_debug_rollout_data`), which may load those of a third. Raises: ObjectMissing,
        ObjectCorrupt.
        """
        return [branch, *self.sources(branch)][-1]

    def sources(self, branch: str) -> list[str]:
        """Return the branches that a branch loads rollouts from, directly and through others.

        Raises: ObjectMissing, ObjectCorrupt.
        """
        seen = [branch]
        while record := self.find(seen[-1]):
            # The configuration may come from another release, so its form is not assumed.
            debug = record.config.get("debug")
            source = debug.get("load_debug_rollout_data") if isinstance(debug, dict) else None
            if not isinstance(source, str) or source in seen:
                break
            seen.append(source)
        return seen[1:]

    def walk(self, branch: str) -> Iterator[Commit]:
        """Yield the commits of a branch and of its origins, newest first.

        Raises: ObjectMissing, ObjectCorrupt.
        """
        commit = self.newest(branch)
        while commit is not None:
            yield commit
            commit = self.read(*parse_commit_name(commit.parent)) if commit.parent else None

    def _read_parent(self, commit: Commit) -> tuple[Commit | None, str | None]:
        """Return the parent of a commit and the sha256 of its bytes. Raises: as `commit`."""
        expected = self.parent_name(commit.branch, commit.iteration)
        if commit.parent != expected:
            raise StoreError(
                "not the next commit of its branch",
                where=commit_name(commit.branch, commit.iteration),
                found=f"parent {commit.parent}",
                expected=f"parent {expected}",
            )
        if expected is None:
            return None, None
        before, sha256 = self.read_stored(*parse_commit_name(expected))
        self._refuse_newer_epoch(commit, before)
        return before, sha256

    def _adopt_winner(self, commit: Commit, conflict: ObjectConflict) -> Commit:
        """Return the stored commit of an iteration if it has the same result.

        Raises: Fenced if a newer epoch wrote it; ObjectConflict if it has another result.
        """
        winner = self.read(commit.branch, commit.iteration)
        self._refuse_newer_epoch(commit, winner)
        if not (differing := _differing_keys(winner, commit)):
            return winner
        raise ObjectConflict(
            "another driver committed this iteration with another result",
            where=self._files.url(commit_path(commit.branch, commit.iteration)),
            found=f"other values of {differing} by attempt {winner.attempt}",
            do="stop this driver; start it again to continue from the newest commit",
        ) from conflict

    def _refuse_newer_epoch(self, commit: Commit, other: Commit) -> None:
        if other.branch == commit.branch and other.epoch > commit.epoch:
            raise Fenced(
                "a newer driver has committed to this branch",
                where=self._files.url(commit_path(other.branch, other.iteration)),
                found=f"epoch {other.epoch}",
                expected=f"epoch {commit.epoch} (this driver) or an older one",
                do="leave the branch to the newer driver, or stop that driver and start this one "
                "again",
            )


def _is_commit_name(name: str | None) -> bool:
    try:
        return name is None or bool(parse_commit_name(name))
    except ValueError:
        return False


def _follows(commit: Commit) -> bool:
    """True if the parent is the iteration before, so that no history is a circle."""
    if commit.parent is None or not _is_commit_name(commit.parent):
        return commit.parent is None
    return parse_commit_name(commit.parent)[1] == commit.iteration - 1


def _differing_keys(first: Record, second: Record) -> list[str]:
    """Return the keys in which two records of one result differ.

    Keys of the chain are returned only if no other key differs.
    """
    ignored = PROVENANCE_KEYS | TIMING_KEYS
    one = first.model_dump()
    other = second.model_dump()
    differing = [key for key in one if one[key] != other[key] and key not in ignored]
    return [key for key in differing if key not in CHAIN_KEYS] or differing
