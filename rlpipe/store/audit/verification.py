"""The audit of a branch: does the store hold what its commits say, and was every group used exactly
once?

Along the branch, and through what it was forked from, oldest first:

    drawn       a planned group that does not come from the buffer was never drawn before, and is planned in one part only
    accounted   each group planned or buffered is then trained, dropped with a reason, or in the buffer: one of them
    batches     the rows that were trained are those of the groups the commit says, which its rollout accepted; none is
                trained twice
    rows        a trained group has rows in a rollout of the branch; so has a buffered one, where it says they lie
    foreign     a row of a rollout is of a group that was planned; a reward's and a batch's rows are rows of the rollout, and the
                batch has their very tokens
    cursor      each plan starts where the commit before it (or the part before it) left the data source, and the commit ends
                where its rollout says
    epochs      no commit was made under an older epoch than one before it
    records     commits follow each other, and none is gone or another than it was; nodes are there, have the digest of their
                inputs, and parents on this branch
    files       data files, checkpoints, evaluations are there with their size, checksum and rows; nothing lies in the folders
                of the run that no writer put there
    tables      and all else that stands beside the commits: `bookkeeping`
    chain       each record has the bytes that a commit named: `audit_chain`

Of a store (`check_store`): every run so, and each object is explained by the records of some run,
or is named (`explained`).

If a commit of the history is missing, what comes after it is checked by itself: records, files and
foreign rows. An iteration without a commit, only sampled or reprocessed, is checked as if what its
last stage chose had been trained; its batch was scored with weights of the run that its rollouts
are of.

One object that cannot be read is a finding, and the audit goes on: also a folder, a link or a FIFO
under the name of a file, a name that is no text, a file that may not be read. The run may go on
meanwhile; its branches are listed last, once.

The checksums are the store's own. A record that was rewritten together with its checksum, and with
every commit from there on, is not seen without the digest of a commit that was kept elsewhere
(`head`). Nor is what a killed driver leaves in the same way (`bookkeeping`). Not here: whether the
numbers in them are right (replay), what is unusual (`anomalies`), or repairs.
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
from rlpipe.store.audit.reachability import explain, runs_of
from rlpipe.store.audit.reader import (
    Finding,
    Loaded,
    Reader,
    Report,
    committed_before,
    evaluations_of,
    history,
    lost_commits,
    read_ahead,
    row_keys,
)
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.branches import Branches, commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, segment_problem
from rlpipe.store.signatures import PublicKey
from rlpipe.types import Commit, DataState, Node, Plan, Stage

Say = Callable[[int, int], object]
"""Told of progress: iterations done, and of how many."""


def check_branch(
    files: Files, branch: str, say: Say | None = None, head: str | None = None
) -> list[Finding]:
    """Everything wrong with a branch; an empty list is the proof. Reads every file of it. `head`:
    as of `check_store`.

    Raises: ObjectMissing if there is no such branch; StoreError if the store does not answer;
    ConfigError.
    """
    return audit_branch(Snapshot.take(files), branch, say, head).deduplicated().findings


def check_store(
    files: Files,
    run: str | None = None,
    say: Say | None = None,
    head: str | None = None,
    signed_by: PublicKey | None = None,
) -> Report:
    """Everything wrong with a store: with this run, or with all, and every object that no run
    explains.

    With a `run` the objects are explained by the records of all runs; files, rows and bookkeeping
    are read of that run alone. `head`: sha256 of a commit of the run, or 16 digits of it or more,
    kept since it was made; the report says what it proves. `signed_by`: without a `head`, the
    newest commit that is signed with this key takes its place. Raises: ObjectMissing if there is no
    such run, or no object at all; StoreError if the store does not answer; ConfigError for a `head`
    that is no digest, or is given without a run.
    """
    if (head is not None or signed_by is not None) and run is None:
        raise ConfigError(
            "whose digest is this?", where="--head or --public-key", found=head, do="give --run too"
        )
    snapshot = Snapshot.take(files)
    report = Report()
    runs = runs_of(snapshot) if run is None else [run]
    if not snapshot.seen and not snapshot.odd:
        raise ObjectMissing("there is no store here", where=files.root, do="give --home or --store")
    for number, branch in enumerate(runs):
        report.merge(
            audit_branch(snapshot, branch, _of_all(say, number, len(runs)), head, signed_by)
        )
    explain(snapshot, report)
    return report.deduplicated()


def _of_all(say: Say | None, number: int, runs: int) -> Say | None:
    """Progress of one run as progress of all of them, as if each had as many iterations."""
    return None if say is None else lambda done, total: say(number * total + done, runs * total)


def audit_branch(
    files: Snapshot,
    branch: str,
    say: Say | None = None,
    head: str | None = None,
    signed_by: PublicKey | None = None,
) -> Report:
    """Check a branch. Raises: as `check_branch`."""
    report = Report()
    head = None if head is None else checked_head(head)
    committed = committed_before(
        files, branch
    )  # first: what a driver commits meanwhile is no matter
    found = history(files, branch)
    report.findings += [*found.findings, *lost_commits(files, branch, committed)]
    for stray in unexpected_files.of_branch(files, branch):
        report.add_finding("records", files.shown(stray.path), stray.problem)
    if signed_by is not None:
        signed = signed_head(files, report, found.commits, signed_by)
        head = head or signed
    own = [commit for commit in found.commits if commit.branch == branch]
    check_bookkeeping(files, report, branch, own, found.first, compared=head is not None)
    evaluations = evaluations_of(files, report.findings)
    reader = Reader(files, evaluations)
    audit = _Audit(files, reader, report.findings, rooted=found.rooted)
    for digest in found.inits:
        audit.check_init(digest)
    audit.check_segments(dict.fromkeys([branch, *(commit.branch for commit in found.commits)]))
    open_ones = sorted(set(noted_iterations(files, branch)) - {commit.iteration for commit in own})
    if open_ones:
        audit.know_sources(branch)
    asked = [
        *(partial(reader.load, commit) for commit in found.commits[::-1]),
        *(partial(reader.load_noted, branch, k) for k in open_ones),
    ]
    for number, loaded in enumerate(read_ahead(asked), start=1):
        audit.check(loaded)
        if say is not None:
            say(number, len(asked))
    check_chain(files, report, branch, found.commits, evaluations, head)
    return report


class _Audit:
    """What is known so far along the branch."""

    def __init__(
        self, files: Snapshot, reader: Reader, findings: list[Finding], *, rooted: bool
    ) -> None:
        """`rooted`: the first weights of the branch and of its origins are known."""
        self.findings = findings
        self._reader = reader
        self._rooted = rooted
        self._whole = True
        """True as long as no commit of the history was missing."""
        self._files = files
        self._pointed: set[str] = set()
        """Digests of the segments that a pointer makes a state of the branch."""
        self._nodes, self._branches, self._segments = Nodes(files), Branches(files), Segments(files)
        self._data = DataState()
        self._drawn: set[str] = set()
        self._trained: dict[str, str] = {}
        self._rows: set[tuple[str | None, str]] = set()
        """(plan, group) whose rows lie below that plan, and (None, group)."""
        self._known: set[str] = set()
        self._epochs: dict[str, int] = {}
        self._planned_by: dict[str, str | None] = {}
        self._next = 0

    def add(self, rule: str, where: str, problem: str) -> None:
        self.findings.append(Finding(rule, where, problem))

    def check_init(self, digest: str) -> None:
        """The node of the first weights, and the checkpoint of another branch that they were taken
        from."""
        self._known.add(digest)
        where = f"init {digest}"
        if node := self._reader.readable(
            self.findings, "records", where, lambda: self._nodes.get(Stage.INIT, digest)
        ):
            self._reader.check_files(self.findings, node)
            if source := node.parents.get("start_from"):
                find = partial(self._nodes.get, Stage.CHECKPOINT, source)
                if checkpoint := self._reader.readable(
                    self.findings, "records", f"{where} start_from", find
                ):
                    self._reader.check_files(self.findings, checkpoint)
        self.findings += self._reader.check_leaves(digest, where)

    def check_segments(self, branches: Iterable[str]) -> None:
        """The states that replays made anew, each with its checkpoint."""
        for branch in branches:
            where = f"segments of {branch}"
            for segment in (
                self._reader.readable(
                    self.findings, "records", where, lambda b=branch: self._segments.of(b)
                )
                or ()
            ):
                self._pointed.add(segment.segment)
                named = f"{where}: version {segment.version}"
                self._reader.readable(
                    self.findings,
                    "records",
                    named,
                    lambda s=segment: self._nodes.get(Stage.SEGMENT, s.segment),
                )
                self.findings += self._reader.check_leaves(segment.segment, named)

    def know_sources(self, branch: str) -> None:
        """The runs whose rollouts a branch loads: what was made of them there may be a parent
        here."""
        for source in (
            self._reader.readable(
                self.findings, "records", branch, lambda: self._branches.sources(branch)
            )
            or ()
        ):
            read = self._reader.readable(
                self.findings, "records", source, lambda source=source: history(self._files, source)
            )
            if read is not None:
                self.findings += read.findings
                self._known.update(read.inits, *(commit.nodes.values() for commit in read.commits))
            for k in noted_iterations(self._files, source):
                where = commit_name(source, k)
                nodes = self._reader.readable(
                    self.findings,
                    "records",
                    where,
                    lambda k=k, s=source: read_note(self._files, s, k),
                )
                self._known.update((nodes or {}).values())

    def check(self, loaded: Loaded) -> None:
        """One iteration."""
        commit = loaded.commit
        where = loaded.where
        self._whole = self._whole and commit.iteration == self._next
        self._next = commit.iteration + 1 if commit.plans else -1
        self.findings += loaded.findings
        self._known.update(commit.plans)
        if loaded.plans and self._whole:
            self._check_cursor(commit, loaded.plans, where)
            self._check_groups(commit, loaded.plans, where)
        if (newest := self._epochs.get(commit.branch, 0)) > commit.epoch:
            self.add(
                "epochs",
                where,
                f"it was made under epoch {commit.epoch}, after a commit of epoch {newest}",
            )
        self._epochs[commit.branch] = max(newest, commit.epoch)
        self._known.update(commit.nodes.values())
        for stage, node in loaded.nodes.items():
            if self._whole:
                self._check_parents(node, f"{where} {stage}")
        self._check_rows(loaded)
        self._check_foreign(loaded)
        self._check_rollout(loaded)
        if self._whole:
            self._check_homes(commit, where)
        self._data = commit.data

    def _check_homes(self, commit: Commit, where: str) -> None:
        """Do trained and waiting groups have the rows that they must have?"""
        for group in sorted(set(commit.trained)):
            if (None, group) not in self._rows:
                self.add("rows", where, f"{group} was trained without rows in any rollout")
        for waiting in commit.data.buffer:
            if waiting.plan not in self._known:
                self.add(
                    "rows",
                    where,
                    f"{waiting.group_id} waits with plan {waiting.plan}, which is not on this branch",
                )
            if waiting.rows is not None and (waiting.rows, waiting.group_id) not in self._rows:
                self.add("rows", where, f"{waiting.group_id} waits without the rows it says it has")

    def _check_cursor(self, commit: Commit, parts: list[Plan], where: str) -> None:
        before = self._data
        for number, plan in enumerate(parts):
            if plan.before != before:
                self.add(
                    "cursor",
                    where,
                    f"part {number} starts at {plan.before}, what is before it ended at {before}",
                )
            sampled_by = self._sampled_by(commit.branch)
            if sampled_by and (plan.branch, plan.iteration, plan.part) != (
                sampled_by,
                commit.iteration,
                number,
            ):
                self.add(
                    "cursor",
                    where,
                    f"part {number} is part {plan.part} of {plan.branch}/{plan.iteration}",
                )
            before = plan.after
        if before.model_copy(update={"buffer": ()}) != commit.data.model_copy(
            update={"buffer": ()}
        ):
            self.add("cursor", where, f"the plan ends at {before}, the commit at {commit.data}")

    def _sampled_by(self, branch: str) -> str | None:
        """The branch that planned what a branch trains on: itself, or the one whose rollouts it
        loads; None if nobody can say."""
        if branch not in self._planned_by:
            where = f"what {branch} was sampled by"
            by = self._reader.readable(
                self.findings, "records", where, lambda: self._branches.sampled_by(branch)
            )
            self._planned_by[branch] = by
        return self._planned_by[branch]

    def _check_rollout(self, loaded: Loaded) -> None:
        said = loaded.rollout
        commit = loaded.commit
        where = loaded.where
        if said is None:
            return
        if said.after != commit.data.model_dump(mode="json"):
            self.add(
                "cursor", where, f"the rollout ends at {said.after}, the commit at {commit.data}"
            )
        if said.plans != list(commit.plans):
            self.add(
                "records",
                where,
                f"the rollout names the plans {said.plans}, the commit {list(commit.plans)}",
            )
        for group in sorted(set(commit.trained) - set(said.accepted)):
            self.add("batches", where, f"{group} was trained but not accepted")
        for group in sorted(set(said.dropped.items()) - set(commit.dropped.items())):
            self.add(
                "accounted",
                where,
                f"the rollout dropped {group[0]} ({group[1]}), the commit does not say so",
            )

    def _check_groups(self, commit: Commit, parts: list[Plan], where: str) -> None:
        buffered = {waiting.group_id for waiting in self._data.buffer}
        times = Counter(group.group_id for plan in parts for group in plan.groups)
        planned = set(times)
        for group in sorted((planned - buffered) & self._drawn):
            self.add("drawn", where, f"{group} was drawn before")
        for group in sorted(group for group, count in times.items() if count > 1):
            self.add("drawn", where, f"{group} is planned {times[group]} times")
        self._drawn |= planned | buffered
        fates = Counter(
            [
                *commit.trained,
                *commit.dropped,
                *(waiting.group_id for waiting in commit.data.buffer),
            ]
        )
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

    def _check_parents(self, node: Node, where: str) -> None:
        for role, digest in node.parents.items():
            if digest in self._known:
                continue
            if not self._rooted and self._nodes.find(Stage.INIT, digest) is not None:
                continue  # of a branch whose configuration cannot be read, which is a finding
            try:
                problem = segment_problem(self._nodes, digest, self._known)
                if problem is None and digest not in self._pointed:
                    problem = (
                        f"segment {digest} has no pointer that makes it a state of this branch"
                    )
            except StoreError as error:
                self._files.check_reachable()
                problem = str(error)
            if problem:
                self.add("records", where, f"its {role}: {problem}")
            else:
                self._known.add(digest)

    def _check_rows(self, loaded: Loaded) -> None:
        """Which groups have rows, and whether the batch is of the trained ones."""
        for plan, table in loaded.rows.get(Stage.ROLLOUT, ()):
            self._rows |= {
                (place, group)
                for group in set(table["group_id"].to_pylist())
                for place in (None, plan)
            }
        batch = loaded.table(Stage.ADVANTAGE)
        if (
            batch is not None
            and loaded.commit.plans
            and (groups := set(batch["group_id"].to_pylist())) != set(loaded.commit.trained)
        ):
            self.add(
                "batches",
                loaded.where,
                f"batch rows and commit differ in {sorted(groups ^ set(loaded.commit.trained))}",
            )

    def _check_foreign(self, loaded: Loaded) -> None:
        """Rows that nobody planned, or that are of no rollout."""
        samples = loaded.table(Stage.ROLLOUT)
        if samples is None:
            return
        sampled = set(row_keys(samples))
        if len(loaded.plans) == len(loaded.commit.plans):
            planned = {group.group_id for plan in loaded.plans for group in plan.groups}
            strangers = sorted(key for key in sampled if key[0] not in planned)
            self._add_foreign(loaded, Stage.ROLLOUT, strangers, "its group was not planned")
        for stage in (Stage.REWARD, Stage.ADVANTAGE):
            if (table := loaded.table(stage)) is not None:
                self._add_foreign(
                    loaded,
                    stage,
                    sorted(set(row_keys(table)) - sampled),
                    "no such row in the rollout",
                )
        if (batch := loaded.table(Stage.ADVANTAGE)) is not None:
            self._add_foreign(
                loaded,
                Stage.ADVANTAGE,
                _other_tokens(samples, batch),
                "its tokens are not those of the rollout",
            )

    def _add_foreign(
        self, loaded: Loaded, stage: Stage, found: list[tuple[str, int]], problem: str
    ) -> None:
        for group, index in found:
            self.add("foreign", f"{loaded.where} {stage}", f"row {group}/{index}: {problem}")


def _other_tokens(samples: pa.Table, batch: pa.Table) -> list[tuple[str, int]]:
    """Rows of the batch whose tokens no row of that name in the rollout has."""
    wanted = dict(zip(row_keys(batch), batch["tokens"].to_pylist(), strict=True))
    right = set()
    seen = set()
    for key, prompt, response in zip(
        row_keys(samples),
        samples["prompt_ids"].to_pylist(),
        samples["response_ids"].to_pylist(),
        strict=True,
    ):
        if key in wanted:
            seen.add(key)
            if wanted[key] == prompt + response:
                right.add(key)
    return sorted(seen - right)
