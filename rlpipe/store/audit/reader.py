"""Reads the iterations of a run for the audit: plans, nodes, files and rows.

Every file is read whole. Its size and checksum are compared with the record, and the rows of a
table with every rule of the table. An unreadable object becomes a finding, and reading continues.
`verification` checks whether the contents agree with each other.

Entry points: `Reader`, `Loaded`, `read_ahead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from rlpipe.store.audit import unexpected_files
from rlpipe.store.audit.findings import Content, Finding, read_or_report
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.audit.unexpected_files import UnexpectedFile
from rlpipe.store.branches import commit_name
from rlpipe.store.columns import KIND
from rlpipe.store.images import Images, image_path, images_of_node, images_of_plan
from rlpipe.store.nodes import Nodes, checkpoint_digest, node_path
from rlpipe.store.notes import read_note
from rlpipe.store.parquet.schema import BATCH, REWARDS, SAMPLES, decode
from rlpipe.store.plans import Plans, plan_of_rows
from rlpipe.store.receipts import Receipt, Receipts
from rlpipe.store.row_states import StoredRowStates, row_states_of_plan, row_states_path
from rlpipe.types import Commit, DataState, FileRecord, Node, Plan, Stage

AHEAD = 4
"""Iterations that are read ahead. With an object store most of the time is spent on waiting."""
KEPT_COLUMNS = {
    SAMPLES.metadata[KIND]: ("group_id", "index", "prompt_ids", "response_ids"),
    REWARDS.metadata[KIND]: ("group_id", "index"),
    BATCH.metadata[KIND]: ("group_id", "index", "tokens"),
}
"""Columns that the audit keeps in memory, for each kind of table."""


class RolloutOutputs(BaseModel):
    """Outputs of a rollout about its groups and the data source."""

    plans: list[str] = []
    accepted: list[str] = []
    dropped: dict[str, str] = {}
    after: dict[str, Any] = {}


class BatchOutputs(BaseModel):
    """Outputs of an advantage stage about its groups."""

    groups: list[str]
    dropped: dict[str, str] = {}


class Rows(NamedTuple):
    """One table of a node."""

    plan: str | None
    """Digest of the plan above the file; None for a file of another stage."""
    table: pa.Table
    """Rows, with the columns of `KEPT_COLUMNS`."""


@dataclass
class Loaded:
    """The readable parts of an iteration."""

    commit: Commit
    plans: list[Plan] = field(default_factory=list)
    nodes: dict[Stage, Node] = field(default_factory=dict)
    rows: dict[Stage, list[Rows]] = field(default_factory=dict)
    """Tables of each stage with only readable tables."""
    rollout: RolloutOutputs | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Name of the commit."""
        return commit_name(self.commit.branch, self.commit.iteration)

    def table(self, stage: Stage) -> pa.Table | None:
        """Return all rows of a stage; None if it has no readable rows."""
        tables = [rows.table for rows in self.rows.get(stage, ())]
        return pa.concat_tables(tables).combine_chunks() if tables else None


class Reader:
    """Reads iterations. Methods raise only if the store does not answer, or is full."""

    def __init__(self, files: Snapshot, evaluations: dict[str, list[Node]]) -> None:
        """`evaluations`: evaluation nodes by the digest of the state that they measured."""
        self._files = files
        self._nodes = Nodes(files)
        self._plans = Plans(files)
        self._receipts = Receipts(files)
        self._evaluations = evaluations
        self._images: set[str] = set()
        """Images that were checked."""
        self._row_states: set[str] = set()
        """States of rows that were checked."""

    def load(self, commit: Commit) -> Loaded:
        """Read an iteration with the checkpoint and the evaluations of its weights."""
        loaded = self._load(commit)
        receipt = self._read_record(
            loaded.findings,
            f"{loaded.where} receipt",
            partial(self._receipts.find, commit.branch, commit.iteration),
        )
        if receipt is not None and receipt != Receipt.of(commit):
            problem = "another commit was here before: its receipt does not match this commit"
            loaded.findings.append(Finding("records", loaded.where, problem))
        return loaded

    def _load(self, commit: Commit) -> Loaded:
        loaded = Loaded(commit)
        for digest in commit.plans:
            if plan := self._read_record(
                loaded.findings, loaded.where, partial(self._plans.read, digest)
            ):
                loaded.plans.append(plan)
                self._check_images(loaded.findings, images_of_plan(plan))
                self._check_row_states(loaded.findings, row_states_of_plan(plan))
        for stage, digest in commit.nodes.items():
            if node := self._read_record(
                loaded.findings,
                f"{loaded.where} {stage}",
                partial(self._nodes.get, stage, digest),
            ):
                loaded.nodes[stage] = node
                rows = self.check_files(loaded.findings, node)
                if rows is not None:
                    loaded.rows[stage] = rows
        rollout = loaded.nodes.get(Stage.ROLLOUT)
        named = {record.path for record in rollout.files} if rollout else ()
        # Without a plan its groups are unknown, and every shard would look unexpected.
        if len(loaded.plans) == len(commit.plans):
            for digest, plan in zip(commit.plans, loaded.plans, strict=True):
                self._add_unexpected(
                    loaded.findings, unexpected_files.of_plan(self._files, digest, plan, named)
                )
        if rollout:
            loaded.rollout = self._rollout_outputs(loaded, rollout)
        if Stage.TRAIN in commit.nodes:
            loaded.findings += self.check_leaves(commit.nodes[Stage.TRAIN], loaded.where)
        return loaded

    def load_noted(self, branch: str, k: int) -> Loaded:
        """Read an iteration without a commit.

        The result has a substitute commit: the one that would exist if the batch had been trained.
        """
        commit = Commit(
            branch=branch, iteration=k, plans=(), nodes={}, data=DataState(), config_digest=""
        )
        findings: list[Finding] = []
        where = commit_name(branch, k)
        nodes = self._read_record(findings, where, partial(read_note, self._files, branch, k))
        if nodes:
            commit = commit.model_copy(update={"nodes": nodes})
            # `_load` reports nodes that cannot be read, so these findings are dropped.
            keys = self._read_record([], where, lambda: self._commit_keys(nodes))
            if keys:
                commit = commit.model_copy(update=keys)
        loaded = self._load(commit)
        loaded.findings[:0] = findings
        if rollout := loaded.nodes.get(Stage.ROLLOUT):
            if scores := rollout.config.get("judged_by"):
                self._read_record(
                    loaded.findings,
                    f"{where} judged by",
                    partial(self._nodes.get, Stage.REWARD, scores),
                )
        elif nodes is not None and Stage.ROLLOUT not in nodes:
            loaded.findings.append(Finding("records", where, "its note names no rollout"))
        return loaded

    def _commit_keys(self, nodes: Mapping[Stage, str]) -> dict[str, Any] | None:
        """Return the keys of a commit of these nodes; None if their outputs are malformed."""
        rollout = self._nodes.get(Stage.ROLLOUT, nodes.get(Stage.ROLLOUT, ""))
        try:
            outputs = RolloutOutputs.model_validate(rollout.outputs)
            data = DataState.model_validate(rollout.outputs.get("after"))
            if Stage.ADVANTAGE in nodes:
                advantage = self._nodes.get(Stage.ADVANTAGE, nodes[Stage.ADVANTAGE])
                batch = BatchOutputs.model_validate(advantage.outputs)
            else:
                batch = BatchOutputs(groups=outputs.accepted)
        except ValidationError:
            return None
        return {
            "plans": tuple(outputs.plans),
            "trained": tuple(batch.groups),
            "dropped": {**outputs.dropped, **batch.dropped},
            "data": data,
        }

    def check_leaves(self, weights: str, where: str) -> list[Finding]:
        """Check the files of a state's checkpoint and evaluations, if they exist."""
        findings: list[Finding] = []
        checkpoint = self._read_record(
            findings,
            f"{where} checkpoint",
            partial(self._nodes.find, Stage.CHECKPOINT, checkpoint_digest(weights)),
        )
        for node in [*([checkpoint] if checkpoint else []), *self._evaluations.get(weights, ())]:
            own: list[Finding] = []
            self.check_files(own, node)
            # Garbage collection removes the record before the files. A node that is gone now is
            # being removed, and its missing files are no finding.
            if own and not self._files.exists(node_path(node.stage, node.digest)):
                continue
            findings += own
        return findings

    def check_files(self, findings: list[Finding], node: Node) -> list[Rows] | None:
        """Check every file of a node, and unexpected files in the same folders.

        Returns the rows of its tables; None if one of them is not readable.
        """
        self._add_unexpected(findings, unexpected_files.of_node(self._files, node))
        self._check_images(findings, images_of_node(node))
        rows: list[Rows] | None = []
        for record in node.files:
            url = self._files.shown(record.path)
            read = partial(self._check_file, findings, record, url)
            table = read_or_report(self._files, findings, "files", url, read)
            if table is not None and rows is not None:
                rows.append(Rows(plan_of_rows(record.path), table))
            if table is None and record.rows is not None:
                rows = None
        return rows

    def _check_images(self, findings: list[Finding], digests: set[str]) -> None:
        """Check that images exist and have their content. Each is read once."""
        for digest in sorted(digests - self._images):
            self._images.add(digest)
            read = partial(Images(self._files).read, digest)
            read_or_report(
                self._files, findings, "files", self._files.shown(image_path(digest)), read
            )

    def _check_row_states(self, findings: list[Finding], digests: set[str]) -> None:
        """Check that states of rows exist and have their content. Each is read once."""
        for digest in sorted(digests - self._row_states):
            self._row_states.add(digest)
            read = partial(StoredRowStates(self._files).read, digest)
            where = self._files.shown(row_states_path(digest))
            read_or_report(self._files, findings, "files", where, read)

    def _check_file(self, findings: list[Finding], record: FileRecord, url: str) -> pa.Table | None:
        """Check a file. Return its rows if it is a readable table."""
        # A file of another size is not the recorded one, so it is not read.
        size = self._files.size(record.path)
        if size != record.size_bytes:
            problem = f"{size} bytes, recorded are {record.size_bytes}"
            findings.append(Finding("files", url, problem))
            return None
        if record.rows is None:
            # The file may be as large as a checkpoint, so it is hashed in chunks.
            if (sha256 := self._files.sha256(record.path)) != record.sha256:
                problem = f"sha256 {sha256}, recorded is {record.sha256}"
                findings.append(Finding("files", url, problem))
            return None
        table = decode(self._files.read(record.path, record.sha256), url)
        if table.num_rows != record.rows:
            problem = f"{table.num_rows} rows, recorded are {record.rows}"
            findings.append(Finding("files", url, problem))
        return table.select(list(KEPT_COLUMNS[table.schema.metadata[KIND]]))

    def _rollout_outputs(self, loaded: Loaded, rollout: Node) -> RolloutOutputs | None:
        try:
            return RolloutOutputs.model_validate(rollout.outputs)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            problem = f"the outputs of the rollout are malformed: {key}: {first['msg']}"
            loaded.findings.append(Finding("records", f"{loaded.where} rollout", problem))
            return None

    def _add_unexpected(self, findings: list[Finding], files: Iterable[UnexpectedFile]) -> None:
        findings += [Finding("files", self._files.shown(file.path), file.problem) for file in files]

    def _read_record(
        self, findings: list[Finding], where: str, read: Callable[[], Content]
    ) -> Content | None:
        return read_or_report(self._files, findings, "records", where, read)


def evaluations_of(files: Snapshot, findings: list[Finding]) -> dict[str, list[Node]]:
    """Return the evaluation nodes of a store by the digest of the state that they measured."""
    evaluations: dict[str, list[Node]] = {}
    nodes = Nodes(files)
    for path in files.list(f"nodes/{Stage.EVAL}"):
        digest = path.rpartition("/")[2].removesuffix(".json")
        read = partial(nodes.get, Stage.EVAL, digest)
        node = read_or_report(files, findings, "records", files.shown(path), read)
        if node is not None and (weights := node.parents.get("weights")):
            evaluations.setdefault(weights, []).append(node)
    return evaluations


def read_ahead(loads: Iterable[Callable[[], Loaded]]) -> Iterator[Loaded]:
    """Yield the results of these calls in order. The next ones run in background threads."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[Future[Loaded]] = deque()
        for load in loads:
            waiting.append(pool.submit(load))
            # Bounded, because the tables of every loaded iteration are in memory.
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def row_keys(table: pa.Table) -> Iterable[tuple[str, int]]:
    """Return (group_id, index) of each row."""
    return zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)
