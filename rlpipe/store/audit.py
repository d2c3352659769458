"""The audit of a branch: does the store hold what its commits say, and was every group used exactly once?

Along the branch, and through what it was forked from, oldest first:

    drawn       a planned group that does not come from the buffer was never drawn before
    accounted   each group planned or buffered is then trained, dropped with a reason, or in the buffer: one of them
    batches     the rows that were trained are those of the groups the commit says; no group is trained twice
    rows        a trained group has rows in a rollout of the branch
    cursor      each plan starts where the commit before it left the data source, and ends where its own does
    records     commits follow each other; nodes are there, have the digest of their inputs, and parents on this branch
    files       data files are there with their size, checksum and rows

Not here: whether the numbers in them are right (replay), or repairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rlpipe.errors import ObjectCorrupt, ObjectMissing
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.files import Files
from rlpipe.store.nodes import Nodes
from rlpipe.store.plans import Plans
from rlpipe.store.shards import read_rows
from rlpipe.types import Commit, DataState, FileRecord, Node, Plan, Stage

Found = TypeVar("Found")


class Finding(NamedTuple):
    """One thing that is not as it should be."""

    rule: str
    where: str
    problem: str


def check_branch(files: Files, branch: str) -> list[Finding]:
    """Everything wrong with a branch; an empty list is the proof. Reads every file of it.

    Raises: ObjectMissing if there is no such branch.
    """
    audit, branches = _Audit(files), Branches(files)
    inits, commits = [branches.get(branch).init], []
    try:
        for commit in branches.walk(branch):
            commits.append(commit)
            inits.append(branches.get(commit.branch).init)
    except (ObjectMissing, ObjectCorrupt) as error:
        audit.add("records", branch, f"the history cannot be read: {error}")
    for digest in dict.fromkeys(inits):
        audit.check_init(digest)
    for commit in reversed(commits):
        audit.check(commit)
    return audit.findings


class _Audit:
    """What is known so far along the branch."""

    def __init__(self, files: Files) -> None:
        self.findings: list[Finding] = []
        self._files, self._nodes, self._plans = files, Nodes(files), Plans(files)
        self._data = DataState()
        self._drawn: set[str] = set()
        self._trained: dict[str, str] = {}
        self._sampled: set[str] = set()
        self._known: set[str] = set()

    def add(self, rule: str, where: str, problem: str) -> None:
        self.findings.append(Finding(rule, where, problem))

    def check_init(self, digest: str) -> None:
        """The node of the first weights; its own parents may lie on another branch."""
        self._known.add(digest)
        if node := self._node(Stage.INIT, digest, f"init {digest}"):
            self._check_files(node)

    def check(self, commit: Commit) -> None:
        where = commit_name(commit.branch, commit.iteration)
        plan = self._readable("records", where, lambda: self._plans.read(commit.plan))
        self._known.add(commit.plan)
        if plan:
            self._check_groups(commit, plan, where)
        self._known.update(commit.nodes.values())
        for stage, digest in commit.nodes.items():
            if node := self._node(stage, digest, f"{where} {stage}"):
                self._check_parents(node, f"{where} {stage}")
                self._check_files(node)
                self._check_rows(node, commit, where)
        for group in sorted(set(commit.trained) - self._sampled):
            self.add("rows", where, f"{group} was trained without rows in any rollout")
        self._data = commit.data

    def _check_groups(self, commit: Commit, plan: Plan, where: str) -> None:
        before = self._data
        if plan.before != before:
            self.add("cursor", where, f"the plan starts at {plan.before}, the commit before it ended at {before}")
        if plan.after != commit.data.model_copy(update={"buffer": plan.after.buffer}):
            self.add("cursor", where, f"the plan ends at {plan.after}, the commit at {commit.data}")
        buffered, planned = set(before.buffer), {group.group_id for group in plan.groups}
        for group in sorted((planned - buffered) & self._drawn):
            self.add("drawn", where, f"{group} was drawn before")
        self._drawn |= planned | buffered
        fates = Counter([*commit.trained, *commit.dropped, *commit.data.buffer])
        for group in sorted((planned | buffered) - set(fates)):
            self.add("accounted", where, f"{group} is neither trained nor dropped nor buffered")
        for group in sorted(set(fates) - planned - buffered):
            self.add("accounted", where, f"{group} was never drawn")
        for group, count in sorted(fates.items()):
            if count > 1:
                self.add("accounted", where, f"{group} is accounted for {count} times")
        for group in commit.trained:
            if (earlier := self._trained.setdefault(group, where)) != where:
                self.add("batches", where, f"{group} was trained in {earlier} already")

    def _node(self, stage: Stage, digest: str, where: str) -> Node | None:
        return self._readable("records", where, lambda: self._nodes.get(stage, digest))

    def _check_parents(self, node: Node, where: str) -> None:
        for role, digest in node.parents.items():
            if digest not in self._known:
                self.add("records", where, f"its {role} {digest} is not on this branch")

    def _check_files(self, node: Node) -> None:
        for record in node.files:
            url = self._files.url(record.path)
            data = self._readable("files", url, lambda record=record: self._files.read(record.path, record.sha256))
            if data is not None and len(data) != record.size_bytes:
                self.add("files", url, f"{len(data)} bytes, recorded are {record.size_bytes}")

    def _check_rows(self, node: Node, commit: Commit, where: str) -> None:
        tables = [record for record in node.files if record.rows is not None]
        if node.stage not in (Stage.ROLLOUT, Stage.ADVANTAGE) or not tables:
            return
        if (groups := self._readable("files", f"{where} {node.stage}", lambda: self._groups(tables))) is None:
            return
        if node.stage is Stage.ROLLOUT:
            self._sampled |= groups
        elif groups != set(commit.trained):
            self.add("batches", where, f"batch rows and commit differ in {sorted(groups ^ set(commit.trained))}")

    def _groups(self, records: list[FileRecord]) -> set[str]:
        return set(read_rows(self._files, records, ["group_id"])["group_id"].to_pylist())

    def _readable(self, rule: str, where: str, read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except (ObjectMissing, ObjectCorrupt) as error:
            self.add(rule, where, str(error))
            return None
