"""Which run explains each object of a store, and which objects none explains.

An object is explained if a record of some run leads to it:

    records of a run        its configuration, commits, notes, pointers to segments, epochs, receipts, tables
    nodes, plans            those records name them, or a node that is explained was made of them
    plans of iterations that are still open, and nodes that grew from them: the run may adopt them when it goes on
    checkpoints, evaluations, pushes of weights that are explained
    data files, shards      a node that is explained names them; shards of an open plan
    draws, receipts         the plan or node that they are of is explained

What is left is named. It is a leftover, a note of the report, if a killed or replaced attempt of a
known run leaves such objects, or a run that was removed does until garbage collection takes it:
unfinished files, plans that were drawn in an iteration and are not in its commit with the nodes
that grew from them, complete files that no node names. All else is a finding: a node or plan that
no run refers to, a name that no writer gives, a link, a device, a file under two names.

Everything else goes on after an object that cannot be read. What only that object named is then
named as unexplained. Not here: whether the records of a run are right (`audit`, `bookkeeping`), and
removing anything (`gc`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.audit import unexpected_files
from rlpipe.store.audit.bookkeeping import check_epochs
from rlpipe.store.audit.reader import Finding, Report, read_or_report
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.branches import COMMIT_NAME, Branches, commit_name, config_path, parse_commit_name
from rlpipe.store.epochs import COLLECTOR, EPOCH_NAME, SKEW_S, Epochs
from rlpipe.store.nodes import LEAVES, Nodes
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import is_safe
from rlpipe.store.plans import DRAW_NAME, Plans, draw_path, plan_path
from rlpipe.store.receipts import NODE_RECEIPT_NAME, REMOVAL_NAME, NodeReceipt, Receipts
from rlpipe.store.segments import Segments
from rlpipe.types import DataState, Plan, Stage

NODE_NAME = re.compile(r"nodes/([a-z]+)/([0-9a-f]{64})\.json")
PLAN_NAME = re.compile(r"plans/([0-9a-f]{64})/plan\.json")
SHARD_FOLDER = re.compile(r"plans/([0-9a-f]{64})/(?:groups|cut)/")
DATA_FOLDER = re.compile(r"data/([a-z]+)/([0-9a-f]{64})/")
CHECKPOINT_FILE = re.compile(r"checkpoints/([^/]+)/iter_[0-9]{7,}/[0-9a-f]{12}/(?:[^/]+/)*[^/]+")
OF_WEIGHTS = (*LEAVES, Stage.SYNC)
"""Stages about weights, which may be recorded while no commit names those weights' successor."""
READERS = 8
NOBODY = "unexplained: no record of any run refers to it (`python -m tools.gc` removes what nothing refers to)"
GIVEN_UP = "left over from an attempt that was killed or replaced, or from a run that was removed; `python -m tools.gc` removes it"

Cursor = tuple[int, int, int]
"""Where the data source stands: epoch, offset, draws."""


class NodeSeen(NamedTuple):
    """What a node says that explains other objects."""

    stage: Stage
    parents: tuple[str, ...]
    files: tuple[str, ...]
    plans: tuple[str, ...]
    after: Cursor | None
    """Of a rollout: where it left the data source."""


def explain(files: Snapshot, report: Report) -> None:
    """Name every object that no run explains. Raises: StoreError if the store does not answer."""
    _Explainer(files, report).explain()


def runs_of(files: Snapshot) -> list[str]:
    """The runs of a store: whatever has a folder among the branches and more in it than epochs."""
    found = set()
    odd = [one.path for one in files.odd if one.path.startswith("branches/")]
    for path in filter(is_safe, (*files.list("branches"), *odd)):
        if path.count("/") > 1 and not EPOCH_NAME.fullmatch(path):
            found.add(path.split("/")[1])
    return sorted(found - {COLLECTOR})


class _Explainer:
    """The closure over one listing: what is explained, and what is left over."""

    def __init__(self, files: Snapshot, report: Report) -> None:
        self._files = files
        self._report = report
        self._nodes, self._branches, self._plans = Nodes(files), Branches(files), Plans(files)
        self._seen: dict[str, NodeSeen] = {}
        """Nodes that can be read, by digest."""
        self._children: dict[str, list[str]] = defaultdict(list)
        self._runs = runs_of(files)
        self._removed: set[str] = set()
        """Branches of which there are only epochs."""
        self._next: dict[str, int] = {}
        """The first iteration that a branch has not committed."""
        self._cursors: set[Cursor] = {_cursor(DataState())}
        self._named: set[str] = set()
        """Digests that the records of runs name."""
        self._explained: set[str] = set()
        """Digests of nodes and plans."""
        self._left: set[str] = set()
        """Digests of nodes and plans that are left over."""
        self._plan_seen: dict[str, Plan | None] = {}

    def explain(self) -> None:
        self._name_odd()
        self._read_nodes()
        for branch in self._runs:
            self._read_run(branch)
        self._read_other_epochs()
        self._reach(self._named, self._explained)
        self._judge_plans()
        self._judge_nodes()
        self._judge_files()

    def _wrong(self, path: str, problem: str) -> None:
        """Name an object, unless the checks of a run did."""
        where = self._files.shown(path)
        if not any(where == one.where or where in one.problem for one in self._report.findings):
            self._report.add_finding("unexplained", where, problem)

    def _left_over(self, path: str, problem: str = GIVEN_UP) -> None:
        where = self._files.shown(path)
        if not any(where == one.where for one in self._report.findings):
            self._report.add_note("leftover", where, problem)

    def _name_odd(self) -> None:
        for odd in self._files.odd:
            self._wrong(odd.path, f"this is {odd.kind}, where only files are")
        for unfinished in self._files.unfinished:
            self._left_over(
                unfinished.path, "an unfinished file: it is being written, or its writer was killed"
            )
        names = defaultdict(list)
        for seen in self._files.seen.values():
            if seen.identity is not None:
                names[seen.identity].append(seen.path)
        for paths in names.values():
            for path in sorted(paths)[1:]:
                self._wrong(
                    path,
                    f"the same file has another name in the store: {self._files.shown(min(paths))}",
                )

    def _read_nodes(self) -> None:
        wanted: list[tuple[str, Stage, str]] = []
        for path in self._files.list("nodes"):
            match = NODE_NAME.fullmatch(path)
            if match is None or match[1] not in set(Stage):
                self._wrong(path, unexpected_files.NO_NAME)
            else:
                wanted.append((path, Stage(match[1]), match[2]))
        with ThreadPoolExecutor(READERS) as pool:
            for (path, _, digest), (node, problems) in zip(
                wanted, pool.map(lambda one: self._read_node(*one), wanted), strict=True
            ):
                for problem in problems:
                    self._wrong(path, problem.problem)
                if node is not None:
                    self._seen[digest] = node
                    for parent in node.parents:
                        self._children[parent].append(digest)

    def _read_node(
        self, path: str, stage: Stage, digest: str
    ) -> tuple[NodeSeen | None, list[Finding]]:
        problems: list[Finding] = []
        node = read_or_report(
            self._files,
            problems,
            "records",
            path,
            partial(self._nodes.get, stage, digest),
            required=False,
        )
        if node is None:
            return None, problems
        config = node.config
        outputs = node.outputs
        more = (
            [config[key] for key in ("of", "judged_by") if isinstance(config.get(key), str)]
            if stage is Stage.ROLLOUT
            else []
        )
        plans = outputs.get("plans") if stage is Stage.ROLLOUT else None
        said = (
            tuple(one for one in plans if isinstance(one, str)) if isinstance(plans, list) else ()
        )
        files = tuple(record.path for record in node.files)
        return NodeSeen(
            stage, (*node.parents.values(), *more), files, said, _after(outputs.get("after"))
        ), problems

    def _read_run(self, branch: str) -> None:
        """What the records of a run name. A record that cannot be read is a finding, as in the
        audit of that run."""
        record = self._read(branch, lambda: self._branches.get(branch))
        if record is not None:
            self._named.add(record.init)
        committed = self._branches.committed(branch)
        with ThreadPoolExecutor(READERS) as pool:
            reads = [
                (commit_name(branch, k), partial(self._branches.read, branch, k)) for k in committed
            ]
            commits = [
                one for one in pool.map(lambda asked: self._read(*asked), reads) if one is not None
            ]
        for commit in commits:
            self._named.update(commit.plans, commit.nodes.values())
            self._cursors.add(_cursor(commit.data))
        origin = parse_commit_name(record.parent)[1] if record is not None and record.parent else -1
        self._next[branch] = max(committed, default=origin) + 1
        for segment in (
            self._read(f"segments of {branch}", lambda: Segments(self._files).of(branch)) or ()
        ):
            self._named.add(segment.segment)
        for k in noted_iterations(self._files, branch):
            nodes = self._read(commit_name(branch, k), partial(read_note, self._files, branch, k))
            self._named.update((nodes or {}).values())
        for stray in unexpected_files.of_branch(self._files, branch):
            self._wrong(stray.path, stray.problem)

    def _read(self, where: str, read: Callable):
        return read_or_report(self._files, self._report.findings, "records", where, read)

    def _read_other_epochs(self) -> None:
        """Epochs of the collector, and of runs that were removed or never began: they stay for
        good."""
        found = {
            path.split("/")[1]
            for path in self._files.list("branches")
            if EPOCH_NAME.fullmatch(path)
        }
        for branch in sorted(found - set(self._runs)):
            check_epochs(self._files, self._report, branch)
            if branch != COLLECTOR:
                self._removed.add(branch)
                problem = "only epochs are there: the run was removed, or was never begun"
                self._report.add_note("leftover", self._files.shown(f"branches/{branch}"), problem)
        for path in self._files.list(f"branches/{COLLECTOR}"):
            if not EPOCH_NAME.fullmatch(path):
                self._wrong(path, unexpected_files.NO_NAME)
        for path in (
            *self._files.list("branches"),
            *self._files.list("rollouts"),
            *self._files.list("gates"),
        ):
            folder, _, rest = path.partition("/")
            branch, _, name = rest.partition("/")
            if not name:
                self._wrong(path, unexpected_files.NO_NAME)
            elif folder != "branches" and branch not in self._runs:
                self._wrong(path, "unexplained: there is no run of this name")
        for branch in self._runs:
            if not self._files.exists(config_path(branch)) and any(
                COMMIT_NAME.fullmatch(path) for path in self._files.list(f"branches/{branch}")
            ):
                self._wrong(config_path(branch), "a run has commits and no configuration")

    def _reach(self, digests: Iterable[str], into: set[str]) -> None:
        """Add nodes and plans with all that they were made of."""
        waiting = list(digests)
        while waiting:
            digest = waiting.pop()
            if digest in into:
                continue
            into.add(digest)
            if (node := self._seen.get(digest)) is not None:
                waiting += [*node.parents, *node.plans]
                if node.after is not None and into is self._explained:
                    self._cursors.add(node.after)

    def _grow(self, digests: Iterable[str], into: set[str]) -> None:
        """Add nodes and plans with all that was made from them, and of what."""
        waiting = list(digests)
        grown = set[str]()
        while waiting:
            digest = waiting.pop()
            if digest not in grown:
                grown.add(digest)
                self._reach([digest], into)
                waiting += self._children.get(digest, ())

    def _judge_plans(self) -> None:
        """Tell the plans that no record names apart: of an open iteration, left over, or
        nobody's."""
        loose: dict[str, Plan] = {}
        for path in self._files.list("plans"):
            match = PLAN_NAME.fullmatch(path)
            if match is None or match[1] in self._explained:
                continue
            plan = self._plan(match[1])
            if plan is not None:
                loose[match[1]] = plan
        open_ones = set[str]()
        passed = set[str]()
        for digest in [digest for digest, plan in loose.items() if plan.branch in self._removed]:
            passed.add(digest)
            del loose[digest]
        for digest in [digest for digest, plan in loose.items() if plan.branch not in self._next]:
            self._wrong(
                plan_path(digest),
                f"unexplained: it is a plan of {loose.pop(digest).branch!r}, and there is no such run",
            )
        while found := [
            digest for digest, plan in loose.items() if _cursor(plan.before) in self._cursors
        ]:
            for digest in found:  # a part follows the one before it, which may be loose too
                plan = loose.pop(digest)
                (open_ones if plan.iteration >= self._next[plan.branch] else passed).add(digest)
                self._cursors.add(_cursor(plan.after))
        for digest in loose:
            self._wrong(
                plan_path(digest),
                "unexplained: it begins where no iteration of its run left the data source",
            )
        self._grow(open_ones, self._explained)
        self._add_leaves(self._explained)
        self._grow(passed, self._left)
        self._add_leaves(self._left)
        self._left -= self._explained

    def _add_leaves(self, into: set[str]) -> None:
        """Checkpoints, evaluations and pushes of weights."""
        for digest, node in self._seen.items():
            about = node.stage in OF_WEIGHTS and bool(node.parents)
            if about and all(
                parent in into or parent in self._explained for parent in node.parents
            ):
                into.add(digest)

    def _plan(self, digest: str) -> Plan | None:
        """A plan that can be read; what is wrong with another is named."""
        if digest not in self._plan_seen:
            problems: list[Finding] = []
            path = plan_path(digest)
            read = partial(self._plans.read, digest)
            self._plan_seen[digest] = read_or_report(
                self._files, problems, "records", path, read, required=False
            )
            for problem in problems:
                self._wrong(path, problem.problem)
        return self._plan_seen[digest]

    def _judge_nodes(self) -> None:
        beginning = self._removed or self._driven()
        for digest, node in self._seen.items():
            path = f"nodes/{node.stage}/{digest}.json"
            if digest in self._explained:
                continue
            if digest in self._left:
                self._left_over(path)
            elif node.stage is Stage.INIT and beginning:
                self._left_over(
                    path, "first weights of a run that was removed, was not begun, or begins now"
                )
            elif (
                node.stage is Stage.SEGMENT
                and node.parents
                and all(one in self._explained for one in node.parents)
            ):
                self._left_over(path, "a state that was made anew, and that no run went on from")
            else:
                self._wrong(path, NOBODY)
                continue
            self._left.add(digest)

    def _driven(self) -> bool:
        """True if somebody drives a run now: then a node may be there before the record that names
        it."""
        epochs = Epochs(self._files)
        leases = [
            read_or_report(self._files, [], "epochs", run, partial(epochs.newest, run))
            for run in {*self._runs, *self._removed}
        ]
        return any(lease is not None and not lease.expired(SKEW_S) for lease in leases)

    def _judge_files(self) -> None:
        explained = set[str]()
        left = set[str]()
        for digest, node in self._seen.items():
            (explained if digest in self._explained else left).update(node.files)
        judges = {
            "branches": None,
            "rollouts": None,
            "gates": None,
            "nodes": None,
            "plans": self._judge_shard,
            "data": self._judge_data,
            "checkpoints": self._judge_checkpoint,
            "draws": self._judge_draw,
            "receipts": self._judge_receipt,
        }
        for path in self._files.list():
            folder = path.partition("/")[0]
            if path in explained or (folder in judges and judges[folder] is None and "/" in path):
                continue
            if path in left:
                self._left_over(path)
            elif "/" not in path or folder not in judges:
                self._wrong(path, f"unexplained: {unexpected_files.NO_NAME}")
            elif (judge := judges[folder]) is not None:
                judge(path)

    def _judge_shard(self, path: str) -> None:
        """Of a plan, or of its rows that no rollout names."""
        if match := PLAN_NAME.fullmatch(path):
            if match[1] in self._left and match[1] not in self._explained:
                self._left_over(path)
            return
        match = SHARD_FOLDER.match(path)
        digest = match[1] if match else ""
        if not self._files.exists(plan_path(digest)) if digest else True:
            self._wrong(
                path,
                "its plan is not there, and a plan is written first"
                if digest
                else unexpected_files.NO_NAME,
            )
        elif problem := unexpected_files.misnamed(self._files, path, unexpected_files.SHARD):
            self._wrong(path, problem)
        elif digest not in self._open():
            self._left_over(path)

    def _open(self) -> set[str]:
        """Plans that are explained and that no record names: rows are still being added to them."""
        return self._explained - self._named

    def _judge_data(self, path: str) -> None:
        match = DATA_FOLDER.match(path)
        if problem := unexpected_files.misnamed(self._files, path, unexpected_files.DATA):
            self._wrong(path, problem)
        elif match is None or match[1] not in set(Stage):
            self._wrong(path, unexpected_files.NO_NAME)
        else:
            self._left_over(
                path,
                "no node names it: its attempt was killed or replaced, goes on now, or its node is gone",
            )

    def _judge_checkpoint(self, path: str) -> None:
        match = CHECKPOINT_FILE.fullmatch(path)
        if match is None or match[1] not in {*self._runs, *self._removed}:
            self._wrong(path, f"unexplained: {unexpected_files.NO_NAME}")
        else:
            self._left_over(
                path,
                "no checkpoint names it: its upload was killed or goes on now, or its node is gone",
            )

    def _judge_draw(self, path: str) -> None:
        if not DRAW_NAME.fullmatch(path):
            self._wrong(path, unexpected_files.NO_NAME)
            return
        problems: list[Finding] = []
        digest = read_or_report(
            self._files,
            problems,
            "records",
            path,
            partial(self._plans.drawn_in, path),
            required=False,
        )
        if digest is not None and not self._files.exists(plan_path(digest)):
            problems.append(Finding("records", path, f"it names plan {digest}, which is not there"))
        elif digest is not None and (plan := self._plan(digest)) is not None:
            if draw_path(plan.branch, plan.iteration, plan.part, plan.before) != path:
                problems.append(
                    Finding(
                        "records",
                        path,
                        f"it names plan {digest}, which was drawn from another state",
                    )
                )
            elif digest in self._left:
                self._left_over(path)
            elif digest not in self._explained:
                problems.append(Finding("records", path, NOBODY))
        for problem in problems:
            self._wrong(path, problem.problem)

    def _judge_receipt(self, path: str) -> None:
        match = NODE_RECEIPT_NAME.fullmatch(path)
        if REMOVAL_NAME.fullmatch(path):
            self._read(path, partial(Receipts(self._files).get_removed, path))
            return
        if match is None or match[1] not in LEAVES:
            self._wrong(path, unexpected_files.NO_NAME)
            return
        problems: list[Finding] = []
        receipt = read_or_report(
            self._files,
            problems,
            "records",
            path,
            partial(Receipts(self._files).get_node, path),
            required=False,
        )
        if receipt is not None:
            problems += [Finding("records", path, problem) for problem in self._unlike(receipt)]
        for problem in problems:
            self._wrong(path, problem.problem)

    def _unlike(self, receipt: NodeReceipt) -> Iterator[str]:
        """What does not fit between a receipt and its node."""
        path = f"nodes/{receipt.stage}/{receipt.digest}.json"
        if not self._files.exists(path):
            if self._files.exists(
                f"receipts/{receipt.stage}/{receipt.digest}.json"
            ):  # else both are being removed
                yield f"{receipt.stage} {receipt.digest} was recorded, and its node is gone"
        elif receipt.digest in self._seen:
            try:
                node = self._nodes.get(receipt.stage, receipt.digest)
            except ObjectCorrupt:  # named already
                return
            if NodeReceipt.of(node) != receipt:
                yield f"another record of {receipt.stage} {receipt.digest} was here: its receipt does not fit this one"


def _cursor(state: DataState) -> Cursor:
    return state.epoch, state.offset, state.draws


def _after(said: object) -> Cursor | None:
    """Where a rollout says that it left the data source; None if it says nothing of that form."""
    values = (
        [said.get(key, 0) for key in ("epoch", "offset", "draws")] if isinstance(said, dict) else []
    )
    return (
        (values[0], values[1], values[2])
        if values and all(isinstance(one, int) for one in values)
        else None
    )
