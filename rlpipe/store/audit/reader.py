"""What the audit reads: an iteration with its plans, nodes, files and rows, as far as they can be
read, and what is wrong with the rest. Every file is read whole: its size, checksum and, in a table,
every rule of its rows.

Not here: whether what was read fits together (`audit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from rlpipe.errors import ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store import receipts
from rlpipe.store.audit import unexpected_files
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.audit.unexpected_files import Stray
from rlpipe.store.branches import Branches, commit_name, parse_commit_name
from rlpipe.store.columns import KIND
from rlpipe.store.nodes import Nodes, input_digest, node_path
from rlpipe.store.notes import read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.schema import BATCH, REWARDS, SAMPLES, decode
from rlpipe.store.plans import Plans, plan_of_rows
from rlpipe.store.receipts import Receipt, Receipts
from rlpipe.store.tables import scalars
from rlpipe.types import Commit, DataState, FileRecord, Node, Plan, Stage

AHEAD = 4
"""Iterations that are read ahead of the one that is looked at; from an object store most of the
time is waiting."""
MOST_GAPS = 100
"""Commits in a row that are named one by one if they are gone; of more, the first and the last."""
COMPARED = {
    SAMPLES.metadata[KIND]: ("group_id", "index", "prompt_ids", "response_ids"),
    REWARDS.metadata[KIND]: ("group_id", "index"),
    BATCH.metadata[KIND]: ("group_id", "index", "tokens"),
}
"""The columns of each kind of table that the audit keeps."""
Found = TypeVar("Found")


class Finding(NamedTuple):
    """One thing that is not as it should be."""

    rule: str
    where: str
    problem: str


@dataclass
class Report:
    """What an audit found."""

    findings: list[Finding] = field(default_factory=list)
    """What is wrong."""
    notes: list[Finding] = field(default_factory=list)
    """What is not wrong, but should be known: leftovers of killed attempts, and what cannot be
    checked."""
    proof: object = None
    """What a digest that was held elsewhere proves (`audit_chain.Proof`); None without one, or if
    no commit has it."""

    def add_finding(self, rule: str, where: str, problem: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(rule, where, problem))

    def add_note(self, rule: str, where: str, problem: str) -> None:
        """Add a note."""
        self.notes.append(Finding(rule, where, problem))

    def add(self, other: Report) -> None:
        """Add what another report has."""
        self.findings += other.findings
        self.notes += other.notes
        self.proof = self.proof or other.proof

    def deduplicated(self) -> Report:
        """This report with everything in it once."""
        return Report(
            list(dict.fromkeys(self.findings)), list(dict.fromkeys(self.notes)), self.proof
        )


class RolloutOutputs(BaseModel):
    """What a rollout says of its groups and of the data source."""

    plans: list[str] = []
    accepted: list[str] = []
    dropped: dict[str, str] = {}
    after: dict[str, Any] = {}


class BatchOutputs(BaseModel):
    """What a batch says of its groups."""

    groups: list[str]
    dropped: dict[str, str] = {}


class Rows(NamedTuple):
    """One table of a node: the plan below which it lies (None: another stage's), and the columns
    that are compared."""

    plan: str | None
    table: pa.Table


@dataclass
class Loaded:
    """What could be read of an iteration."""

    commit: Commit
    plans: list[Plan] = field(default_factory=list)
    nodes: dict[Stage, Node] = field(default_factory=dict)
    rows: dict[Stage, list[Rows]] = field(default_factory=dict)
    """Of each stage whose tables could all be read."""
    rollout: RolloutOutputs | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The commit's name."""
        return commit_name(self.commit.branch, self.commit.iteration)

    def table(self, stage: Stage) -> pa.Table | None:
        """All rows of a stage; None if it has none that could be read."""
        tables = [rows.table for rows in self.rows.get(stage, ())]
        return pa.concat_tables(tables).combine_chunks() if tables else None


class Reader:
    """Reads what belongs to commits. Methods raise only what a store raises that is away, or
    full."""

    def __init__(self, files: Snapshot, evaluations: dict[str, list[Node]]) -> None:
        self._files, self._nodes, self._plans, self._receipts = (
            files,
            Nodes(files),
            Plans(files),
            Receipts(files),
        )
        self._evaluations = evaluations

    def load(self, commit: Commit) -> Loaded:
        """An iteration, with the checkpoint and the evaluations of the weights it made."""
        loaded = self._load(commit)
        find = partial(self._receipts.find, commit.branch, commit.iteration)
        receipt = self.readable(loaded.findings, "records", f"{loaded.where} receipt", find)
        if receipt is not None and receipt != Receipt.of(commit):
            loaded.findings.append(
                Finding(
                    "records",
                    loaded.where,
                    "another commit was here: its receipt does not fit this one",
                )
            )
        return loaded

    def _load(self, commit: Commit) -> Loaded:
        loaded = Loaded(commit)
        for digest in commit.plans:
            if plan := self.readable(
                loaded.findings,
                "records",
                loaded.where,
                lambda digest=digest: self._plans.read(digest),
            ):
                loaded.plans.append(plan)
        for stage, digest in commit.nodes.items():
            where = f"{loaded.where} {stage}"
            if node := self.readable(
                loaded.findings, "records", where, lambda s=stage, d=digest: self._nodes.get(s, d)
            ):
                loaded.nodes[stage] = node
                rows = self.check_files(loaded.findings, node)
                if rows is not None:
                    loaded.rows[stage] = rows
        rollout = loaded.nodes.get(Stage.ROLLOUT)
        named = {record.path for record in rollout.files} if rollout else ()
        if len(loaded.plans) == len(commit.plans):
            for digest, plan in zip(commit.plans, loaded.plans, strict=True):
                self._add_strays(
                    loaded.findings, unexpected_files.of_plan(self._files, digest, plan, named)
                )
        if rollout:
            loaded.rollout = self._said(loaded, rollout)
        if Stage.TRAIN in commit.nodes:
            loaded.findings += self.check_leaves(commit.nodes[Stage.TRAIN], loaded.where)
        return loaded

    def load_noted(self, branch: str, k: int) -> Loaded:
        """An iteration without a commit, as the one that would be its commit if what its last stage
        chose were trained."""
        commit = Commit(
            branch=branch, iteration=k, plans=(), nodes={}, data=DataState(), config_digest=""
        )
        findings: list[Finding] = []
        where = commit_name(branch, k)
        if nodes := self.readable(
            findings, "records", where, lambda: read_note(self._files, branch, k)
        ):
            commit = commit.model_copy(update={"nodes": nodes})
            if chosen := self.readable(
                list[Finding](), "records", where, lambda: self._chosen(nodes)
            ):
                commit = commit.model_copy(update=chosen)
        loaded = self._load(commit)
        loaded.findings[:0] = findings
        if rollout := loaded.nodes.get(Stage.ROLLOUT):
            if judged := rollout.config.get("judged_by"):
                self.readable(
                    loaded.findings,
                    "records",
                    f"{where} judged by",
                    lambda: self._nodes.get(Stage.REWARD, judged),
                )
        elif nodes is not None and Stage.ROLLOUT not in nodes:
            loaded.findings.append(Finding("records", where, "its note names no rollout"))
        return loaded

    def _chosen(self, nodes: Mapping[Stage, str]) -> dict[str, Any] | None:
        """What a commit of these nodes would say; None if they are not of the right form, which
        `load` says."""
        rollout = self._nodes.get(Stage.ROLLOUT, nodes.get(Stage.ROLLOUT, ""))
        batch = (
            self._nodes.get(Stage.ADVANTAGE, nodes[Stage.ADVANTAGE]).outputs
            if Stage.ADVANTAGE in nodes
            else None
        )
        try:
            said = RolloutOutputs.model_validate(rollout.outputs)
            data = DataState.model_validate(rollout.outputs.get("after"))
            fixed = (
                BatchOutputs(groups=said.accepted)
                if batch is None
                else BatchOutputs.model_validate(batch)
            )
        except ValidationError:
            return None
        fates = {"trained": tuple(fixed.groups), "dropped": {**said.dropped, **fixed.dropped}}
        return {"plans": tuple(said.plans), **fates, "data": data}

    def check_leaves(self, weights: str, where: str) -> list[Finding]:
        """The checkpoint and the evaluations of a state, if there are any."""
        findings: list[Finding] = []
        checkpoint = input_digest(Stage.CHECKPOINT, {"weights": weights}, {}, {})
        named = self.readable(
            findings,
            "records",
            f"{where} checkpoint",
            lambda: self._nodes.find(Stage.CHECKPOINT, checkpoint),
        )
        for node in [*([named] if named else []), *self._evaluations.get(weights, ())]:
            own: list[Finding] = []
            self.check_files(own, node)
            if own and not self._files.exists(node_path(node.stage, node.digest)):
                continue  # it is being removed (`retention`): its record went first
            findings += own
        return findings

    def check_files(self, findings: list[Finding], node: Node) -> list[Rows] | None:
        """Every file of a node, and what lies beside them; the rows of its tables, None if one of
        them could not be read."""
        self._add_strays(findings, unexpected_files.of_node(self._files, node))
        rows: list[Rows] | None = []
        for record in node.files:
            url = self._files.shown(record.path)
            table = self.readable(
                findings,
                "files",
                url,
                lambda record=record, url=url: self._file(findings, record, url),
            )
            if table is not None and rows is not None:
                rows.append(Rows(plan_of_rows(record.path), table))
            if table is None and record.rows is not None:
                rows = None
        return rows

    def _add_strays(self, findings: list[Finding], found: Iterable[Stray]) -> None:
        findings += [
            Finding("files", self._files.shown(stray.path), stray.problem) for stray in found
        ]

    def _file(self, findings: list[Finding], record: FileRecord, url: str) -> pa.Table | None:
        """The rows of a file, if it is a table. A file of another size is not read: it is not the
        one that was recorded."""
        if (size := self._files.size(record.path)) != record.size_bytes:
            findings.append(
                Finding("files", url, f"{size} bytes, recorded are {record.size_bytes}")
            )
            return None
        if record.rows is None:  # it may be large, so it is only gone through
            if (found := self._files.sha256(record.path)) != record.sha256:
                findings.append(
                    Finding("files", url, f"sha256 {found}, recorded is {record.sha256}")
                )
            return None
        table = decode(self._files.read(record.path, record.sha256), url)
        if table.num_rows != record.rows:
            findings.append(
                Finding("files", url, f"{table.num_rows} rows, recorded are {record.rows}")
            )
        return table.select(list(COMPARED[table.schema.metadata[KIND]]))

    def _said(self, loaded: Loaded, rollout: Node) -> RolloutOutputs | None:
        try:
            return RolloutOutputs.model_validate(rollout.outputs)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"its outputs are not those of a rollout: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            loaded.findings.append(Finding("records", f"{loaded.where} rollout", problem))
            return None

    def read_or_report(
        self, findings: list[Finding], rule: str, where: str, read: Callable[[], Found]
    ) -> Found | None:
        """What is read; None, and a finding, if it is not there or not what was written."""
        return read_or_report(self._files, findings, rule, where, read)


def read_or_report(
    files: Files,
    findings: list[Finding],
    rule: str,
    where: str,
    read: Callable[[], Found],
    *,
    required: bool = True,
) -> Found | None:
    """What is read; None, and a finding, if it cannot be read.

    `required`: it is a finding, too, if the object is not there. Raises: StoreError if the store
    does not answer at all.
    """
    try:
        return read()
    except ObjectMissing as error:
        if required:
            findings.append(Finding(rule, where, str(error)))
    except ObjectCorrupt as error:
        findings.append(Finding(rule, where, str(error)))
    except (
        StoreError
    ) as error:  # of this object (a name, a permission, a broken disk), or of the whole store
        files.check_reachable()
        findings.append(Finding(rule, where, f"it cannot be read: {error}"))
    return None


class History(NamedTuple):
    """The commits of a branch and of what it was forked from, and what they start from."""

    commits: list[Commit]
    """Newest first; those that can be read."""
    inits: list[str]
    """Digests of the first weights."""
    first: int
    """The iteration with which the branch itself begins."""
    rooted: bool
    """True if every configuration could be read: `inits` has all."""
    findings: list[Finding]


def history(files: Snapshot, branch: str) -> History:
    """Read the history of a branch.

    A commit or a configuration that cannot be read is a finding, and the history goes on before it:
    with the number before, or with the commit that the configuration names as the branch's origin.
    Raises: ObjectMissing if there is no such branch.
    """
    branches = Branches(files)
    findings = list[Finding]()
    commits: list[Commit] = []
    inits: list[str] = []
    first_of: dict[str, int] = {}
    unread = 0
    if not files.names_below(f"branches/{branch}"):
        branches.get(branch)
    name = branch
    last = None
    while name is not None and name not in first_of:
        record = read_or_report(files, findings, "records", name, partial(branches.get, name))
        unread += record is None
        origin = record.parent if record else None
        if record:
            inits.append(record.init)
        numbers = [k for k in branches.committed(name) if last is None or k <= last]
        first_of[name] = (
            parse_commit_name(origin)[1] + 1
            if origin
            else (0 if record else min(numbers, default=0))
        )
        end = max(numbers, default=first_of[name] - 1) + 1 if last is None else last + 1
        own = _own_commits(files, findings, name, range(first_of[name], end), numbers, origin)
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
    """The commits that a branch made itself, newest first. `numbers`: those that are listed.
    `origin`: the fork's parent."""
    branches = Branches(files)
    commits = list[Commit]()
    listed = set(numbers)
    for start, end in _gaps(expected, listed):
        if end - start > MOST_GAPS:
            problem = f"the commits {start} to {end - 1} are not there, and later ones are"
            findings.append(Finding("records", commit_name(branch, start), problem))
        else:
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
            findings.append(
                Finding("records", where, f"the branch begins with iteration {expected.start}")
            )
            continue
        before = origin if k == expected.start else commit_name(branch, k - 1)
        if commit.parent != before and (origin or k > expected.start):
            findings.append(
                Finding(
                    "records",
                    where,
                    f"its parent is {commit.parent}, the history of its branch has {before}",
                )
            )
    return commits


def _gaps(expected: range, listed: Collection[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of the expected numbers in a row that are not listed."""
    before = expected.start
    for number in [*sorted(k for k in listed if k in expected), expected.stop]:
        if number > before:
            yield before, number
        before = number + 1


def committed_before(files: Files, branch: str) -> set[int]:
    """Iterations of a branch that were committed by now, by what is only written after a commit:
    receipts, and tables."""
    names = files.list(f"branches/{branch}/receipts")
    return {
        int(match[1]) for name in names if (match := receipts.RECEIPT_NAME.fullmatch(name))
    } | scalars.newest_covered(files, branch)


def lost_commits(files: Files, branch: str, committed: Iterable[int]) -> list[Finding]:
    """The newest commits of a branch that were there once; one that is missing among others breaks
    the history."""
    newest = max(Branches(files).committed(branch), default=-1)
    problem = "it was committed: its receipt, or the tables of the run, say so; its commit is gone"
    return [
        Finding("records", commit_name(branch, k), problem) for k in sorted(committed) if k > newest
    ]


def evaluations_of(files: Snapshot, findings: list[Finding]) -> dict[str, list[Node]]:
    """The evaluation nodes of a store by the state that they measured; each record is read."""
    found: dict[str, list[Node]] = {}
    nodes = Nodes(files)
    for path in files.list(f"nodes/{Stage.EVAL}"):
        digest = path.rpartition("/")[2].removesuffix(".json")
        node = read_or_report(
            files, findings, "records", files.shown(path), partial(nodes.get, Stage.EVAL, digest)
        )
        if node is not None and (weights := node.parents.get("weights")):
            found.setdefault(weights, []).append(node)
    return found


def read_ahead(asked: Iterable[Callable[[], Loaded]]) -> Iterator[Loaded]:
    """What these calls load, in order; some are read while the one before is looked at."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[Future[Loaded]] = deque()
        for load in asked:
            waiting.append(pool.submit(load))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def row_keys(table: pa.Table) -> Iterable[tuple[str, int]]:
    """(group_id, index) of each row."""
    return zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)


def format_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order as text: `0 to 3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
