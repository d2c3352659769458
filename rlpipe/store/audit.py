"""The audit of a branch: does the store hold what its commits say, and was every group used exactly once?

Along the branch, and through what it was forked from, oldest first:

    drawn       a planned group that does not come from the buffer was never drawn before, and is planned in one part only
    accounted   each group planned or buffered is then trained, dropped with a reason, or in the buffer: one of them
    batches     the rows that were trained are those of the groups the commit says, which its rollout accepted; none is
                trained twice
    rows        a trained group has rows in a rollout of the branch; so has a buffered one, where it says they lie
    cursor      each plan starts where the commit before it (or the part before it) left the data source, and the commit ends
                where its rollout says
    epochs      no commit was made under an older epoch than one before it
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
from rlpipe.store.plans import Plans, plan_of_rows
from rlpipe.store.segments import segment_problem
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
        self._files, self._nodes, self._plans, self._branches = files, Nodes(files), Plans(files), Branches(files)
        self._data = DataState()
        self._drawn: set[str] = set()
        self._trained: dict[str, str] = {}
        self._rows: set[tuple[str | None, str]] = set()
        """(plan, group) whose rows lie below that plan, and (None, group)."""
        self._known: set[str] = set()
        self._epochs: dict[str, int] = {}

    def add(self, rule: str, where: str, problem: str) -> None:
        self.findings.append(Finding(rule, where, problem))

    def check_init(self, digest: str) -> None:
        """The node of the first weights; its own parents may lie on another branch."""
        self._known.add(digest)
        if node := self._node(Stage.INIT, digest, f"init {digest}"):
            self._check_files(node)

    def check(self, commit: Commit) -> None:
        where = commit_name(commit.branch, commit.iteration)
        plans = [self._readable("records", where, lambda digest=digest: self._plans.read(digest)) for digest in commit.plans]
        self._known.update(commit.plans)
        if parts := [plan for plan in plans if plan]:
            self._check_cursor(commit, parts, where)
            self._check_groups(commit, parts, where)
        if (newest := self._epochs.get(commit.branch, 0)) > commit.epoch:
            self.add("epochs", where, f"it was made under epoch {commit.epoch}, after a commit of epoch {newest}")
        self._epochs[commit.branch] = commit.epoch
        self._known.update(commit.nodes.values())
        for stage, digest in commit.nodes.items():
            if node := self._node(stage, digest, f"{where} {stage}"):
                self._check_parents(node, f"{where} {stage}")
                self._check_files(node)
                self._check_rows(node, commit, where)
                if node.stage is Stage.ROLLOUT:
                    self._check_rollout(node, commit, where)
        for group in sorted(set(commit.trained)):
            if (None, group) not in self._rows:
                self.add("rows", where, f"{group} was trained without rows in any rollout")
        for waiting in commit.data.buffer:
            if waiting.plan not in self._known:
                self.add("rows", where, f"{waiting.group_id} waits with plan {waiting.plan}, which is not on this branch")
            if waiting.rows is not None and (waiting.rows, waiting.group_id) not in self._rows:
                self.add("rows", where, f"{waiting.group_id} waits without the rows it says it has")
        self._data = commit.data

    def _check_cursor(self, commit: Commit, parts: list[Plan], where: str) -> None:
        before = self._data
        for number, plan in enumerate(parts):
            if plan.before != before:
                self.add("cursor", where, f"part {number} starts at {plan.before}, what is before it ended at {before}")
            if (plan.branch, plan.iteration, plan.part) != (self._sampled_by(commit.branch), commit.iteration, number):
                self.add("cursor", where, f"part {number} is part {plan.part} of {plan.branch}/{plan.iteration}")
            before = plan.after
        if before.model_copy(update={"buffer": ()}) != commit.data.model_copy(update={"buffer": ()}):
            self.add("cursor", where, f"the plan ends at {before}, the commit at {commit.data}")

    def _sampled_by(self, branch: str) -> str:
        """The branch that planned what a branch trains on: itself, or the one whose rollouts it loads."""
        return self._branches.sampled_by(branch)

    def _check_rollout(self, node: Node, commit: Commit, where: str) -> None:
        said = {"after": None, "plans": None, "accepted": [], "dropped": {}, **node.outputs}
        if said["after"] != commit.data.model_dump(mode="json"):
            self.add("cursor", where, f"the rollout ends at {said['after']}, the commit at {commit.data}")
        if said["plans"] != list(commit.plans):
            self.add("records", where, f"the rollout names the plans {said['plans']}, the commit {list(commit.plans)}")
        for group in sorted(set(commit.trained) - set(said["accepted"])):
            self.add("batches", where, f"{group} was trained but not accepted")
        for group in sorted(set(said["dropped"].items()) - set(commit.dropped.items())):
            self.add("accounted", where, f"the rollout dropped {group[0]} ({group[1]}), the commit does not say so")

    def _check_groups(self, commit: Commit, parts: list[Plan], where: str) -> None:
        buffered = {waiting.group_id for waiting in self._data.buffer}
        times = Counter(group.group_id for plan in parts for group in plan.groups)
        planned = set(times)
        for group in sorted((planned - buffered) & self._drawn):
            self.add("drawn", where, f"{group} was drawn before")
        for group in sorted(group for group, count in times.items() if count > 1):
            self.add("drawn", where, f"{group} is planned {times[group]} times")
        self._drawn |= planned | buffered
        fates = Counter([*commit.trained, *commit.dropped, *(waiting.group_id for waiting in commit.data.buffer)])
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
            if digest in self._known:
                continue
            if problem := segment_problem(self._nodes, digest, self._known):
                self.add("records", where, f"its {role}: {problem}")
            else:
                self._known.add(digest)

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
        if node.stage is Stage.ROLLOUT:
            for record in tables:
                found = self._readable("files", f"{where} {node.stage}", lambda record=record: self._groups([record])) or set()
                self._rows |= {(place, group) for group in found for place in (None, plan_of_rows(record.path))}
            return
        if (groups := self._readable("files", f"{where} {node.stage}", lambda: self._groups(tables))) is None:
            return
        if groups != set(commit.trained):
            self.add("batches", where, f"batch rows and commit differ in {sorted(groups ^ set(commit.trained))}")

    def _groups(self, records: list[FileRecord]) -> set[str]:
        return set(read_rows(self._files, records, ["group_id"])["group_id"].to_pylist())

    def _readable(self, rule: str, where: str, read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except (ObjectMissing, ObjectCorrupt) as error:
            self.add(rule, where, str(error))
            return None
