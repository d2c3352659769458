"""Verifies a run: the store holds the objects that its commits name, and every group is used once.

These rules are checked along the branch and its origins, oldest commit first:

    drawn       a planned group that is not from the buffer is new, and planned in one part only
    accounted   a planned or buffered group is trained, dropped with a reason, or in the buffer
    batches     the trained rows belong to the groups that the commit names and its rollout
                accepted; no group is trained twice
    rows        a trained group has rows in a rollout of the branch; a buffered one has the rows
                that its record names
    foreign     a row of a rollout belongs to a planned group; rows of rewards and batch belong to
                rows of the rollout, and the batch has their tokens
    cursor      each plan starts where the part or commit before it left the data source; the commit
                ends where its rollout ends
    epochs      no commit has an older epoch than one before it
    records     commits follow each other, and none is missing or was replaced; nodes exist, have
                the digest of their inputs, and parents on this branch
    files       data files, checkpoints and evaluations exist with size, checksum and rows; the
                folders of the run have no unexpected files
    tables      the records outside the commits are right (`bookkeeping`)
    chain       each record has the bytes that a commit named (`chain_check`)

`check_store` checks every run in this way, and reports each object that no record explains
(`reachability`).

If a commit is missing, the commits after it are checked one by one: records, files and foreign
rows. An iteration without a commit is checked as if its batch had been trained. The batch was
scored with weights of the run that its rollouts belong to.

An unreadable object is a finding, and the audit continues. That includes a folder, a link or a FIFO
with the name of a file, an undecodable name, and a file without read permission. A run may continue
during its audit.

The checksums are in the store itself. A record that was rewritten together with its checksum and
every later commit is found only with the digest of a commit that was kept elsewhere (`head`). The
same holds for changes that look like a killed driver (`bookkeeping`).

Entry points: `check_store`, `check_branch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import pyarrow as pa

from rlpipe.errors import ConfigError, ObjectMissing, StoreError
from rlpipe.store.audit import unexpected_files
from rlpipe.store.audit.bookkeeping import check_bookkeeping
from rlpipe.store.audit.chain_check import check_chain, checked_head, signed_head
from rlpipe.store.audit.commit_history import committed_before, history, lost_commits
from rlpipe.store.audit.findings import Content, Finding, Report, read_or_report
from rlpipe.store.audit.reachability import report_unexplained, runs_of
from rlpipe.store.audit.reader import Loaded, Reader, evaluations_of, read_ahead, row_keys
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, segment_problem
from rlpipe.store.signatures import PublicKey
from rlpipe.types import Commit, DataState, Node, Plan, Stage

Progress = Callable[[int, int], object]
"""Called with the number of checked iterations and the total."""


def check_branch(
    files: Files, branch: str, say: Progress | None = None, head: str | None = None
) -> list[Finding]:
    """Return all findings about a branch; an empty list is the proof. Reads every file of it.

    `head`: as for `check_store`. Raises: ObjectMissing if the branch does not exist; StoreError if
    the store does not answer; ConfigError.
    """
    return _audit_branch(Snapshot.take(files), branch, say, head).deduplicated().findings


def check_store(
    files: Files,
    run: str | None = None,
    say: Progress | None = None,
    head: str | None = None,
    signed_by: PublicKey | None = None,
) -> Report:
    """Check a run, or all runs, and report every object that no record explains.

    With a `run`, the records of all runs explain objects, but files, rows and bookkeeping are read
    for that run only. `head`: sha256 of a commit of the run, or at least 16 digits of it; the
    report names the commits that it proves. `signed_by`: without a `head`, use the newest commit
    that is signed with this key. Raises: ObjectMissing if the run does not exist, or the store is
    empty; StoreError if the store does not answer; ConfigError for an invalid `head`, or one
    without a run.
    """
    if (head is not None or signed_by is not None) and run is None:
        raise ConfigError(
            "the digest or key needs a run",
            where="--head or --public-key",
            found=head,
            do="give --run too",
        )
    snapshot = Snapshot.take(files)
    report = Report()
    runs = runs_of(snapshot) if run is None else [run]
    if not snapshot.seen and not snapshot.odd:
        raise ObjectMissing("the store is empty", where=files.root, do="give --home or --store")
    for number, branch in enumerate(runs):
        progress = _total_progress(say, number, len(runs))
        report.merge(_audit_branch(snapshot, branch, progress, head, signed_by))
    report_unexplained(snapshot, report)
    return report.deduplicated()


def _total_progress(say: Progress | None, number: int, runs: int) -> Progress | None:
    """Return the progress of one run as progress of all runs, as if all were equally long."""
    return None if say is None else lambda done, total: say(number * total + done, runs * total)


def _audit_branch(
    files: Snapshot,
    branch: str,
    say: Progress | None = None,
    head: str | None = None,
    signed_by: PublicKey | None = None,
) -> Report:
    """Check a branch. Raises: as `check_branch`."""
    report = Report()
    head = None if head is None else checked_head(head)
    # Read first: a commit that a driver adds during the audit is no concern of it.
    committed = committed_before(files, branch)
    found = history(files, branch)
    report.findings += [*found.findings, *lost_commits(files, branch, committed)]
    for unexpected in unexpected_files.of_branch(files, branch):
        report.add_finding("records", files.shown(unexpected.path), unexpected.problem)
    if signed_by is not None:
        signed = signed_head(files, report, found.commits, signed_by)
        head = head or signed
    own = [commit for commit in found.commits if commit.branch == branch]
    check_bookkeeping(files, report, branch, own, found.first, compared=head is not None)
    evaluations = evaluations_of(files, report.findings)
    reader = Reader(files, evaluations)
    audit = _BranchAudit(files, reader, report.findings, rooted=found.rooted)
    for digest in found.inits:
        audit.check_init(digest)
    audit.check_segments(dict.fromkeys([branch, *(commit.branch for commit in found.commits)]))
    uncommitted = sorted(
        set(noted_iterations(files, branch)) - {commit.iteration for commit in own}
    )
    if uncommitted:
        audit.add_sources(branch)
    loads = [
        *(partial(reader.load, commit) for commit in found.commits[::-1]),
        *(partial(reader.load_noted, branch, k) for k in uncommitted),
    ]
    for number, loaded in enumerate(read_ahead(loads), start=1):
        audit.check(loaded)
        if say is not None:
            say(number, len(loads))
    check_chain(files, report, branch, found.commits, evaluations, head)
    return report


class _BranchAudit:
    """Checks iterations in order, with the state of the branch so far."""

    def __init__(
        self, files: Snapshot, reader: Reader, findings: list[Finding], *, rooted: bool
    ) -> None:
        """`rooted`: the first weights of the branch and of its origins are known."""
        self.findings = findings
        self._files = files
        self._reader = reader
        self._rooted = rooted
        self._nodes = Nodes(files)
        self._branches = Branches(files)
        self._segments = Segments(files)
        self._complete = True
        """True as long as no commit of the history was missing."""
        self._next = 0
        self._data = DataState()
        self._drawn: set[str] = set()
        self._trained: dict[str, str] = {}
        """Name of the commit that trained a group."""
        self._rows: set[tuple[str | None, str]] = set()
        """(plan, group) of each row, and (None, group)."""
        self._known: set[str] = set()
        """Digests of the nodes and plans of the branch so far."""
        self._pointed: set[str] = set()
        """Digests of the segments that a pointer makes a state of the branch."""
        self._epochs: dict[str, int] = {}
        """Newest epoch of each branch so far."""
        self._sampling_branches: dict[str, str | None] = {}

    def _add(self, rule: str, where: str, problem: str) -> None:
        self.findings.append(Finding(rule, where, problem))

    def _read(self, where: str, read: Callable[[], Content]) -> Content | None:
        return read_or_report(self._files, self.findings, "records", where, read)

    def check_init(self, digest: str) -> None:
        """Check the node of the first weights, and the checkpoint of another branch behind it."""
        self._known.add(digest)
        where = f"init {digest}"
        if node := self._read(where, partial(self._nodes.get, Stage.INIT, digest)):
            self._reader.check_files(self.findings, node)
            if source := node.parents.get("start_from"):
                checkpoint = self._read(
                    f"{where} start_from", partial(self._nodes.get, Stage.CHECKPOINT, source)
                )
                if checkpoint:
                    self._reader.check_files(self.findings, checkpoint)
            if source := node.parents.get("adapter"):
                train = self._read(
                    f"{where} adapter", partial(self._nodes.get, Stage.TRAIN, source)
                )
                if train:
                    self._reader.check_files(self.findings, train)
        self.findings += self._reader.check_leaves(digest, where)

    def check_segments(self, branches: Iterable[str]) -> None:
        """Check the segments of branches and their checkpoints."""
        for branch in branches:
            where = f"segments of {branch}"
            for segment in self._read(where, partial(self._segments.of, branch)) or ():
                self._pointed.add(segment.segment)
                version = f"{where}: version {segment.version}"
                self._read(version, partial(self._nodes.get, Stage.SEGMENT, segment.segment))
                self.findings += self._reader.check_leaves(segment.segment, version)

    def add_sources(self, branch: str) -> None:
        """Add the nodes of the runs that a branch loads rollouts from. They may be parents."""
        for source in self._read(branch, partial(self._branches.sources, branch)) or ():
            read = self._read(source, partial(history, self._files, source))
            if read is not None:
                self.findings += read.findings
                self._known.update(read.inits, *(commit.nodes.values() for commit in read.commits))
            for k in noted_iterations(self._files, source):
                nodes = self._read(
                    commit_name(source, k), partial(read_note, self._files, source, k)
                )
                self._known.update((nodes or {}).values())

    def check(self, loaded: Loaded) -> None:
        """Check the next iteration."""
        commit = loaded.commit
        where = loaded.where
        self._complete = self._complete and commit.iteration == self._next
        # The plans of an iteration without a commit may be unknown. Later ones are then checked one
        # by one.
        self._next = commit.iteration + 1 if commit.plans else -1
        self.findings += loaded.findings
        self._known.update(commit.plans)
        if loaded.plans and self._complete:
            self._check_cursor(commit, loaded.plans, where)
            self._check_groups(commit, loaded.plans, where)
        if (newest := self._epochs.get(commit.branch, 0)) > commit.epoch:
            problem = f"its epoch is {commit.epoch}, after a commit of epoch {newest}"
            self._add("epochs", where, problem)
        self._epochs[commit.branch] = max(newest, commit.epoch)
        self._known.update(commit.nodes.values())
        for stage, node in loaded.nodes.items():
            if self._complete:
                self._check_parents(node, f"{where} {stage}")
        self._check_rows(loaded)
        self._check_foreign(loaded)
        self._check_rollout(loaded)
        if self._complete:
            self._check_group_rows(commit, where)
        self._data = commit.data

    def _check_group_rows(self, commit: Commit, where: str) -> None:
        """Check that trained and buffered groups have rows."""
        for group in sorted(set(commit.trained)):
            if (None, group) not in self._rows:
                self._add("rows", where, f"{group} was trained without rows in any rollout")
        for buffered in commit.data.buffer:
            group = buffered.group_id
            if buffered.plan not in self._known:
                problem = (
                    f"{group} is buffered with plan {buffered.plan}, which is not on this branch"
                )
                self._add("rows", where, problem)
            if buffered.rows is not None and (buffered.rows, group) not in self._rows:
                problem = f"{group} is buffered, and its recorded rows do not exist"
                self._add("rows", where, problem)

    def _check_cursor(self, commit: Commit, parts: list[Plan], where: str) -> None:
        before = self._data
        for number, plan in enumerate(parts):
            if plan.before != before:
                problem = f"part {number} starts at {plan.before}, the one before ended at {before}"
                self._add("cursor", where, problem)
            sampling = self._sampling_branch(commit.branch)
            expected = (sampling, commit.iteration, number)
            if sampling and (plan.branch, plan.iteration, plan.part) != expected:
                problem = f"part {number} is part {plan.part} of {plan.branch}/{plan.iteration}"
                self._add("cursor", where, problem)
            before = plan.after
        no_buffer = {"buffer": ()}
        if before.model_copy(update=no_buffer) != commit.data.model_copy(update=no_buffer):
            self._add("cursor", where, f"the plan ends at {before}, the commit at {commit.data}")

    def _sampling_branch(self, branch: str) -> str | None:
        """Return the branch that sampled a branch's rollouts; None if it cannot be read."""
        if branch not in self._sampling_branches:
            self._sampling_branches[branch] = self._read(
                f"sampling branch of {branch}", partial(self._branches.sampled_by, branch)
            )
        return self._sampling_branches[branch]

    def _check_rollout(self, loaded: Loaded) -> None:
        """Compare the outputs of the rollout with the commit."""
        outputs = loaded.rollout
        commit = loaded.commit
        where = loaded.where
        if outputs is None:
            return
        if outputs.after != commit.data.model_dump(mode="json"):
            problem = f"the rollout ends at {outputs.after}, the commit at {commit.data}"
            self._add("cursor", where, problem)
        if outputs.plans != list(commit.plans):
            problem = (
                f"the rollout names the plans {outputs.plans}, the commit {list(commit.plans)}"
            )
            self._add("records", where, problem)
        for group in sorted(set(commit.trained) - set(outputs.accepted)):
            self._add("batches", where, f"{group} was trained but not accepted")
        for group, reason in sorted(set(outputs.dropped.items()) - set(commit.dropped.items())):
            problem = f"the rollout dropped {group} ({reason}), the commit does not"
            self._add("accounted", where, problem)

    def _check_groups(self, commit: Commit, parts: list[Plan], where: str) -> None:
        """Check that every planned or buffered group has one outcome."""
        buffered = {group.group_id for group in self._data.buffer}
        times = Counter(group.group_id for plan in parts for group in plan.groups)
        planned = set(times)
        for group in sorted((planned - buffered) & self._drawn):
            self._add("drawn", where, f"{group} was drawn before")
        for group in sorted(group for group, count in times.items() if count > 1):
            self._add("drawn", where, f"{group} is planned {times[group]} times")
        self._drawn |= planned | buffered
        outcomes = Counter(
            [*commit.trained, *commit.dropped, *(group.group_id for group in commit.data.buffer)]
        )
        for group in sorted((planned | buffered) - set(outcomes)):
            self._add("accounted", where, f"{group} is neither trained nor dropped nor buffered")
        for group in sorted(set(outcomes) - planned - buffered):
            self._add("accounted", where, f"{group} was never drawn")
        for group, count in sorted(outcomes.items()):
            if count > 1:
                self._add("accounted", where, f"{group} is accounted for {count} times")
        for group in commit.trained:
            if (earlier := self._trained.setdefault(group, where)) != where:
                self._add("batches", where, f"{group} was trained in {earlier} already")

    def _check_parents(self, node: Node, where: str) -> None:
        for role, digest in node.parents.items():
            if digest in self._known:
                continue
            # Without a configuration the first weights are unknown. That is a finding already.
            if not self._rooted and self._nodes.find(Stage.INIT, digest) is not None:
                continue
            try:
                problem = segment_problem(self._nodes, digest, self._known)
                if problem is None and digest not in self._pointed:
                    problem = f"segment {digest} has no pointer on this branch"
            except StoreError as error:
                self._files.check_reachable()
                problem = str(error)
            if problem:
                self._add("records", where, f"its {role}: {problem}")
            else:
                self._known.add(digest)

    def _check_rows(self, loaded: Loaded) -> None:
        """Collect the groups that have rows, and check the groups of the batch."""
        for plan, table in loaded.rows.get(Stage.ROLLOUT, ()):
            for group in set(table["group_id"].to_pylist()):
                self._rows |= {(None, group), (plan, group)}
        batch = loaded.table(Stage.ADVANTAGE)
        if batch is None or not loaded.commit.plans:
            return
        differing = set(batch["group_id"].to_pylist()) ^ set(loaded.commit.trained)
        if differing:
            problem = f"batch rows and commit differ in {sorted(differing)}"
            self._add("batches", loaded.where, problem)

    def _check_foreign(self, loaded: Loaded) -> None:
        """Check that rows belong to planned groups, and to rows of the rollout."""
        samples = loaded.table(Stage.ROLLOUT)
        if samples is None:
            return
        sampled = set(row_keys(samples))
        if len(loaded.plans) == len(loaded.commit.plans):
            planned = {group.group_id for plan in loaded.plans for group in plan.groups}
            unplanned = sorted(key for key in sampled if key[0] not in planned)
            self._add_foreign(loaded, Stage.ROLLOUT, unplanned, "its group was not planned")
        for stage in (Stage.REWARD, Stage.ADVANTAGE):
            if (table := loaded.table(stage)) is not None:
                unsampled = sorted(set(row_keys(table)) - sampled)
                self._add_foreign(loaded, stage, unsampled, "no such row in the rollout")
        if (batch := loaded.table(Stage.ADVANTAGE)) is not None:
            changed = _changed_tokens(samples, batch)
            problem = "its tokens are not those of the rollout"
            self._add_foreign(loaded, Stage.ADVANTAGE, changed, problem)

    def _add_foreign(
        self, loaded: Loaded, stage: Stage, keys: list[tuple[str, int]], problem: str
    ) -> None:
        for group, index in keys:
            self._add("foreign", f"{loaded.where} {stage}", f"row {group}/{index}: {problem}")


def _changed_tokens(samples: pa.Table, batch: pa.Table) -> list[tuple[str, int]]:
    """Return the keys of batch rows with other tokens than in the rollout."""
    tokens = dict(zip(row_keys(batch), batch["tokens"].to_pylist(), strict=True))
    equal = set()
    compared = set()
    # A group may have rows in two shards. One of them must match.
    for key, prompt, response in zip(
        row_keys(samples),
        samples["prompt_ids"].to_pylist(),
        samples["response_ids"].to_pylist(),
        strict=True,
    ):
        if key in tokens:
            compared.add(key)
            if tokens[key] == prompt + response:
                equal.add(key)
    return sorted(compared - equal)
